"""Embedding rows on the CPU: gather them into x0, sum their gradients; one launch for all tables.

    embedding_stack_fwd   x0[m, columns of table k] = table_k[ids[m, k]]                      (eq. 1 and 2)
                          x0[m, columns of a bag]   = Σ_n coefficient_n table[values_n]       over the values n of row m
    embedding_stack_bwd   for each table its distinct ids, ascending, and Σ dx0 over the rows m that share one

Each table is a tensor of its own, with its own width, so the kernels take arrays of addresses. Only rows named in the
batch are read, however high the tables are; the next row is prefetched while one is copied, because nearly every row is
a cache miss. Ids are checked as they are read. ``row_sums.py`` has the sums.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastcross.kernels.cpu.compile import compiled
from fastcross.kernels.cpu.layout import INDEX, Layout, rows, whole
from fastcross.kernels.cpu.row_sums import stack_bwd
from fastcross.kernels.cpu.simd import at, copy, least, pointer_to
from fastcross.kernels.cpu.tables import describe, prefetch_row, unit_columns
from fastcross.kernels.cpu.threads import run_task
from fastcross.kernels.cpu.unpack import report
from fastcross.kernels.embedding import (
    check_offsets,
    empty_x0,
    in_dense_form,
    out_of_range,
    pooling_coefficients,
    sum_bag,
)

STACK = Layout(
    "stack_fwd",
    items="M",
    work=lambda n: n.width,
    operands={
        "tables": whole("K", kind=INDEX),
        "heights": whole("K", kind=INDEX),
        "widths": whole("K", kind=INDEX),
        "ids": rows("M", "K", kind=INDEX),
        "x0": rows("M", "width"),
    },
    sizes=("M", "K", "width"),
)
take_stack = STACK.take


def stack_fwd_kernel(block):
    task = take_stack(block)
    while task.chunk < task.chunks:
        K, heights, widths = task.K, task.heights, task.widths
        for m in range(task.start, task.stop):
            ids, out = at(task.ids, m * task.stride_ids), at(task.x0, m * task.stride_x0)
            for k in range(K):
                table, width = pointer_to(task.tables[k], out), widths[k]
                if m + 1 < task.stop:
                    prefetch_row(at(table, ids[task.stride_ids + k] * width), width)
                if 0 <= ids[k] < heights[k]:
                    copy(out, at(table, ids[k] * width), width)
                else:
                    report(block, m * K + k)
                out = at(out, width)
        task = take_stack(block)


def stack_fwd(tables: Sequence[Tensor], ids: Tensor, x0: Tensor) -> int:
    """Fills the first columns of x0; returns -1, or m·K + k where ids[m, k] is the first id outside table k."""
    (M, K), (where, heights, widths) = ids.shape, describe(tables, x0.dtype)
    columns = x0[:, : sum(table.shape[1] for table in tables)]
    plan = STACK.plan(x0.dtype, torch.get_num_threads(), M=M, K=K, width=columns.shape[1])
    task = plan.task(tables=where, heights=heights, widths=widths, ids=unit_columns(ids), x0=columns)
    run_task(compiled(stack_fwd_kernel, x0.dtype), task)
    return plan.found(task)


POOL = Layout(
    "pool_fwd",
    items="M",
    work=lambda n: n.N * n.width // max(1, n.M),
    operands={
        "table": whole("height", "width"),
        "values": whole("N", kind=INDEX),
        "offsets": whole("M", kind=INDEX),
        "coefficients": whole("N"),
        "x0": rows("M", "width"),
    },
    sizes=("M", "N", "height", "width"),
)
take_pool = POOL.take


def pool_fwd_kernel(block):
    task = take_pool(block)
    while task.chunk < task.chunks:
        M, N, width, values, offsets = task.M, task.N, task.width, task.values, task.offsets
        for m in range(task.start, task.stop):
            pooled = at(task.x0, m * task.stride_x0)
            for i in range(width):
                pooled[i] = 0
            first, last = offsets[m], N
            if m + 1 < M:
                last = least(offsets[m + 1], N)
            for n in range(first if first > 0 else 0, last):
                if 0 <= values[n] < task.height:
                    row, coefficient = at(task.table, values[n] * width), task.coefficients[n]
                    for i in range(width):
                        pooled[i] += coefficient * row[i]
                else:
                    report(block, n)
        task = take_pool(block)


def pool_fwd(table: Tensor, values: Tensor, offsets: Tensor, coefficients: Tensor, x0: Tensor) -> int:
    """Fills the bag's columns, x0; returns -1, or the position of the first value outside the table."""
    (height, width), M, N = table.shape, offsets.shape[0], values.shape[0]
    plan = POOL.plan(x0.dtype, torch.get_num_threads(), M=M, N=N, height=height, width=width)
    values, offsets = values.contiguous(), offsets.contiguous()
    task = plan.task(table=table, values=values, offsets=offsets, coefficients=coefficients.contiguous(), x0=x0)
    run_task(compiled(pool_fwd_kernel, x0.dtype), task)
    return plan.found(task)


def embedding_stack_fwd(
    dense: Tensor,
    ids: Tensor,
    values: Sequence[Tensor],
    offsets: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    tables: Sequence[Tensor],
    pooling: str,
) -> Tensor:
    x0, K = empty_x0(dense, tables), ids.shape[1]
    check_offsets(values, offsets, K)
    if (bad := stack_fwd(tables[:K], ids, x0)) >= 0:
        m, k = divmod(bad, K)
        raise out_of_range(k, int(ids[m, k]), tables[k].shape[0], f"row {m}")
    column = sum(table.shape[1] for table in tables[:K])
    for k, bag in enumerate(zip(values, offsets, weights, strict=True), start=K):
        coefficients = pooling_coefficients(*bag, pooling, x0.dtype)
        out = x0[:, column : column + tables[k].shape[1]]
        if (bad := pool_fwd(tables[k], bag[0], bag[1], coefficients, out)) >= 0:
            raise out_of_range(k, int(bag[0][bad]), tables[k].shape[0], f"value {bad}")
        column += tables[k].shape[1]
    x0[:, column:] = dense
    return x0


def embedding_stack_bwd(
    dx0: Tensor,
    ids: Tensor,
    values: Sequence[Tensor],
    offsets: Sequence[Tensor],
    coefficients: Sequence[Tensor],
    sizes: Sequence[int],
    needs: Sequence[bool],
) -> list[Tensor]:
    """Ids and gradients in turn, for each table; ``sizes`` are the height and width of each. Empty if not needed."""
    K = ids.shape[1]
    result = stack_bwd(sizes, ids, dx0) if any(needs[:K]) else [ids] * (2 * K)
    for k in range(K):
        if not needs[k]:
            result[2 * k : 2 * k + 2] = ids.new_empty(0), dx0.new_empty(0)
    column = sum(sizes[1 : 2 * K : 2])
    for k, bag in enumerate(zip(values, offsets, coefficients, strict=True), start=K):
        height, width = sizes[2 * k : 2 * k + 2]
        g = dx0[:, column : column + width]
        result += sum_bag(*bag, g, height) if needs[k] else (ids.new_empty(0), dx0.new_empty(0))
        column += width
    return result


embedding_stack_bwd_dense = in_dense_form(embedding_stack_bwd)
