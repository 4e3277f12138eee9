"""Embedding rows on the CPU: gather them into x0, sum their gradients, update them; one launch for all tables.

    stack_fwd   x0[m, columns of table k] = table_k[ids[m, k]]                      (eq. 1 and 2)
    pool_fwd    x0[m, columns of a bag]   = Σ_n coefficient_n table[values_n]       over the values n of row m
    stack_bwd   for each table its distinct ids, ascending, and Σ dx0 over the rows m that share one
    adam_rows   Adam on the rows those ids name, moments included
    sgd_rows    gradient descent on them

Each table is a tensor of its own, with its own width, so the kernels take arrays of addresses. Only rows named in the
batch are read or written, however high the tables are; the next row is prefetched while one is copied, because nearly
every row is a cache miss. Every element is summed by one thread in the order of the batch, after a stable radix sort:
bit-identical from run to run. Ids are checked as they are read.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit
from numba.core import cgutils, types
from numba.extending import intrinsic
from torch import Tensor

from fastcross.kernels.cpu.threads import run as run_on_threads

_RADIX_BITS = 11  # 2048 counters fit the L1 cache, and two passes sort a vocabulary of 4 million
_WORK_PER_THREAD = 1 << 16  # elements; fewer are copied before a second thread has woken up


@intrinsic
def _pointer(typing_context, address):
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


def _compile(function: Callable) -> Callable:
    """Compiled at its first call, which lets other threads run, and kept on disk where a cache can be written."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:
        return njit(nogil=True)(function)


@njit(nogil=True)
def _prefetch(address, size):
    for line in range(0, size, 64):
        _prefetch_line(address + line)


@_compile
def _stack_fwd_kernel(start, stop, tables, heights, widths, ids, x0, stride_x0_m, itemsize):
    K, bad = ids.shape[1], -1
    for m in range(start, stop):
        destination = x0 + m * stride_x0_m * itemsize
        for k in range(K):
            size = widths[k] * itemsize
            if m + 1 < stop:
                _prefetch(tables[k] + ids[m + 1, k] * size, size)
            if 0 <= ids[m, k] < heights[k]:
                _copy(destination, tables[k] + ids[m, k] * size, size)
            elif bad < 0:
                bad = m * K + k
            destination += size
    return bad


def stack_fwd(tables: Sequence[Tensor], ids: Tensor, x0: Tensor) -> int:
    """Fills the first columns of x0; returns -1, or m·K + k where ids[m, k] is the first id outside table k."""
    operands = *_describe(tables), ids.numpy(), x0.data_ptr(), x0.stride(0), x0.element_size()
    return _first_bad(_stack_fwd_kernel, ids.shape[0], x0.numel(), operands)


@_compile
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


@_compile
def _stack_bwd_kernel(start, stop, heights, widths, columns, ids, dx0, stride_dx0_m, rows, gradients, counts):
    M = ids.shape[0]
    for k in range(start, stop):
        width, column = widths[k], columns[k]
        last = -1
        for m in _argsort(ids[:, k].copy(), heights[k]):
            g = dx0[m * stride_dx0_m + column : m * stride_dx0_m + column + width]
            new = last < 0 or rows[k, last] != ids[m, k]
            if new:
                last += 1
                rows[k, last] = ids[m, k]
            total = gradients[M * column + last * width : M * column + (last + 1) * width]
            if new:
                total[:] = g
            else:
                for i in range(width):
                    total[i] += g[i]
        counts[k] = last + 1


def stack_bwd(tables: Sequence[Tensor], ids: Tensor, dx0: Tensor) -> list[tuple[Tensor, Tensor]]:
    """For each table (rows, gradients): its distinct ids in ascending order, and dx0 summed over each."""
    M, K = ids.shape
    _, heights, widths = _describe(tables)
    columns = np.cumsum(widths) - widths
    rows, counts = torch.empty((K, M), dtype=torch.int64), np.empty(K, np.int64)
    # One buffer for all gradients: M rows for each table, of which the first `count` are used.
    gradients = dx0.new_empty(M * int(widths.sum()))
    results = rows.numpy(), gradients.numpy(), counts
    operands = heights, widths, columns, ids.numpy(), _flat(dx0).numpy(), dx0.stride(0), *results
    _run_chunks(_stack_bwd_kernel, K, dx0.numel(), operands)
    return [
        (rows[k, :count], gradients[M * column : M * column + count * width].view(count, width))
        for k, (count, column, width) in enumerate(zip(counts.tolist(), columns.tolist(), widths.tolist(), strict=True))
    ]


