"""Sparse gradients of tables, and in-place updates of their rows, on the device of the tables.

adam_rows      Adam or AdamW, with their moments
adagrad_rows   Adagrad, with one sum of squares per element or per row
sgd_rows       gradient descent

Rows are in ascending order and may repeat. A row's gradient is at its first entry; the other entries are not read.

A sparse gradient has two forms. On the CPU it is compact: distinct rows in ascending order. On other devices, where
counting distinct rows would synchronise, it has as many entries as the batch has ids: ascending rows that may repeat,
with the sum of a row at its first entry (its head) and zeros at the others. The norm of its values equals that of the
compact form, and ``coalesce()`` converts it. The embedding operator makes this form and marks it (:func:`mark_heads`).
Other gradients (two backward passes added, ``F.embedding(sparse=True)``) are converted by a sort on the device.
"""

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fastcross.kernels import row_updates as plain
from fastcross.kernels.embedding import sum_rows
from fastcross.kernels.row_updates import RowGradient
from fastcross.ops import backends

_TRITON = "fastcross.kernels.gpu.row_updates"
_MARK = "_fastcross_heads"


def adam_rows(
    backend: str,
    tables: Sequence[Tensor],
    moments: Sequence[tuple[Tensor, Tensor]],
    gradients: Sequence[RowGradient],
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
    gradients: Sequence[RowGradient],
    lr: float | Tensor,
    eps: float,
    row_wise: bool,
) -> None:
    """s += g², w -= lr g / (√s + ε); row-wise, s is one number per row, s += mean(g²)."""
    if backend != "cpu":
        return _kernels(backend).adagrad_rows(tables, sums, gradients, lr, eps, row_wise)
    torch.ops.fastcross.adagrad_rows(list(tables), list(sums), *_parts(gradients), float(lr), eps, row_wise)


def sgd_rows(backend: str, tables: Sequence[Tensor], gradients: Sequence[RowGradient], lr: float | Tensor) -> None:
    """w -= lr g."""
    if backend != "cpu":
        return _kernels(backend).sgd_rows(tables, gradients, lr)
    torch.ops.fastcross.sgd_rows(list(tables), *_parts(gradients), float(lr))


def _kernels(backend: str) -> ModuleType:
    return importlib.import_module(_TRITON) if backend == "triton" else plain


def _parts(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    return [first for first, _ in pairs], [second for _, second in pairs]


def mark_heads(rows: Tensor, values: Tensor) -> None:
    """Marks a gradient as having ascending rows, with sums at the heads and zeros elsewhere.

    The mark is on the memory of both tensors, which is what ``.grad`` keeps of a gradient. A copy, sum or multiple in
    new memory has no mark.
    """
    for tensor in (rows, values):
        setattr(tensor.untyped_storage(), _MARK, True)


def has_heads(gradient: Tensor) -> bool:
    """Whether a sparse gradient was marked by :func:`mark_heads`."""
    contents = gradient._indices(), gradient._values()
    return gradient.sparse_dim() == 1 and all(hasattr(t.untyped_storage(), _MARK) for t in contents)


def summed(gradient: Tensor) -> Tensor:
    """A sparse gradient with the sum of each row once, in ascending order.

    PyTorch forgets that a gradient is coalesced when it stores it in ``.grad``, and would sort it again. Checking the
    rows or the mark avoids that.
    """
    if has_heads(gradient):
        return gradient
    if _is_ascending(gradient):
        return gradient if gradient.is_coalesced() else _sparse(gradient, is_coalesced=True)
    if gradient.is_cpu or gradient.sparse_dim() != 1:
        return _sparse(gradient, is_coalesced=False).coalesce()
    rows, sums = sum_rows(gradient._indices()[0], gradient._values())
    values = sums.to(gradient.dtype)
    mark_heads(rows, values)
    contents = rows.unsqueeze(0), values, gradient.shape
    return torch.sparse_coo_tensor(*contents, check_invariants=False, is_coalesced=False)


def _is_ascending(gradient: Tensor) -> bool:
    """Whether the rows of a sparse gradient are distinct and ascending: checked on a CPU, by the mark elsewhere.

    Raises if the check finds a row outside the table.
    """
    rows = gradient._indices()
    if gradient.sparse_dim() != 1 or not rows.is_cpu:
        return gradient.is_coalesced()
    numbers = rows[0].numpy()
    is_ascending = bool((numbers[1:] > numbers[:-1]).all())
    if len(numbers):
        # Before anything sorts them: PyTorch's coalesce() writes out of bounds for rows outside the table.
        ends = (numbers[0], numbers[-1]) if is_ascending else (numbers.min(), numbers.max())
        for bad in (end for end in ends if not 0 <= end < gradient.shape[0]):
            raise ValueError(f"a gradient must name rows 0 to {gradient.shape[0] - 1} of its table; got row {bad}")
    return is_ascending


def _sparse(gradient: Tensor, is_coalesced: bool) -> Tensor:
    contents = gradient._indices(), gradient._values(), gradient.shape
    return torch.sparse_coo_tensor(*contents, check_invariants=False, is_coalesced=is_coalesced)


def rows_of(table: Tensor, is_compact: bool = True) -> RowGradient:
    """Rows and values of a table's gradient, checked against the table, in its dtype. A dense gradient has all rows.

    Rows are ascending, and distinct if ``is_compact``, which is for the CPU: elsewhere it would synchronise.
    """
    gradient: Any = table.grad
    fits = is_like(gradient, table, gradient.dtype) and table.dim() == 2
    if not fits or gradient.layout not in (torch.strided, torch.sparse_coo):
        raise ValueError(f"a gradient must be like its table, {in_words(table)}; got {in_words(gradient)}")
    if not gradient.is_sparse:
        return torch.arange(gradient.shape[0], device=gradient.device), gradient.to(table.dtype).contiguous()
    if gradient.sparse_dim() != 1:
        found = f"{gradient.sparse_dim()} of {in_words(table)}"
        raise ValueError(f"a sparse gradient must have whole rows, one sparse dimension; got {found}")
    if not is_compact:
        gradient = summed(gradient)
    elif not _is_ascending(gradient):
        gradient = _sparse(gradient, is_coalesced=False).coalesce()
    return gradient._indices()[0].contiguous(), gradient._values().to(table.dtype).contiguous()


def is_like(t: Tensor, table: Tensor, dtype: torch.dtype | None = None) -> bool:
    return t.shape == table.shape and t.device == table.device and t.dtype == (dtype or table.dtype)


def in_words(value: Any) -> str:
    """A description of a tensor: shape, dtype and device."""
    return f"{tuple(value.shape)} {value.dtype} on {value.device}" if isinstance(value, Tensor) else repr(value)


_TABLES = "(Tensor(a!)[] tables, "
_GRADIENT = "Tensor[] rows, Tensor[] g, float rate"
backends.define(
    "adam_rows",
    f"{_TABLES}Tensor(b!)[] first, Tensor(c!)[] second, {_GRADIENT}, float scale, float shrink, float decay1, "
    "float decay2, float eps) -> ()",
)
backends.define("adagrad_rows", f"{_TABLES}Tensor(b!)[] sums, {_GRADIENT}, float eps, bool row_wise) -> ()")
backends.define("sgd_rows", f"{_TABLES}{_GRADIENT}) -> ()")
