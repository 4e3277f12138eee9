"""Gradients as optimisers read them: the rows of sparse ones, their norm, and whether they fit their tables.

A sparse gradient has two forms here. On the CPU it is compact: distinct rows, ascending. On other devices, where to
count rows is to wait, it has as many entries as the batch had ids: ascending rows that may repeat, the sum of a row at
its first entry, its head, and zeros at the others. The norm of its values is that of the compact one, and
``coalesce()`` makes that of it. The embedding operator makes this form, and says so by :func:`mark_heads`; a gradient
of another origin (two backward passes that were added, ``F.embedding(sparse=True)``) is brought into it by a sort on
the device.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fastcross.kernels.fixed_rows import sum_rows
from fastcross.kernels.row_updates import Rows

_MARK = "_fastcross_heads"


@torch.no_grad()
def clip_grad_norm(model: nn.Module, max_norm: float) -> Tensor:
    """Scales all gradients so that their global norm is at most ``max_norm``; returns the norm before.

    A table's gradient counts once per row, after the sum over the examples that share the row. Where the norm is not
    finite, finite gradients become 0 and all others NaN.
    """
    return clip(gradients(model.parameters()), max_norm)


def clip(values: list[Tensor], max_norm: float) -> Tensor:
    norm = nn.utils.get_total_norm(values)
    scale_gradients(values, norm, max_norm)
    return norm


def gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """What the parameters' gradients hold; of sparse ones the values, with the sum of each row once."""
    values = []
    for parameter in parameters:
        if parameter.grad is not None:
            if parameter.grad.is_sparse:
                parameter.grad = summed(parameter.grad)
            values.append(parameter.grad._values() if parameter.grad.is_sparse else parameter.grad)
    return values


def scale_gradients(values: list[Tensor], norm: Tensor, max_norm: float) -> None:
    """Multiplies gradients of this norm by min(1, max_norm / norm), and by 0 where the norm is infinite or NaN.

    Then finite gradients become 0, so that none passes unclipped, and all others NaN, so that a caller can still find
    the first of them.
    """
    if values and max_norm < float("inf"):
        # Without a look at the norm, which would wait for the device; min(1, …) leaves small gradients as they are.
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0).nan_to_num(nan=0.0)
        torch._foreach_mul_(values, factor)


def summed(gradient: Tensor) -> Tensor:
    """A sparse gradient with the sum of each row once, in ascending order.

    PyTorch forgets that a gradient is coalesced when it puts it into ``.grad``, and would sort it again; a look at the
    rows is all that most need, or at the mark.
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


def mark_heads(rows: Tensor, values: Tensor) -> None:
    """Says of a gradient that its rows ascend and that its sums stand at the heads, zeros elsewhere.

    The mark is on the memory of both: that is what is left of a gradient in ``.grad``. Whoever copies, adds or scales
    one into new memory leaves the mark behind.
    """
    for tensor in (rows, values):
        setattr(tensor.untyped_storage(), _MARK, True)


def has_heads(gradient: Tensor) -> bool:
    """Whether :func:`mark_heads` was told of a sparse gradient's rows and values."""
    contents = gradient._indices(), gradient._values()
    return gradient.sparse_dim() == 1 and all(hasattr(t.untyped_storage(), _MARK) for t in contents)


def _is_ascending(gradient: Tensor) -> bool:
    """Whether the rows of a sparse gradient are distinct and in order: on a CPU by a look, elsewhere by their mark.

    Raises where the look finds a row that is not there.
    """
    rows = gradient._indices()
    if gradient.sparse_dim() != 1 or not rows.is_cpu:
        return gradient.is_coalesced()
    numbers = rows[0].numpy()
    is_ascending = bool((numbers[1:] > numbers[:-1]).all())
    if len(numbers):
        # Before anything sorts them: PyTorch's own coalesce() writes out of bounds for rows that are not there.
        ends = (numbers[0], numbers[-1]) if is_ascending else (numbers.min(), numbers.max())
        for bad in (end for end in ends if not 0 <= end < gradient.shape[0]):
            raise ValueError(f"a gradient must name rows 0 to {gradient.shape[0] - 1} of its table; got row {bad}")
    return is_ascending


def _sparse(gradient: Tensor, is_coalesced: bool) -> Tensor:
    contents = gradient._indices(), gradient._values(), gradient.shape
    return torch.sparse_coo_tensor(*contents, check_invariants=False, is_coalesced=is_coalesced)


def rows_of(table: Tensor, is_compact: bool = True) -> Rows:
    """What a table's gradient says, in its dtype, once it was seen to fit the table; a dense one has all rows.

    Rows ascend. They are distinct if the gradient must be compact, which is for the CPU: elsewhere that would wait.
    """
    gradient: Any = table.grad
    fits = is_like(gradient, table, gradient.dtype) and table.dim() == 2
    if not fits or gradient.layout not in (torch.strided, torch.sparse_coo):
        raise ValueError(f"a gradient must be like its table, {kind(table)}; got {kind(gradient)}")
    if not gradient.is_sparse:
        return torch.arange(gradient.shape[0], device=gradient.device), gradient.to(table.dtype).contiguous()
    if gradient.sparse_dim() != 1:
        found = f"{gradient.sparse_dim()} of {kind(table)}"
        raise ValueError(f"a sparse gradient must have whole rows, one sparse dimension; got {found}")
    if not is_compact:
        gradient = summed(gradient)
    elif not _is_ascending(gradient):
        gradient = _sparse(gradient, is_coalesced=False).coalesce()
    return gradient._indices()[0].contiguous(), gradient._values().to(table.dtype).contiguous()


def is_like(t: Tensor, table: Tensor, dtype: torch.dtype | None = None) -> bool:
    return t.shape == table.shape and t.device == table.device and t.dtype == (dtype or table.dtype)


def kind(value: Any) -> str:
    """A tensor's shape, dtype and device in words."""
    return f"{tuple(value.shape)} {value.dtype} on {value.device}" if isinstance(value, Tensor) else repr(value)
