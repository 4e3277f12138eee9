"""Updates of the rows of tables on the CPU, one launch for all tables.

    adam_rows   Adam on the rows that a gradient names, moments included
    sgd_rows    gradient descent on them

Each table is a tensor of its own, with its own width, so the kernels take arrays of addresses. Only rows that the
gradient names are read or written, however high the tables are; the next row is prefetched while one is updated,
because nearly every row is a cache miss.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numba import carray
from numba.core import cgutils, types
from numba.extending import intrinsic
from torch import Tensor

from fastcross.kernels.cpu.embedding import _addresses, _compile, _describe, _prefetch, _run_chunks


@intrinsic
def _pointer(typing_context, address):
    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


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
