"""Embedding rows on the CPU: gather them into x0, sum their gradients; one launch for all tables.

    embedding_stack_fwd   x0[m, columns of table k] = table_k[ids[m, k]]                      (eq. 1 and 2)
                          x0[m, columns of a bag]   = Σ_n coefficient_n table[values_n]       over the values n of row m
    embedding_stack_bwd   for each table its distinct ids, ascending, and Σ dx0 over the rows m that share one

Each table is a tensor of its own, with its own width, so the kernels take arrays of addresses. Only rows named in the
batch are read, however high the tables are; the next row is prefetched while one is copied, because nearly
every row is a cache miss. Every element is summed by one thread in the order of the batch, after a stable radix sort:
bit-identical from run to run. Ids are checked as they are read.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit
from numba.core import cgutils, types
from numba.extending import intrinsic
from torch import Tensor

from fastcross.kernels.cpu.door import address_of_rows, addresses
from fastcross.kernels.cpu.threads import run as run_on_threads
from fastcross.kernels.embedding import (
    check_offsets,
    empty_x0,
    in_dense_form,
    out_of_range,
    pooling_coefficients,
    sum_bag,
)

_RADIX_BITS = 11  # 2048 counters fit the L1 cache, and two passes sort a vocabulary of 4 million
_WORK_PER_THREAD = 1 << 16  # elements; fewer are copied before a second thread has woken up


@intrinsic
def pointer(typing_context, address):
    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def _copy(typing_context, destination, source, size):
    def generate(context, builder, signature, args):
        destination, source = (builder.inttoptr(address, cgutils.voidptr_t) for address in args[:2])
        cgutils.raw_memcpy(builder, destination, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def _prefetch_line(typing_context, address):
    def generate(context, builder, signature, args):
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, number, number, number])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [cgutils.voidptr_t], kind)
        builder.call(prefetch, [builder.inttoptr(args[0], cgutils.voidptr_t), number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def compiled(function: Callable) -> Callable:
    """Compiled at its first call, which lets other threads run, and kept on disk where a cache can be written."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:
        return njit(nogil=True)(function)


@njit(nogil=True)
def prefetch(address, size):
    for line in range(0, size, 64):
        _prefetch_line(address + line)


@compiled
def _stack_fwd_kernel(start, stop, tables, heights, widths, ids, x0, stride_x0_m, itemsize):
    K, bad = ids.shape[1], -1
    for m in range(start, stop):
        destination = x0 + m * stride_x0_m * itemsize
        for k in range(K):
            size = widths[k] * itemsize
            if m + 1 < stop:
                prefetch(tables[k] + ids[m + 1, k] * size, size)
            if 0 <= ids[m, k] < heights[k]:
                _copy(destination, tables[k] + ids[m, k] * size, size)
            elif bad < 0:
                bad = m * K + k
            destination += size
    return bad


def stack_fwd(tables: Sequence[Tensor], ids: Tensor, x0: Tensor) -> int:
    """Fills the first columns of x0; returns -1, or m·K + k where ids[m, k] is the first id outside table k."""
    where, heights, widths = describe(tables, x0.dtype)
    columns = x0[:, : int(widths.sum())]
    destination = address_of_rows("x0", columns, x0.dtype, (ids.shape[0], columns.shape[1]))
    operands = where, heights, widths, ids.numpy(), *destination, x0.element_size()
    return _first_bad(_stack_fwd_kernel, ids.shape[0], x0.numel(), operands)


@compiled
def _pool_fwd_kernel(start, stop, table, values, offsets, coefficients, x0, stride_x0_m):
    M, width, bad = len(offsets), table.shape[1], -1
    for m in range(start, stop):
        pooled = x0[m * stride_x0_m : m * stride_x0_m + width]
        pooled[:] = 0
        for n in range(offsets[m], offsets[m + 1] if m + 1 < M else len(values)):
            if 0 <= values[n] < table.shape[0]:
                row = table[values[n]]
                for i in range(width):
                    pooled[i] += coefficients[n] * row[i]
            elif bad < 0:
                bad = n
    return bad


def pool_fwd(table: Tensor, values: Tensor, offsets: Tensor, coefficients: Tensor, x0: Tensor) -> int:
    """Fills the bag's columns, x0; returns -1, or the position of the first value outside the table."""
    operands = [t.detach().numpy() for t in (table, values, offsets, coefficients, _flat(x0))]
    return _first_bad(
        _pool_fwd_kernel, *(offsets.shape[0], values.shape[0] * table.shape[1]), (*operands, x0.stride(0))
    )


