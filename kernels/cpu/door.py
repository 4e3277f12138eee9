"""The only way from a tensor to an address: here what stands behind it is checked, and nowhere else is one taken.

A kernel gets a bare pointer, and would read or write whatever lies there. So the dtype, the device, the layout, the
shape and the strides are compared with what the kernel is about to touch; a tensor that differs is an error.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_STRIDED = torch.strided
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


def address(name: str, t: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """The address of a contiguous tensor."""
    if (
        not isinstance(t, Tensor)
        or t.dtype is not dtype
        or t.shape != shape
        or not t.is_cpu
        or t.layout is not _STRIDED
        or not t.is_contiguous()
        or not ((pointer := t.data_ptr()) or t.numel() == 0)
    ):
        raise _refusal(name, t, dtype, shape, "contiguous")
    return pointer


def address_of_rows(name: str, t: Tensor, dtype: torch.dtype, shape: tuple[int, int]) -> tuple[int, int]:
    """The address of the first row and the stride to the next; within a row, elements are neighbours."""
    if (
        not isinstance(t, Tensor)
        or t.dtype is not dtype
        or t.shape != shape
        or not t.is_cpu
        or t.layout is not _STRIDED
    ):
        raise _refusal(name, t, dtype, shape, "rows")
    stride, step = t.stride()
    # PyTorch calls a tensor without rows contiguous whatever its strides are.
    if (step != 1 and shape[1] > 1 and shape[0] > 0) or not ((pointer := t.data_ptr()) or t.numel() == 0):
        raise _refusal(name, t, dtype, shape, "rows with unit column stride")
    return pointer, stride


def addresses(name: str, tensors: Sequence[Tensor], dtype: torch.dtype, shapes: Sequence[tuple[int, ...]]) -> Tensor:
    """The addresses of contiguous tensors, as int64."""
    if len(tensors) != len(shapes):
        raise ValueError(f"{name} must be {len(shapes)} tensors; got {len(tensors)}")
    found = [address(name, t, dtype, shape) for t, shape in zip(tensors, shapes, strict=True)]
    return torch.from_numpy(np.array(found, np.int64))


def scratch(size: int) -> tuple[Tensor, int]:
    """Uninitialised memory of ``size`` bytes, and its address."""
    memory = _NOTHING.new_empty_strided((size,), (1,))  # three times as fast as torch.empty
    return memory, memory.data_ptr()


def _refusal(name: str, t: Tensor, dtype: torch.dtype, shape: tuple[int, ...], form: str) -> Exception:
    if not isinstance(t, Tensor):
        return TypeError(f"{name} must be a tensor {shape} of {dtype}; got {type(t).__name__}")
    strides = f"strides {t.stride()}" if t.layout is _STRIDED else f"layout {t.layout}"
    message = (
        f"{name} must be {dtype} on cpu, {shape}, {form}, with memory of its own; "
        f"got {t.dtype} on {t.device}, {tuple(t.shape)}, {strides}"
    )
    return TypeError(message) if t.dtype != dtype else ValueError(message)
