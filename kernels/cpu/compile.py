"""Kernels as native functions: compiled once per machine, for one dtype each, and kept in Numba's cache."""

import ctypes
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
import torch
from numba import types

from fastcross.kernels.cpu.simd import OPTIONS


@functools.cache
def compiled(kernel: FunctionType, dtype: torch.dtype) -> Callable[[Any], None]:
    """The kernel for one dtype as a native function, compiled once per machine where a cache can be written."""
    real = types.float32 if dtype == torch.float32 else types.float64
    signature = types.void(types.CPointer(real))
    try:
        native = numba.cfunc(signature, cache=True, **OPTIONS)(_named_after_sources(kernel))
    except RuntimeError:  # nowhere to keep the cache: neither the package's folder nor the user's can be written
        native = numba.cfunc(signature, **OPTIONS)(kernel)
    call: Any = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(native.address)  # type: ignore[arg-type]
    call.native = native  # keeps the machine code alive
    return call


def _named_after_sources(kernel: FunctionType) -> FunctionType:
    """The kernel under a name of its own for these sources: Numba's cache would look at the age of one file only."""
    named = FunctionType(kernel.__code__, kernel.__globals__, kernel.__name__)
    named.__qualname__ = f"{kernel.__name__}_{_digest()}"
    named.__module__ = kernel.__module__
    return named


@functools.cache
def _digest() -> str:
    """Of all files that end up in the machine code."""
    folder = Path(__file__).parent
    files = sorted(folder.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