@njit(nogil=True)
def _argsort(ids, height):
    """The stable ascending order of ids in [0, height): a radix sort from the lowest digit up."""
    order, other = np.arange(len(ids)), np.empty(len(ids), np.int64)
    mask = (1 << _RADIX_BITS) - 1
    count = np.empty(mask + 2, np.int64)
    shift = 0
    while shift == 0 or (height - 1) >> shift:
        count[:] = 0
        for row in ids:
            count[((row >> shift) & mask) + 1] += 1
        for digit in range(mask):
            count[digit + 1] += count[digit]
        for n in order:
            digit = (ids[n] >> shift) & mask
            other[count[digit]] = n
            count[digit] += 1
        order, other = other, order
        shift += _RADIX_BITS
    return order


@compiled
def _stack_bwd_kernel(start, stop, heights, widths, columns, ids, dx0, stride_dx0_m, row_ptr, gradient_ptr, counts):
    M = ids.shape[0]
    for k in range(start, stop):
        width, column, most = widths[k], columns[k], min(M, heights[k])
        rows = carray(pointer(row_ptr[k]), (most,), np.int64)
        gradients = carray(pointer(gradient_ptr[k]), (most * width,), dx0.dtype)
        last = -1
        for m in _argsort(ids[:, k].copy(), heights[k]):
            g = dx0[m * stride_dx0_m + column : m * stride_dx0_m + column + width]
            new = last < 0 or rows[last] != ids[m, k]
            if new:
                last += 1
                if last == most:  # more distinct ids than rows: they were changed since the forward pass
                    break
                rows[last] = ids[m, k]
            total = gradients[last * width : (last + 1) * width]
            if new:
                total[:] = g
            else:
                for i in range(width):
                    total[i] += g[i]
        counts[k] = last + 1


def stack_bwd(sizes: Sequence[int], ids: Tensor, dx0: Tensor) -> list[Tensor]:
    """For each table its distinct ids in ascending order, and dx0 summed over each; ``sizes``: heights and widths."""
    M, K = ids.shape
    heights, widths = (np.array(sizes[i : 2 * K : 2], np.int64) for i in (0, 1))
    columns, counts = np.cumsum(widths) - widths, np.empty(K, np.int64)
    # Memory of its own for each result, as long as it can become.
    rows = [ids.new_empty(min(M, height)) for height in heights.tolist()]
    gradients = [dx0.new_empty((len(row), width)) for row, width in zip(rows, widths.tolist(), strict=True)]
    results = (
        addresses("rows", rows, torch.int64, [tuple(row.shape) for row in rows]).numpy(),
        addresses("gradients", gradients, dx0.dtype, [tuple(gradient.shape) for gradient in gradients]).numpy(),
        counts,
    )
    operands = heights, widths, columns, ids.numpy(), _flat(dx0).numpy(), dx0.stride(0)
    run_chunks(_stack_bwd_kernel, K, dx0.numel(), (*operands, *results))
    found: list[Tensor] = []
    for k, count in enumerate(counts.tolist()):
        if count > len(rows[k]):
            raise RuntimeError(
                f"feature {k} has {sizes[2 * k]} ids; got more: they were changed since the forward pass"
            )
        found += [rows[k][:count], gradients[k][:count]]
    return found


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


def run_chunks(kernel: Callable, items: int, work: int, operands: tuple) -> list:
    """kernel(start, stop, *operands) over [0, items), split over threads where the work is worth one; all results."""
    count = max(1, min(torch.get_num_threads(), work // _WORK_PER_THREAD, items))
    chunks = [(items * i // count, items * (i + 1) // count) for i in range(count)]
    results = [None] * count

    def run(i: int, start: int, stop: int) -> None:
        results[i] = kernel(start, stop, *operands)

    run_on_threads(chunks, run)
    return results


def _first_bad(kernel: Callable, items: int, work: int, operands: tuple) -> int:
    """The first position any chunk found bad, or -1."""
    return next((position for position in run_chunks(kernel, items, work, operands) if position >= 0), -1)


def describe(tables: Sequence[Tensor], dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The addresses, heights and widths of contiguous tables."""
    where = addresses("tables", tables, dtype, [tuple(table.shape) for table in tables]).numpy()
    shapes = np.array([table.shape for table in tables], np.int64).reshape(-1, 2)
    return where, shapes[:, 0].copy(), shapes[:, 1].copy()


def _flat(x: Tensor) -> Tensor:
    """The memory from the first element of rows to their last, padding included: contiguous, which vectorises."""
    return x.as_strided(((x.shape[0] - 1) * x.stride(0) + x.shape[1] if x.shape[0] else 0,), (1,))
