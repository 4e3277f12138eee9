"""Embedding rows on the CPU: gather them into x0, sum their gradients; one launch for all tables.

    embedding_stack_fwd   x0[m, columns of table k] = table_k[ids[m, k]]                      (eq. 1 and 2)
                          x0[m, columns of a bag]   = Σ_n coefficient_n table[values_n]       over the values n of row m
    embedding_stack_bwd   for each table its distinct ids, ascending, and Σ dx0 over the rows m that share one

Each table is a tensor of its own, with its own width, so the kernels take arrays of addresses. Only rows named in the
batch are read, however high the tables are; the next row is prefetched while one is copied, because nearly every row is
a cache miss. Ids are checked as they are read. Every element of a gradient is summed by one thread in the order of the
batch, after a stable radix sort: bit-identical from run to run.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastcross.kernels.cpu.compile import compiled
from fastcross.kernels.cpu.door import check, table_of
from fastcross.kernels.cpu.fields import INDEX, index, rows, whole
from fastcross.kernels.cpu.layout import Layout
from fastcross.kernels.cpu.plan import found
from fastcross.kernels.cpu.tables import describe_tables, numbers, unit_columns
from fastcross.kernels.cpu.threads import run_task
from fastcross.kernels.embedding import (
    check_offsets,
    empty_x0,
    in_dense_form,
    out_of_range,
    pooling_coefficients,
    sum_bag,
)

RADIX_BITS = 11  # 2048 counters fit the L1 cache, and two passes sort a vocabulary of 4 million
DIGITS = 1 << RADIX_BITS

STACK = Layout(
    "stack_fwd",
    items="M",
    work=lambda n: n.width,
    operands={
        "tables": whole("K", kind=INDEX),  # addresses
        "heights": whole("K", kind=INDEX),
        "widths": whole("K", kind=INDEX),
        "ids": rows("M", "K", kind=INDEX),
        "x0": rows("M", "width"),
    },
)
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
)
SUMS = Layout(
    "stack_bwd",
    items="K",
    work=lambda n: n.M * n.width // max(1, n.K),
    operands={
        "heights": whole("K", kind=INDEX),
        "widths": whole("K", kind=INDEX),
        "ids": rows("M", "K", kind=INDEX),
        "dx0": rows("M", "width"),
        "rows": whole("K", kind=INDEX),  # addresses, as are the gradients
        "gradients": whole("K", kind=INDEX),
        "counts": whole("K", kind=INDEX),
    },
    own={
        "keys": index(lambda n: n.M),
        "order": index(lambda n: n.M),
        "other": index(lambda n: n.M),
        "digits": index(lambda n: DIGITS + 1),
    },
)


def stack_fwd(tables: Sequence[Tensor], ids: Tensor, x0: Tensor) -> int:
    """Fills the first columns of x0; returns -1, or m·K + k where ids[m, k] is the first id outside table k."""
    where, heights, widths = describe_tables(tables, x0.dtype)
    width = sum(table.shape[1] for table in tables)
    columns = x0[:, :width]
    check("x0", columns, x0.dtype, (ids.shape[0], width), are_rows=True)
    task = STACK.task(x0.dtype, tables=where, heights=heights, widths=widths, ids=unit_columns(ids), x0=columns)
    run_task(compiled("embedding.stack_fwd", x0.dtype), task)
    return found(task)


def pool_fwd(table: Tensor, values: Tensor, offsets: Tensor, coefficients: Tensor, x0: Tensor) -> int:
    """Fills the bag's columns, x0; returns -1, or the position of the first value outside the table."""
    values, offsets, coefficients = values.contiguous(), offsets.contiguous(), coefficients.contiguous()
    task = POOL.task(x0.dtype, table=table, values=values, offsets=offsets, coefficients=coefficients, x0=x0)
    run_task(compiled("embedding.pool_fwd", x0.dtype), task)
    return found(task)


def stack_bwd(sizes: Sequence[int], ids: Tensor, dx0: Tensor) -> list[Tensor]:
    """For each table its distinct ids in ascending order, and dx0 summed over each; ``sizes``: heights and widths."""
    M, K = ids.shape
    heights, widths = tuple(sizes[0 : 2 * K : 2]), tuple(sizes[1 : 2 * K : 2])
    # Memory of its own for each result, as long as it can become.
    lengths = [min(M, height) for height in heights]
    distinct = [ids.new_empty(length) for length in lengths]
    shapes = list(zip(lengths, widths, strict=True))
    gradients, counts = [dx0.new_empty(shape) for shape in shapes], ids.new_empty(K)
    columns = dx0[:, : sum(widths)]
    check("dx0", columns, dx0.dtype, (M, sum(widths)), are_rows=True)
    task = SUMS.task(
        dx0.dtype, ids=unit_columns(ids), dx0=columns,
        heights=numbers(heights), widths=numbers(widths), counts=counts,
        rows=table_of("rows", distinct, torch.int64, [(length,) for length in lengths]),
        gradients=table_of("gradients", gradients, dx0.dtype, shapes),
    )  # fmt: skip
    run_task(compiled("row_sums.stack_bwd", dx0.dtype), task)
    results: list[Tensor] = []
    for k, count in enumerate(counts.tolist()):
        if count > lengths[k]:
            raise RuntimeError(f"feature {k} has {heights[k]} ids; got more: they were changed since the forward pass")
        results += [distinct[k][:count], gradients[k][:count]]
    return results


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