@_compile
def _adam_rows_kernel(
    start,
    stop,
    total,
    w_ptr,
    first_ptr,
    second_ptr,
    row_ptr,
    g_ptr,
    counts,
    widths,
    rate,
    decay1,
    decay2,
    scale,
    eps,
    like,
):
    for k in range(len(counts)):
        N, width = counts[k], widths[k]
        size = width * like.itemsize
        rows = carray(_pointer(row_ptr[k]), (N,), np.int64)
        first_row, last_row = start * N // total, stop * N // total
        for n in range(first_row, last_row):
            if n + 1 < last_row:
                ahead = rows[n + 1] * size
                _prefetch(w_ptr[k] + ahead, size)
                _prefetch(first_ptr[k] + ahead, size)
                _prefetch(second_ptr[k] + ahead, size)
            at = rows[n] * size
            w = carray(_pointer(w_ptr[k] + at), (width,), like.dtype)
            first = carray(_pointer(first_ptr[k] + at), (width,), like.dtype)
            second = carray(_pointer(second_ptr[k] + at), (width,), like.dtype)
            g = carray(_pointer(g_ptr[k] + n * size), (width,), like.dtype)
            for i in range(width):
                first[i] += decay1 * (g[i] - first[i])
                second[i] += decay2 * (g[i] * g[i] - second[i])
                w[i] -= rate * first[i] / (np.sqrt(second[i]) * scale + eps)


def adam_rows(
    tables: Sequence[Tensor],
    moments: Sequence[tuple[Tensor, Tensor]],
    gradients: Sequence[tuple[Tensor, Tensor]],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    step: int,
) -> None:
    """Adam's step number ``step`` on the rows of each (rows, gradients); other rows and their moments stay the same."""
    w, _, widths = _describe(tables)
    first, second = (_addresses(pair[i] for pair in moments) for i in (0, 1))
    corrections = 1 - betas[0] ** step, 1 - betas[1] ** step
    scalars = lr / corrections[0], 1 - betas[0], 1 - betas[1], corrections[1] ** -0.5, eps
    _update(_adam_rows_kernel, gradients, (w, first, second), widths, scalars)


@_compile
def _sgd_rows_kernel(start, stop, total, w_ptr, row_ptr, g_ptr, counts, widths, rate, like):
    for k in range(len(counts)):
        N, width = counts[k], widths[k]
        size = width * like.itemsize
        rows = carray(_pointer(row_ptr[k]), (N,), np.int64)
        for n in range(start * N // total, stop * N // total):
            w = carray(_pointer(w_ptr[k] + rows[n] * size), (width,), like.dtype)
            g = carray(_pointer(g_ptr[k] + n * size), (width,), like.dtype)
            for i in range(width):
                w[i] -= rate * g[i]


def sgd_rows(tables: Sequence[Tensor], gradients: Sequence[tuple[Tensor, Tensor]], lr: float) -> None:
    """w -= lr g on the rows of each (rows, gradients)."""
    w, _, widths = _describe(tables)
    _update(_sgd_rows_kernel, gradients, (w,), widths, (lr,))


def _update(
    kernel: Callable, gradients: Sequence[tuple[Tensor, Tensor]], tables: tuple, widths, scalars: tuple
) -> None:
    """Runs the kernel on an equal share of every table's rows per thread."""
    assert all(rows.is_contiguous() and g.is_contiguous() for rows, g in gradients)
    rows, g = (_addresses(pair[i] for pair in gradients) for i in (0, 1))
    counts = np.array([rows.shape[0] for rows, _ in gradients], np.int64)
    # Scalars of the tables' own type: a Python float would carry the arithmetic to float64.
    like = gradients[0][1].new_empty(1).numpy()
    total = int(counts.max())
    operands = total, *tables, rows, g, counts, widths, *(like.dtype.type(value) for value in scalars), like
    _run_chunks(kernel, total, int(counts @ widths), operands)


def _run_chunks(kernel: Callable, items: int, work: int, operands: tuple) -> list:
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
    return next((position for position in _run_chunks(kernel, items, work, operands) if position >= 0), -1)


def _addresses(tensors: Iterable[Tensor]) -> np.ndarray:
    return np.array([t.data_ptr() for t in tensors], np.int64)


def _describe(tables: Sequence[Tensor]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The addresses, heights and widths of contiguous tables."""
    assert all(table.is_contiguous() for table in tables)
    shapes = np.array([table.shape for table in tables], np.int64).reshape(-1, 2)
    return _addresses(tables), shapes[:, 0].copy(), shapes[:, 1].copy()


def _flat(x: Tensor) -> Tensor:
    """The memory from the first element of rows to their last, padding included: contiguous, which vectorises."""
    return x.as_strided(((x.shape[0] - 1) * x.stride(0) + x.shape[1] if x.shape[0] else 0,), (1,))
