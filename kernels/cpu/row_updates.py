"""Updates of the rows of tables on the CPU, one launch for all tables.

    adam_rows      Adam or AdamW on the rows that a gradient names, moments included
    adagrad_rows   Adagrad on them, with a sum of squares for each element or for each row
    sgd_rows       gradient descent on them

Each table is a tensor of its own, with its own width, so the kernels take arrays of addresses. Only rows that the
gradient names are read or written, however high the tables are; the next row is prefetched while one is updated,
because nearly every row is a cache miss.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastcross.kernels.cpu.compile import compiled
from fastcross.kernels.cpu.door import table_of
from fastcross.kernels.cpu.fields import INDEX, whole
from fastcross.kernels.cpu.layout import Layout
from fastcross.kernels.cpu.tables import describe_tables
from fastcross.kernels.cpu.threads import run_task

SHARES = 64  # of every table's rows, which the threads take by turns

SGD = Layout(
    "sgd_rows",
    items="shares",
    work=lambda n: n.work,
    operands={name: whole("K", kind=INDEX) for name in ("w", "heights", "widths", "rows", "g", "counts")},
    sizes=("shares", "work"),
    scalars=("rate",),
)
ADAM = Layout(
    "adam_rows",
    extends=SGD,
    items=SGD.items,
    work=SGD.work,
    operands={name: whole("K", kind=INDEX) for name in ("first", "second")},
    scalars=("decay1", "decay2", "scale", "eps", "shrink"),
)
ADAGRAD = Layout(
    "adagrad_rows",
    extends=SGD,
    items=SGD.items,
    work=SGD.work,
    operands={"sums": whole("K", kind=INDEX)},
    sizes=("row_wise",),
    scalars=("eps",),
)


def adam_rows(
    tables: Sequence[Tensor],
    moments: Sequence[tuple[Tensor, Tensor]],
    gradients: Sequence[tuple[Tensor, Tensor]],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    step: int,
    weight_decay: float = 0.0,
) -> None:
    """Adam's step number ``step`` on the rows of each (rows, gradients); other rows and their moments stay the same.

    Before it, these rows lose ``lr * weight_decay`` of their values: AdamW.
    """
    dtype, shapes = tables[0].dtype, [table.shape for table in tables]
    first, second = (table_of(f"moments {i}", [pair[i] for pair in moments], dtype, shapes) for i in (0, 1))
    corrections = 1 - betas[0] ** step, 1 - betas[1] ** step
    scalars = {"rate": lr / corrections[0], "scale": corrections[1] ** -0.5, "eps": eps}
    scalars["shrink"] = 1 - lr * weight_decay
    decays = {"decay1": 1 - betas[0], "decay2": 1 - betas[1]}
    _update("row_updates.adam_rows", ADAM, tables, gradients, first=first, second=second, **scalars, **decays)


def adagrad_rows(
    tables: Sequence[Tensor],
    sums: Sequence[Tensor],
    gradients: Sequence[tuple[Tensor, Tensor]],
    lr: float,
    eps: float,
    row_wise: bool,
) -> None:
    """Adagrad on the rows of each (rows, gradients); ``sums`` are like the tables or, row-wise, one per row."""
    shapes = [table.shape[:1] if row_wise else table.shape for table in tables]
    where = table_of("sums", sums, tables[0].dtype, shapes)
    _update("row_updates.adagrad_rows", ADAGRAD, tables, gradients, sums=where, row_wise=row_wise, rate=lr, eps=eps)


def sgd_rows(tables: Sequence[Tensor], gradients: Sequence[tuple[Tensor, Tensor]], lr: float) -> None:
    """w -= lr g on the rows of each (rows, gradients)."""
    _update("row_updates.sgd_rows", SGD, tables, gradients, rate=lr)


def _update(
    kernel: str,
    layout: Layout,
    tables: Sequence[Tensor],
    gradients: Sequence[tuple[Tensor, Tensor]],
    **more: Tensor | float,
) -> None:
    """Runs the kernel on the rows of each (rows, gradients), beside what ``more`` it wants."""
    dtype = tables[0].dtype
    w, heights, widths = describe_tables(tables, dtype)
    counts = [len(rows) for rows, _ in gradients]
    shapes = [(count, table.shape[1]) for count, table in zip(counts, tables, strict=True)]
    # To a power of two, because a plan is made for each: of no use to batches that all differ a little.
    work = 1 << (sum(count * width for count, width in shapes) // SHARES).bit_length()
    task = layout.task(
        dtype, shares=SHARES, work=work,
        w=w, heights=heights, widths=widths, counts=torch.tensor(counts, device="cpu"),
        rows=table_of("rows", [rows for rows, _ in gradients], torch.int64, [(count,) for count in counts]),
        g=table_of("gradients", [g for _, g in gradients], dtype, shapes),
        **more,
    )  # fmt: skip
    run_task(compiled(kernel, dtype), task)
