"""Vector registers in Numba: what a CPU kernel is written in when the order of its loads and multiply-adds matters.

A pointer is Numba's ``CPointer`` to float32 or float64, as a C function gets it; indices count elements. Each intrinsic
is emitted into the kernel that calls it, as a few instructions. A function that Numba compiles by itself, even one that
is always inlined, costs the first user a tenth to a quarter of a second.
"""

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from fastcross.kernels.cpu.native.emit import (
    FASTMATH,
    I64,
    Vector,
    declare,
    emit_add_exactly,
    emit_fma,
    emit_load,
    emit_loads_upto,
    emit_narrowed,
    emit_prefetch,
    emit_splat,
    emit_store,
    emit_stores_upto,
    emit_total,
    emit_widened,
    native,
    vector_of,
    wide_vector_of,
    zeros_of,
)

OPTIONS: dict[str, Any] = {"error_model": "numpy"}
# For functions that kernels share and that are too long for an intrinsic; they cannot be called from Python.
_INLINE: dict[str, Any] = {**OPTIONS, "forceinline": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
inline = njit(**_INLINE)


@intrinsic
def lanes(typing, pointer):
    """Elements per vector; known to the compiler."""
    count = vector_of(pointer).count
    return types.int64(pointer), lambda context, builder, signature, args: I64(count)


@intrinsic
def known(typing, value):
    """An integer or a boolean that LLVM knows, and Numba does not: that would compile a function anew for each one."""
    if not isinstance(value, types.Literal):  # Numba tries both
        return None
    kind = types.unliteral(value)
    return kind(value), lambda context, builder, signature, args: context.get_constant(kind, value.literal_value)


@intrinsic
def at(typing, pointer, index):
    """The pointer to the element ``index``."""
    return pointer(pointer, types.int64), lambda context, builder, signature, args: builder.gep(args[0], [args[1]])


@intrinsic
def pointer_to(typing, address, like):
    """An address, as one of a table of them, as a pointer of the kind of another."""

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(like))

    return like(types.int64, like), generate


