"""Updates of the rows of tables in PyTorch's own operators; kernels/cpu/row_updates.py has the same functions.

adam_rows      Adam or AdamW on the rows that a gradient names, moments included
adagrad_rows   Adagrad on them, with a sum of squares for each element or for each row
sgd_rows       gradient descent on them
"""

from collections.abc import Sequence

from torch import Tensor

Rows = tuple[Tensor, Tensor]  # of a gradient: distinct rows of the table, and what each of them gets


def adam_rows(
    tables: Sequence[Tensor],
    moments: Sequence[tuple[Tensor, Tensor]],
    gradients: Sequence[Rows],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    step: int,
    weight_decay: float = 0.0,
) -> None:
    """Adam's step number ``step`` on the rows of each (rows, gradients); other rows and their moments stay the same.

    Before it, these rows lose ``lr * weight_decay`` of their values: AdamW.
    """
    for table, (first, second), (rows, g) in zip(tables, moments, gradients, strict=True):
        m = first[rows].lerp_(g, 1 - betas[0])
        v = second[rows].lerp_(g.square(), 1 - betas[1])
        first[rows], second[rows] = m, v
        denominator = v.sqrt_().div_((1 - betas[1] ** step) ** 0.5).add_(eps)
        shrink = 1 - lr * weight_decay
        table[rows] = shrink * table[rows] - (lr / (1 - betas[0] ** step)) * m / denominator


def adagrad_rows(
    tables: Sequence[Tensor],
    sums: Sequence[Tensor],
    gradients: Sequence[Rows],
    lr: float,
    eps: float,
    row_wise: bool,
) -> None:
    """Adagrad on the rows of each (rows, gradients); ``sums`` are like the tables or, row-wise, one per row."""
    for table, total, (rows, g) in zip(tables, sums, gradients, strict=True):
        s = total[rows] + (g.square().mean(1) if row_wise else g.square())
        total[rows] = s
        denominator = s.sqrt().add_(eps)
        table[rows] -= lr * g / (denominator.unsqueeze(1) if row_wise else denominator)


def sgd_rows(tables: Sequence[Tensor], gradients: Sequence[Rows], lr: float) -> None:
    """w -= lr g on the rows of each (rows, gradients)."""
    for table, (rows, g) in zip(tables, gradients, strict=True):
        table[rows] -= lr * g
