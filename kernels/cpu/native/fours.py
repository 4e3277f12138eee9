"""Blocks of four rows in registers: a register's width of each row, and what is done to all four.

A block is a pointer to its first row and the stride to the next; its rows are read from memory once. The last rows of a
range, fewer than four, come one by one, each alone in a block that is the same row four times (its stride is 0): what
is written is written four times, and a sum takes the first.
"""

from numba import types
from numba.extending import intrinsic

from fastcross.kernels.cpu.native.emit import (
    FASTMATH,
    I64,
    emit_fma,
    emit_loads_upto,
    emit_rows,
    emit_splat,
    emit_stores_upto,
    native,
    vector_of,
    zeros_of,
)


def _four(emit):
    """An intrinsic on vectors in fours: ``emit`` makes each of the four results from the operands of its number."""

    def apply(typing, *fours):
        def generate(context, builder, signature, args):
            results = [emit(builder, *(builder.extract_value(arg, i) for arg in args)) for i in range(4)]
            return context.make_tuple(builder, fours[0], results)

        return fours[0](*fours), generate

    return apply


@intrinsic
def load_four(typing, block, j, count):
    """A register's width of each of the block's rows; of the last columns the ``count`` that there are, then zeros."""
    vector = vector_of(block[0])
    fours = types.UniTuple(vector, 4)

    def generate(context, builder, signature, args):
        loaded = emit_loads_upto(builder, emit_rows(builder, *args[:2]), vector, args[2])
        return context.make_tuple(builder, fours, loaded)

    return fours(block, types.int64, types.int64), generate


@intrinsic
def store_four(typing, block, j, values, count):
    def generate(context, builder, signature, args):
        vectors = [builder.extract_value(args[2], i) for i in range(4)]
        emit_stores_upto(builder, emit_rows(builder, *args[:2]), values.dtype, vectors, args[3])
        return context.get_dummy_value()

    return types.void(block, types.int64, values, types.int64), generate


@intrinsic
def splat_four(typing, values):
    """Four scalars, each in every lane of a vector."""
    fours = types.UniTuple(vector_of(values), 4)

    def generate(context, builder, signature, args):
        scalars = [builder.load(builder.gep(args[0], [I64(i)])) for i in range(4)]
        return context.make_tuple(
            builder, fours, [emit_splat(builder, scalar, native(fours.dtype)) for scalar in scalars]
        )

    return fours(values), generate


@intrinsic
def four_times(typing, x):
    fours = types.UniTuple(x, 4)
    return fours(x), lambda context, builder, signature, args: context.make_tuple(builder, fours, [args[0]] * 4)


@intrinsic
def only_first(typing, x, alone):
    """x_0 and three times zero, if the first row is alone in its block; else all four."""

    def generate(context, builder, signature, args):
        zero = zeros_of(x.dtype)
        rows = [builder.extract_value(args[0], i) for i in range(4)]
        rows[1:] = [builder.select(args[1], zero, row) for row in rows[1:]]
        return context.make_tuple(builder, x, rows)

    return x(x, types.boolean), generate


@intrinsic
def scale_four(typing, t, x):
    """t_i x_i."""
    return _four(lambda builder, t, x: builder.fmul(t, x, flags=FASTMATH))(typing, t, x)


@intrinsic
def add_four(typing, x, y):
    """x_i + y_i."""
    return _four(lambda builder, x, y: builder.fadd(x, y, flags=FASTMATH))(typing, x, y)


@intrinsic
def add_scaled(typing, t, x, y):
    """t_i x_i + y_i."""
    return _four(emit_fma)(typing, t, x, y)


@intrinsic
def weighted_sum(typing, t, x, start):
    """start + Σ_i t_i x_i."""

    def generate(context, builder, signature, args):
        t, x = ([builder.extract_value(arg, i) for i in range(4)] for arg in args[:2])
        first = emit_fma(builder, t[0], x[0], builder.fmul(t[1], x[1], flags=FASTMATH))
        second = emit_fma(builder, t[2], x[2], emit_fma(builder, t[3], x[3], args[2]))
        return builder.fadd(first, second, flags=FASTMATH)

    return start(t, x, start), generate


@intrinsic
def plain_sum(typing, x, start):
    """start + Σ_i x_i."""

    def generate(context, builder, signature, args):
        x = [builder.extract_value(args[0], i) for i in range(4)]
        first = builder.fadd(x[0], x[1], flags=FASTMATH)
        second = builder.fadd(x[2], x[3], flags=FASTMATH)
        return builder.fadd(first, builder.fadd(second, args[1], flags=FASTMATH), flags=FASTMATH)

    return start(x, start), generate
