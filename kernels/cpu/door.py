"""The only way from a tensor to an address: here what stands behind it is checked, and nowhere else is one taken.

A kernel gets a bare pointer, and would read or write whatever lies there. So the dtype, the device, the layout, the
shape and the strides are compared with what the kernel is about to touch; a tensor that differs is an error.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
_METADATA = attrgetter("dtype", "device", "layout", "shape")


def describe(t: Tensor | None) -> Any:
    """All that :func:`check` looks at: what is right for one tensor is right for others of the same description."""
    return None if t is None else (_METADATA(t), t.stride())


def check(name: str, t: Any, dtype: torch.dtype, shape: Sequence[int | str], are_rows: bool = False) -> None:
    """Raises unless a kernel may have the tensor's address.

    Args:
        shape: numbers, and names for those that may be any.
        are_rows: whether there may be something between the rows of (M, d); otherwise it must be contiguous.
    """
    form = "rows with unit column stride" if are_rows else "contiguous"
    wanted = f"{dtype} on cpu, ({', '.join(map(str, shape))}), {form}"
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be {wanted}; got {type(t).__name__}")
    strided = t.layout is torch.strided
    found = f"{t.dtype} on {t.device}, {tuple(t.shape)}, {f'strides {t.stride()}' if strided else t.layout}"
    if t.dtype is not dtype:
        raise TypeError(f"{name} must be {wanted}; got {found}")
    fits = len(t.shape) == len(shape) and all(isinstance(n, str) or n == m for n, m in zip(shape, t.shape, strict=True))
    if not (fits and strided and t.device.type == "cpu" and (_lies_in_rows(t) if are_rows else t.is_contiguous())):
        raise ValueError(f"{name} must be {wanted}; got {found}")


def _lies_in_rows(t: Tensor) -> bool:
    # PyTorch calls a tensor without rows contiguous whatever its strides are.
    return t.dim() == 2 and (t.stride(1) == 1 or t.shape[1] < 2 or t.shape[0] == 0)


def reach(t: Tensor | None) -> int:
    """The bytes from a tensor's first element to behind its last one."""
    if t is None or not t.numel():
        return 0
    return (sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True)) + 1) * t.itemsize


def addresses_of(names: Sequence[str], tensors: Sequence[Tensor | None], reaches: Sequence[int]) -> list[int]:
    """The addresses of tensors that were checked, or are like ones that were; 0 for what is absent or empty.

    What stands behind a tensor may have been freed or cut since (``untyped_storage().resize_``), which its description
    does not show: so each call compares the ``reaches`` with the memory that is there.
    """
    found: list[int] = []
    for t, size in zip(tensors, reaches, strict=True):
        address = 0
        if size and t is not None:
            address, memory = t.data_ptr(), t.untyped_storage()
            if address == 0 or address + size > memory.data_ptr() + memory.nbytes():
                refuse(names[len(found)], t, size)
        found.append(address)
    return found


def refuse(name: str, t: Tensor, size: int) -> NoReturn:
    """Raises for a tensor that has not the memory its description promises."""
    there = t.untyped_storage().nbytes() - t.storage_offset() * t.itemsize
    raise ValueError(f"{name} must have memory of its own, {size} bytes; got {tuple(t.shape)} with {there}")


def addresses_of_fresh(tensors: Sequence[Tensor | None]) -> list[int]:
    """The addresses of tensors that were made in this call."""
    return [0 if t is None else t.data_ptr() for t in tensors]


def taking(name: str, word: int, size: int) -> list[str]:
    """As :func:`addresses_of` for one tensor of ``size`` bytes, as lines of a function (``launcher.py``)."""
    return [
        f"    _block[{word}] = _address = {name}.data_ptr()",
        f"    _memory = {name}.untyped_storage()",
        f"    if not 0 < _address <= _memory.data_ptr() + _memory.nbytes() - {size}:",
        f"        _refuse({name!r}, {name}, {size})",
    ]


def taking_fresh(name: str, word: int) -> list[str]:
    """As :func:`addresses_of_fresh` for one tensor."""
    return [f"    _block[{word}] = {name}.data_ptr()"]


def table_of(name: str, tensors: Sequence[Tensor], dtype: torch.dtype, shapes: Sequence[Sequence[int]]) -> Tensor:
    """The addresses of contiguous tensors as a tensor, for a kernel that has any number of them."""
    if len(tensors) != len(shapes):
        raise ValueError(f"{name} must be {len(shapes)} tensors; got {len(tensors)}")
    for t, shape in zip(tensors, shapes, strict=True):
        if (
            not isinstance(t, Tensor)
            or t.dtype is not dtype
            or t.shape != tuple(shape)
            or not t.is_cpu
            or t.layout is not torch.strided
            or not t.is_contiguous()
        ):  # the quick way to see that `check` has nothing to say
            check(name, t, dtype, shape)
    return torch.from_numpy(np.array(addresses_of([name] * len(tensors), tensors, list(map(reach, tensors))), np.int64))


def scratch(size: int) -> tuple[Tensor, int]:
    """Uninitialised memory of ``size`` bytes, and its address."""
    memory = _NOTHING.new_empty_strided((size,), (1,))  # three times as fast as torch.empty
    return memory, memory.data_ptr()
