"""The results of the cross operators in the dtypes that PyTorch expects of them; empty ones where nothing is needed."""

import torch
from torch import Tensor

from fastcross.kernels.rows import empty_rows


def rows_as(x0: Tensor, y: Tensor | None) -> Tensor:
    """The rows ``y`` in the dtype of ``x0``, and, where that is another, with the padding between its rows."""
    if y is None:
        return x0.new_empty(0)
    return y if y.dtype is x0.dtype else empty_rows(x0).copy_(y)


def cast_as(like: Tensor, t: Tensor | None) -> Tensor:
    """In the dtype of ``like``."""
    if t is None:
        return like.new_empty(0)
    return t if t.dtype is like.dtype else t.to(like.dtype)  # .to() takes a microsecond to find nothing to do


def kept(dtype: torch.dtype, p: Tensor | None) -> Tensor:
    """The dots that a backward pass needs, or none."""
    return torch.empty(0, dtype=dtype, device="cpu") if p is None else p
