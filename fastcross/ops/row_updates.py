"""Updates of the rows of tables that gradients name, in place: the optimisers' kernels, on the device of the tables.

adam_rows      Adam or AdamW, moments included
adagrad_rows   Adagrad, with a sum of squares for each element or for each row
sgd_rows       gradient descent

Rows ascend and may repeat: a row's gradient stands at the first of its entries, and the others are not read.
"""

import importlib
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from fastcross.kernels import row_updates as plain
from fastcross.kernels.row_updates import Rows
from fastcross.ops import backends

_TRITON = "fastcross.kernels.gpu.row_updates"


def adam_rows(
    backend: str,
    tables: Sequence[Tensor],
    moments: Sequence[tuple[Tensor, Tensor]],
    gradients: Sequence[Rows],
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    step: int | Tensor,
    *,
    weight_decay: float = 0.0,
) -> None:
    """m += (1-β₁)(g-m), v += (1-β₂)(g²-v), w -= lr m̂ / (√v̂ + ε), after w -= lr weight_decay w."""
    if backend != "cpu":
        return _kernels(backend).adam_rows(tables, moments, gradients, lr, betas, eps, step, weight_decay)
    lr, corrections = float(lr), [1 - beta ** int(step) for beta in betas]
    scalars = lr / corrections[0], corrections[1] ** -0.5, 1 - lr * weight_decay, 1 - betas[0], 1 - betas[1], eps
    torch.ops.fastcross.adam_rows(list(tables), *_parts(moments), *_parts(gradients), *scalars)


def adagrad_rows(
    backend: str,
    tables: Sequence[Tensor],
    sums: Sequence[Tensor],
    gradients: Sequence[Rows],
    lr: float | Tensor,
    eps: float,
    row_wise: bool,
) -> None:
    """s += g², w -= lr g / (√s + ε); row-wise s is one number for each row, s += mean(g²)."""
    if backend != "cpu":
        return _kernels(backend).adagrad_rows(tables, sums, gradients, lr, eps, row_wise)
    torch.ops.fastcross.adagrad_rows(list(tables), list(sums), *_parts(gradients), float(lr), eps, row_wise)


def sgd_rows(backend: str, tables: Sequence[Tensor], gradients: Sequence[Rows], lr: float | Tensor) -> None:
    """w -= lr g."""
    if backend != "cpu":
        return _kernels(backend).sgd_rows(tables, gradients, lr)
    torch.ops.fastcross.sgd_rows(list(tables), *_parts(gradients), float(lr))


def _kernels(backend: str) -> ModuleType:
    return importlib.import_module(_TRITON) if backend == "triton" else plain


def _parts(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    return [first for first, _ in pairs], [second for _, second in pairs]


_TABLES = "(Tensor(a!)[] tables, "
_GRADIENT = "Tensor[] rows, Tensor[] g, float rate"
backends.define(
    "adam_rows",
    f"{_TABLES}Tensor(b!)[] first, Tensor(c!)[] second, {_GRADIENT}, float scale, float shrink, float decay1, "
    "float decay2, float eps) -> ()",
)
backends.define("adagrad_rows", f"{_TABLES}Tensor(b!)[] sums, {_GRADIENT}, float eps, bool row_wise) -> ()")
backends.define("sgd_rows", f"{_TABLES}{_GRADIENT}) -> ()")
