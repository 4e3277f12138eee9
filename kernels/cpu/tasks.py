"""A native task: a kernel's arguments in one block of memory, and its chunks of rows, which threads take by turns.

The block is a row of 64-bit words: the number of the next chunk, then the kernel's operands (addresses of the storage
dtype), addresses of float64, and integers. Its own address comes typed as a pointer to the storage dtype, which is how
a kernel knows what it is compiled for.
"""

import ctypes
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fastcross.kernels.cpu.simd import OPTIONS

_WORD = ir.IntType(64)


def _words(builder, task):
    return builder.bitcast(task, _WORD.as_pointer())


@intrinsic(prefer_literal=True)
def arguments(typing, task, operands, wide, integers):
    """The kernel's arguments, as many of each kind as the three literals say."""
    kinds = (
        *(task,) * operands.literal_value,
        *(types.CPointer(types.float64),) * wide.literal_value,
        *(types.int64,) * integers.literal_value,
    )
    result = types.Tuple(kinds) if len(set(kinds)) > 1 else types.UniTuple(kinds[0], len(kinds))

    def generate(context, builder, signature, args):
        words = _words(builder, args[0])
        values = [builder.load(builder.gep(words, [_WORD(1 + i)])) for i in range(len(kinds))]
        for i, kind in enumerate(kinds):
            if kind != types.int64:
                values[i] = builder.inttoptr(values[i], context.get_value_type(kind))
        return context.make_tuple(builder, result, values)

    return result(task, operands, wide, integers), generate


@intrinsic
def next_chunk(typing, task):
    """The number of a chunk that no other thread has taken."""

    def generate(context, builder, signature, args):
        return builder.atomic_rmw("add", _words(builder, args[0]), _WORD(1), "monotonic")

    return types.int64(task), generate


def pack(operands: tuple[int, ...], wide: tuple[int, ...], integers: tuple[int, ...]) -> Any:
    """The block for a call, with no chunk taken yet."""
    return (ctypes.c_int64 * (1 + len(operands) + len(wide) + len(integers)))(0, *operands, *wide, *integers)


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
