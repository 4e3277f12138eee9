"""What the CPU kernels use of PyTorch that it does not document, with a fallback for when it is gone.

``tests/kernels/test_torch_internals.py`` fails where it is, or does something else than it did.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_empty_strided: Any = getattr(_guards, "_empty_strided_cpu", None)  # what PyTorch's compiled code allocates with


def maker(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Callable[[], Tensor]:
    """What makes an uninitialised tensor, in half the time of ``torch.empty``, and never fills it."""
    if _empty_strided is None:
        return filling_maker(shape, strides, dtype)
    return functools.partial(_empty_strided, shape, strides, dtype)


def filling_maker(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Callable[[], Tensor]:
    """As ``torch.empty``, which fills with NaN where ``torch.use_deterministic_algorithms`` asks for it."""
    # A tensor's method is found sooner than the function.
    return functools.partial(torch.empty(0, dtype=dtype, device="cpu").new_empty_strided, shape, strides)
