"""Updates of the rows of tables on the CPU, one launch for all tables.

    adam_rows   Adam on the rows that a gradient names, moments included
    sgd_rows    gradient descent on them

Each table is a tensor of its own, with its own width, so the kernels take arrays of addresses. Only rows that the
gradient names are read or written, however high the tables are; the next row is prefetched while one is updated,
because nearly every row is a cache miss.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numba import carray
from torch import Tensor

from fastcross.kernels.cpu.door import addresses
from fastcross.kernels.cpu.embedding import compiled, describe, pointer, prefetch, run_chunks


@compiled
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
        rows = carray(pointer(row_ptr[k]), (N,), np.int64)
        first_row, last_row = start * N // total, stop * N // total
        for n in range(first_row, last_row):
            if n + 1 < last_row:
                ahead = rows[n + 1] * size
                prefetch(w_ptr[k] + ahead, size)
                prefetch(first_ptr[k] + ahead, size)
                prefetch(second_ptr[k] + ahead, size)
            at = rows[n] * size
            w = carray(pointer(w_ptr[k] + at), (width,), like.dtype)
            first = carray(pointer(first_ptr[k] + at), (width,), like.dtype)
            second = carray(pointer(second_ptr[k] + at), (width,), like.dtype)
            g = carray(pointer(g_ptr[k] + n * size), (width,), like.dtype)
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
    dtype, shapes = tables[0].dtype, [tuple(table.shape) for table in tables]
    first, second = (addresses(f"moments {i}", [pair[i] for pair in moments], dtype, shapes).numpy() for i in (0, 1))
    corrections = 1 - betas[0] ** step, 1 - betas[1] ** step
    scalars = lr / corrections[0], 1 - betas[0], 1 - betas[1], corrections[1] ** -0.5, eps
    _update(_adam_rows_kernel, tables, gradients, (first, second), scalars)


@compiled
def _sgd_rows_kernel(start, stop, total, w_ptr, row_ptr, g_ptr, counts, widths, rate, like):
    for k in range(len(counts)):
        N, width = counts[k], widths[k]
        size = width * like.itemsize
        rows = carray(pointer(row_ptr[k]), (N,), np.int64)
        for n in range(start * N // total, stop * N // total):
            w = carray(pointer(w_ptr[k] + rows[n] * size), (width,), like.dtype)
            g = carray(pointer(g_ptr[k] + n * size), (width,), like.dtype)
            for i in range(width):
                w[i] -= rate * g[i]


def sgd_rows(tables: Sequence[Tensor], gradients: Sequence[tuple[Tensor, Tensor]], lr: float) -> None:
    """w -= lr g on the rows of each (rows, gradients)."""
    _update(_sgd_rows_kernel, tables, gradients, (), (lr,))


def _update(
    kernel: Callable,
    tables: Sequence[Tensor],
    gradients: Sequence[tuple[Tensor, Tensor]],
    moments: tuple[np.ndarray, ...],
    scalars: tuple[float, ...],
) -> None:
    """Runs the kernel on an equal share of every table's rows per thread."""
    dtype = tables[0].dtype
    w, _, widths = describe(tables, dtype)
    counts = np.array([len(rows) for rows, _ in gradients], np.int64)
    rows = addresses("rows", [rows for rows, _ in gradients], torch.int64, [(n,) for n in counts.tolist()]).numpy()
    shapes = list(zip(counts.tolist(), widths.tolist(), strict=True))
    g = addresses("gradients", [g for _, g in gradients], dtype, shapes).numpy()
    # Scalars of the tables' own type: a Python float would carry the arithmetic to float64.
    like = gradients[0][1].new_empty(1).numpy()
    total = int(counts.max())
    operands = total, w, *moments, rows, g, counts, widths, *(like.dtype.type(value) for value in scalars), like
    run_chunks(kernel, total, int(counts @ widths), operands)
