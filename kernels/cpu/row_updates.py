"""Updates of the rows of tables on the CPU, one launch for all tables.

    adam_rows   Adam on the rows that a gradient names, moments included
    sgd_rows    gradient descent on them

Each table is a tensor of its own, with its own width, so the kernels take arrays of addresses. Only rows that the
gradient names are read or written, however high the tables are; the next row is prefetched while one is updated,
because nearly every row is a cache miss.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fastcross.kernels.cpu.compile import compiled
from fastcross.kernels.cpu.door import addresses
from fastcross.kernels.cpu.layout import INDEX, Layout, whole
from fastcross.kernels.cpu.simd import at, pointer_to, square_root
from fastcross.kernels.cpu.tables import describe, prefetch_row
from fastcross.kernels.cpu.threads import run_task

# Each thread takes a share of every table's rows: the items are the rows of the longest gradient.
SGD = Layout(
    "sgd_rows",
    items="longest",
    work=lambda n: n.elements // max(1, n.longest),
    operands={name: whole("K", kind=INDEX) for name in ("w", "heights", "widths", "rows", "g", "counts")},
    sizes=("K", "longest", "elements"),
    scalars=("rate",),
)
ADAM = Layout(
    "adam_rows",
    extends=SGD,
    items=SGD.items,
    work=SGD.work,
    operands={name: whole("K", kind=INDEX) for name in ("first", "second")},
    scalars=("decay1", "decay2", "scale", "eps"),
)
take_sgd, take_adam = SGD.take, ADAM.take


def adam_rows_kernel(block):
    task = take_adam(block)
    while task.chunk < task.chunks:
        rate, decay1, decay2, scale, eps = task.rate, task.decay1, task.decay2, task.scale, task.eps
        for k in range(task.K):
            N, width, height = task.counts[k], task.widths[k], task.heights[k]
            rows, g = pointer_to(task.rows[k], task.rows), pointer_to(task.g[k], block)
            w, first, second = (
                pointer_to(task.w[k], block), pointer_to(task.first[k], block), pointer_to(task.second[k], block)
            )  # fmt: skip
            start, stop = task.start * N // task.longest, task.stop * N // task.longest
            for n in range(start, stop):
                if n + 1 < stop:
                    ahead = rows[n + 1] * width
                    prefetch_row(at(w, ahead), width)
                    prefetch_row(at(first, ahead), width)
                    prefetch_row(at(second, ahead), width)
                if 0 <= rows[n] < height:
                    here = rows[n] * width
                    w_n, m, v, g_n = at(w, here), at(first, here), at(second, here), at(g, n * width)
                    for i in range(width):
                        m[i] += decay1 * (g_n[i] - m[i])
                        v[i] += decay2 * (g_n[i] * g_n[i] - v[i])
                        w_n[i] -= rate * m[i] / (square_root(v[i]) * scale + eps)
        task = take_adam(block)


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
    first, second = (addresses(f"moments {i}", [pair[i] for pair in moments], dtype, shapes) for i in (0, 1))
    corrections = 1 - betas[0] ** step, 1 - betas[1] ** step
    scalars = {"rate": lr / corrections[0], "scale": corrections[1] ** -0.5, "eps": eps}
    decays = {"decay1": 1 - betas[0], "decay2": 1 - betas[1]}
    _update(ADAM, adam_rows_kernel, tables, gradients, first=first, second=second, **scalars, **decays)


def sgd_rows_kernel(block):
    task = take_sgd(block)
    while task.chunk < task.chunks:
        rate = task.rate
        for k in range(task.K):
            N, width, height = task.counts[k], task.widths[k], task.heights[k]
            rows, w, g = pointer_to(task.rows[k], task.rows), pointer_to(task.w[k], block), pointer_to(task.g[k], block)
            for n in range(task.start * N // task.longest, task.stop * N // task.longest):
                if 0 <= rows[n] < height:
                    w_n, g_n = at(w, rows[n] * width), at(g, n * width)
                    for i in range(width):
                        w_n[i] -= rate * g_n[i]
        task = take_sgd(block)


def sgd_rows(tables: Sequence[Tensor], gradients: Sequence[tuple[Tensor, Tensor]], lr: float) -> None:
    """w -= lr g on the rows of each (rows, gradients)."""
    _update(SGD, sgd_rows_kernel, tables, gradients, rate=lr)


def _update(
    layout: Layout,
    kernel: Callable,
    tables: Sequence[Tensor],
    gradients: Sequence[tuple[Tensor, Tensor]],
    **more: Tensor | float,
) -> None:
    """Runs the kernel on the rows of each (rows, gradients), beside what ``more`` it wants."""
    dtype = tables[0].dtype
    w, heights, widths = describe(tables, dtype)
    counts = [len(rows) for rows, _ in gradients]
    shapes = [(count, table.shape[1]) for count, table in zip(counts, tables, strict=True)]
    plan = layout.plan(
        dtype, torch.get_num_threads(), K=len(tables), longest=max(counts), elements=sum(a * b for a, b in shapes)
    )
    task = plan.task(
        w=w, heights=heights, widths=widths, counts=torch.tensor(counts, device="cpu"),
        rows=addresses("rows", [rows for rows, _ in gradients], torch.int64, [(count,) for count in counts]),
        g=addresses("gradients", [g for _, g in gradients], dtype, shapes),
        **more,
    )  # fmt: skip
    run_task(compiled(kernel, dtype), task)
