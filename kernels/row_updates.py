"""Updates of the rows of tables in PyTorch's operators. kernels/gpu/row_updates.py has the same functions.

adam_rows      Adam or AdamW on the rows of a gradient, with their moments
adagrad_rows   Adagrad on them, with one sum of squares per element or per row
sgd_rows       gradient descent on them

A gradient's rows are ascending and may repeat. A row's gradient is at its first entry (its head); the other entries are
not read. All entries of a row compute the same new values from the head's gradient and write the same bits. So distinct
rows need not be counted, which would synchronise. For a captured step the learning rate and the step number may be
tensors on the device.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Ascending rows of a table, and the gradient of each at its first entry.
RowGradient = tuple[Tensor, Tensor]


def adam_rows(
    tables: Sequence[Tensor],
    moments: Sequence[tuple[Tensor, Tensor]],
    gradients: Sequence[RowGradient],
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    step: int | Tensor,
    weight_decay: float = 0.0,
) -> None:
    """Adam's step number ``step`` on the rows of each (rows, gradients); other rows and their moments do not change.

    Before it, these rows decay by ``lr * weight_decay`` of their values (AdamW).
    """
    rate, shrink = lr / bias_correction(betas[0], step), 1 - lr * weight_decay
    scale = bias_correction(betas[1], step) ** 0.5
    for table, (first, second), (rows, values) in zip(tables, moments, gradients, strict=True):
        g = at_heads(rows, values)
        m = first[rows].lerp_(g, 1 - betas[0])
        v = second[rows].lerp_(g.square(), 1 - betas[1])
        first[rows], second[rows] = m, v
        denominator = v.sqrt_().div_(scale).add_(eps)
        table[rows] = shrink * table[rows] - rate * m / denominator


def adagrad_rows(
    tables: Sequence[Tensor],
    sums: Sequence[Tensor],
    gradients: Sequence[RowGradient],
    lr: float | Tensor,
    eps: float,
    row_wise: bool,
) -> None:
    """Adagrad on the rows of each (rows, gradients); ``sums`` are like the tables or, row-wise, one per row."""
    for table, total, (rows, values) in zip(tables, sums, gradients, strict=True):
        g = at_heads(rows, values)
        s = total[rows] + (g.square().mean(1) if row_wise else g.square())
        total[rows] = s
        denominator = s.sqrt().add_(eps)
        table[rows] -= lr * g / (denominator.unsqueeze(1) if row_wise else denominator)


def sgd_rows(tables: Sequence[Tensor], gradients: Sequence[RowGradient], lr: float | Tensor) -> None:
    """w -= lr g on the rows of each (rows, gradients)."""
    for table, (rows, values) in zip(tables, gradients, strict=True):
        table[rows] -= lr * at_heads(rows, values)


def at_heads(rows: Tensor, values: Tensor) -> Tensor:
    """For each entry the values of its row's head, the first entry with the same row."""
    return values[torch.searchsorted(rows, rows)]


def bias_correction(beta: float, step: int | Tensor) -> float | Tensor:
    """1 - β^step; for a tensor with expm1, because float32 would lose most digits in the first steps."""
    if not isinstance(step, Tensor):
        return 1 - beta**step
    return -torch.expm1(step * math.log(beta)) if beta else torch.ones_like(step)
