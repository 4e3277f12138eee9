"""Dots of a block's four rows: with vectors, each of which is loaded once for all four, and with four other rows.

The loops are emitted as LLVM's instructions: as functions of Numba's they would take the first user a second.
"""

from numba import types
from numba.extending import intrinsic

from fastcross.kernels.cpu.native.emit import (
    I64,
    emit_columns,
    emit_fma,
    emit_prefetch,
    emit_rows,
    emit_total,
    vector_of,
    zeros_of,
)
from fastcross.kernels.cpu.native.simd import at, inline, lanes


def _dots_with(how_many):
    """The intrinsic for the dots with so many vectors: out_ki = row_i·vector_k, ``out`` is (how_many, 4).

    Between the vectors lie ``vector_step`` elements, between one's pieces of a register's width ``step``.
    """

    def dots(typing, block, vectors, step, vector_step, d, out, ahead):
        vector = vector_of(vectors)

        def generate(context, builder, signature, args):
            block, vectors, step, vector_step, d, out, ahead = args
            apart = [builder.mul(vector_step, I64(k)) for k in range(how_many)]

            def turn(j, load, values):
                piece, *sums = values
                _emit_fetch(builder, ahead, j, vector)
                v = [*load((vectors, builder.add(piece, more)) for more in apart)]
                # Row by row: beside one row and three vectors, the registers have just room for twelve sums.
                for i, x in enumerate(load(emit_rows(builder, block, j))):
                    for k in range(how_many):
                        sums[4 * k + i] = emit_fma(builder, v[k], x, sums[4 * k + i])
                return [builder.add(piece, step), *sums]

            _, *sums = emit_columns(builder, d, vector, [I64(0)] + [zeros_of(vector)] * 4 * how_many, turn)
            _store_totals(builder, out, sums)
            return context.get_dummy_value()

        index = types.int64
        return types.void(block, vectors, index, index, index, out, ahead), generate

    return intrinsic(dots)


dots_with_one, dots_with_two, dots_with_three = (_dots_with(how_many) for how_many in (1, 2, 3))


@inline
def dots_with_all(block, vectors, step, vector_step, d, K, out, ahead):
    """The dots with K vectors; ``out`` is (K, 4). Returns what is then ahead."""
    n, k = lanes(vectors), 0
    x_ahead, y_ahead, share = ahead
    while k < K:
        vector, dots, more = at(vectors, k * vector_step), at(out, 4 * k), (x_ahead, y_ahead, share)
        if k + 3 <= K and k + 4 != K:
            dots_with_three(block, vector, step, vector_step, d, dots, more)
            k += 3
        elif k + 2 <= K:
            dots_with_two(block, vector, step, vector_step, d, dots, more)
            k += 2
        else:
            dots_with_one(block, vector, step, vector_step, d, dots, more)
            k += 1
        x_ahead, y_ahead = at(x_ahead, d // n * share), at(y_ahead, d // n * share)
    return x_ahead, y_ahead, share


@intrinsic
def passes(typing, K):
    """How many passes over a block ``dots_with_all`` makes: by threes, and twos for what they leave."""

    def generate(context, builder, signature, args):
        return builder.sdiv(builder.add(args[0], I64(2)), I64(3))

    return types.int64(types.int64), generate


@intrinsic
def dots_of_pairs(typing, block, other, d, out):
    """out_i = row_i·other_i."""
    vector = vector_of(out)

    def generate(context, builder, signature, args):
        block, other, d, out = args

        def turn(j, load, sums):
            pairs = zip(*([*load(emit_rows(builder, rows, j))] for rows in (block, other)), sums, strict=True)
            return [emit_fma(builder, x, y, total) for x, y, total in pairs]

        _store_totals(builder, out, emit_columns(builder, d, vector, [zeros_of(vector)] * 4, turn))
        return context.get_dummy_value()

    return types.void(block, other, types.int64, out), generate


@intrinsic
def fetch(typing, ahead, j):
    """Asks memory for a piece of the next block, to read and to write, while this one is worked on.

    A core can wait for few cache lines at a time, so each of a block's passes over its columns asks for its share:
    ``ahead`` is where this pass's begins, and how many elements go with a register's width of columns; 0 for nothing.
    """

    def generate(context, builder, signature, args):
        _emit_fetch(builder, *args, vector_of(ahead[0]))
        return context.get_dummy_value()

    return types.void(ahead, types.int64), generate


def _emit_fetch(builder, ahead, j, vector):
    x, y, share = (builder.extract_value(ahead, i) for i in range(3))
    with builder.if_then(builder.icmp_signed(">", share, I64(0))):
        place = builder.mul(builder.sdiv(j, I64(vector.count)), share)
        emit_prefetch(builder, x, place, write=False)
        emit_prefetch(builder, y, place, write=True)


def _store_totals(builder, out, sums):
    """Of the lanes of each."""
    for i, lanes_of_sum in enumerate(sums):
        builder.store(emit_total(builder, lanes_of_sum), builder.gep(out, [I64(i)]))
