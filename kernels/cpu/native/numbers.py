"""One number for each of a block's four rows, such as p_l or α_l: four float64 in a vector, whatever memory holds.

``numbers`` are four neighbours, the k-th four from 4 k on; a ``column`` is one element of each row.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fastcross.kernels.cpu.native.emit import (
    FASTMATH,
    I32,
    I64,
    Vector,
    emit_load,
    emit_narrowed,
    emit_rows,
    emit_splat,
    emit_store,
    emit_widened,
    native,
    zeros_of,
)

NUMBERS = Vector(types.float64, 4)


@intrinsic
def numbers(typing, pointer, k):
    """The k-th four at the pointer."""
    stored = Vector(pointer.dtype, 4)

    def generate(context, builder, signature, args):
        four = emit_load(builder, args[0], builder.mul(args[1], I64(4)), stored)
        return emit_widened(builder, four, NUMBERS)

    return NUMBERS(pointer, types.int64), generate


@intrinsic
def put_numbers(typing, pointer, k, values):
    stored = Vector(pointer.dtype, 4)

    def generate(context, builder, signature, args):
        value = emit_narrowed(builder, args[2], stored)
        emit_store(builder, args[0], builder.mul(args[1], I64(4)), stored, value)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, NUMBERS), generate


@intrinsic
def column(typing, block, j):
    """Column j of the block's four rows."""
    stored = Vector(block[0].dtype, 4)

    def generate(context, builder, signature, args):
        value = ir.Constant(native(stored), ir.Undefined)
        for i, (pointer, index) in enumerate(emit_rows(builder, *args)):
            value = builder.insert_element(value, builder.load(builder.gep(pointer, [index])), I32(i))
        return emit_widened(builder, value, NUMBERS)

    return NUMBERS(block, types.int64), generate


@intrinsic
def put_column(typing, block, j, values):
    stored = Vector(block[0].dtype, 4)

    def generate(context, builder, signature, args):
        value = emit_narrowed(builder, args[2], stored)
        for i, (pointer, index) in enumerate(emit_rows(builder, *args[:2])):
            builder.store(builder.extract_element(value, I32(i)), builder.gep(pointer, [index]))
        return context.get_dummy_value()

    return types.void(block, types.int64, NUMBERS), generate


@intrinsic
def each(typing, value):
    """The same number for every row."""

    def generate(context, builder, signature, args):
        return emit_splat(builder, args[0], native(NUMBERS))

    return NUMBERS(types.float64), generate


@intrinsic
def times(typing, a, b):
    return NUMBERS(NUMBERS, NUMBERS), lambda context, builder, signature, args: builder.fmul(*args, flags=FASTMATH)


@intrinsic
def of_rows(typing, values, count):
    """The numbers of the first ``count`` rows, 1 or 4, and zero for the others."""

    def generate(context, builder, signature, args):
        first = ir.Constant(ir.VectorType(ir.IntType(1), 4), [1, 0, 0, 0])
        alone = builder.select(first, args[0], zeros_of(NUMBERS))
        return builder.select(builder.icmp_signed("==", args[1], I64(4)), args[0], alone)

    return NUMBERS(NUMBERS, types.int64), generate