@intrinsic
def copy(typing, destination, source, count):
    """``count`` elements."""

    def generate(context, builder, signature, args):
        byte = ir.IntType(8).as_pointer()
        memcpy = declare(builder, "llvm.memcpy.p0.p0.i64", ir.VoidType(), byte, byte, I64, ir.IntType(1))
        size = builder.mul(args[2], I64(source.dtype.bitwidth // 8))
        builder.call(memcpy, [builder.bitcast(args[0], byte), builder.bitcast(args[1], byte), size, ir.IntType(1)(0)])
        return context.get_dummy_value()

    return types.void(destination, source, types.int64), generate


@intrinsic
def least(typing, a, b):
    """The smaller of two integers."""

    def generate(context, builder, signature, args):
        return builder.select(builder.icmp_signed("<", *args), *args)

    return types.int64(types.int64, types.int64), generate


@intrinsic
def zeros(typing, pointer):
    """A vector of zeros, for the dtype of the pointer."""
    vector = vector_of(pointer)
    return vector(pointer), lambda context, builder, signature, args: zeros_of(vector)


@intrinsic
def zeros_wide(typing, pointer):
    """As many zeros in float64 as a vector of the pointer's dtype has lanes."""
    vector = wide_vector_of(pointer)
    return vector(pointer), lambda context, builder, signature, args: zeros_of(vector)


@intrinsic
def load(typing, pointer, index):
    vector = vector_of(pointer)
    return vector(pointer, types.int64), lambda context, builder, signature, args: emit_load(builder, *args, vector)


@intrinsic
def load_upto(typing, pointer, index, count):
    """The first ``count`` elements, then zeros: memory past them is not touched."""
    vector = vector_of(pointer)

    def generate(context, builder, signature, args):
        return emit_loads_upto(builder, [args[:2]], vector, args[2])[0]

    return vector(pointer, types.int64, types.int64), generate


@intrinsic
def load_wide(typing, wide, index, pointer):
    """As many float64 as a vector of the pointer's dtype has lanes."""
    vector = wide_vector_of(pointer)

    def generate(context, builder, signature, args):
        return emit_load(builder, *args[:2], vector)

    return vector(wide, types.int64, pointer), generate


@intrinsic
def store(typing, pointer, index, value):
    def generate(context, builder, signature, args):
        emit_store(builder, *args[:2], value, args[2])
        return context.get_dummy_value()

    return types.void(pointer, types.int64, value), generate


@intrinsic
def store_upto(typing, pointer, index, value, count):
    """The first ``count`` lanes."""

    def generate(context, builder, signature, args):
        emit_stores_upto(builder, [args[:2]], value, [args[2]], args[3])
        return context.get_dummy_value()

    return types.void(pointer, types.int64, value, types.int64), generate


def _prefetch(write: bool):
    def fetch(typing, pointer, index):
        def generate(context, builder, signature, args):
            emit_prefetch(builder, *args, write)
            return context.get_dummy_value()

        return types.void(pointer, types.int64), generate

    return intrinsic(fetch)


# Ask for the cache line of an element before it is needed, to read or to write it.
prefetch, prefetch_write = _prefetch(False), _prefetch(True)


@intrinsic
def splat_wide(typing, value, pointer):
    """A float64 in as many lanes as a vector of the pointer's dtype has."""
    vector = wide_vector_of(pointer)

    def generate(context, builder, signature, args):
        return emit_splat(builder, args[0], native(vector))

    return vector(types.float64, pointer), generate


@intrinsic
def fma(typing, a, b, c):
    """a b + c, of vectors, or of numbers in float64."""
    signature = c(a, b, c) if isinstance(c, Vector) else types.float64(types.float64, types.float64, types.float64)
    return signature, lambda context, builder, signature, args: emit_fma(builder, *args)


@intrinsic
def fma_unless_zero(typing, a, b, c):
    """a b + c, of vectors; c where b is 0, even if a is infinite or NaN."""

    def generate(context, builder, signature, args):
        is_zero = builder.fcmp_ordered("==", args[1], zeros_of(b))
        return builder.select(is_zero, args[2], emit_fma(builder, *args))

    return c(a, b, c), generate


@intrinsic
def square_root(typing, x):
    """Of a number, in its own dtype."""

    def generate(context, builder, signature, args):
        kind = context.get_value_type(x)
        return builder.call(declare(builder, f"llvm.sqrt.f{x.bitwidth}", kind, kind), args)

    return x(x), generate


@intrinsic
def add(typing, a, b):
    return a(a, b), lambda context, builder, signature, args: builder.fadd(*args, flags=FASTMATH)


@intrinsic
def add_exactly(typing, totals, errors, index, value):
    """totals[index] += value, and errors[index] += what that rounded away; float64, numbers or vectors."""

    def generate(context, builder, signature, args):
        places = [builder.gep(pointer, [args[2]]) for pointer in args[:2]]
        if isinstance(value, Vector):
            places = [builder.bitcast(place, native(value).as_pointer()) for place in places]
        emit_add_exactly(builder, places, args[3])
        return context.get_dummy_value()

    kind = value if isinstance(value, Vector) else types.float64
    return types.void(totals, errors, types.int64, kind), generate


@intrinsic
def is_double(typing, pointer):
    """Whether the dtype is float64; known to the compiler."""
    return types.boolean(pointer), lambda context, builder, signature, args: ir.IntType(1)(pointer.dtype.bitwidth == 64)


@intrinsic
def total(typing, value):
    """The sum of the lanes."""
    return value.real(value), lambda context, builder, signature, args: emit_total(builder, args[0])


@intrinsic
def widen(typing, value):
    """The lanes in float64."""
    wide = Vector(types.float64, value.count)

    def generate(context, builder, signature, args):
        return emit_widened(builder, args[0], wide)

    return wide(value), generate


@intrinsic
def narrow(typing, value, pointer):
    """The lanes in the dtype of the pointer."""
    vector = vector_of(pointer)

    def generate(context, builder, signature, args):
        return emit_narrowed(builder, args[0], vector)

    return vector(value, pointer), generate
