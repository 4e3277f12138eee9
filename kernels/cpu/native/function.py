"""A kernel as Numba compiles it; the one place that knows what Numba does not document.

Where another version of Numba lacks that, kernels are compiled in every process, and nothing else is lost;
``tests/kernels/test_numba_internals.py`` notices.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import torch
from numba import types

from fastcross.kernels.cpu.native.simd import OPTIONS

# What LLVM may leave to the C library; anything else would have to be found when the code is loaded.
_IN_C_LIBRARY = ("memcpy", "memmove", "memset")


class Native(NamedTuple):
    address: int
    symbol: str
    content: bytes | None  # object code
    owner: Any  # of the memory at the address


def native_function(kernel: Callable[[Any], object], dtype: torch.dtype) -> Native:
    """The kernel for float32 or float64, as a function of its task's block."""
    real = types.float32 if dtype == torch.float32 else types.float64
    native = numba.cfunc(types.void(types.CPointer(real)), **OPTIONS)(kernel)
    return Native(native.address or 0, native.native_name, object_code(native), native)


def object_code(native: Any) -> bytes | None:
    """The object code of a ``numba.cfunc``, if it can be had and needs nothing of Numba's when it is loaded again."""
    try:
        declared = set(re.findall(r'^declare [^@\n]*@"?([^"(\s]+)"?\(', native.inspect_llvm(), re.MULTILINE))
        code = native._library._get_compiled_object()
    except (AttributeError, RuntimeError, ValueError):
        return None
    known = all(name.startswith("llvm.") or name in _IN_C_LIBRARY for name in declared)
    return bytes(code) if known else None
