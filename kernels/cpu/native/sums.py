"""Sums over rows: in the storage dtype for some of them, in float64 across these, and at last over all chunks."""

from numba import types
from numba.extending import intrinsic

from fastcross.kernels.cpu.native.emit import (
    FASTMATH,
    I64,
    emit_add_exactly,
    emit_address,
    emit_load,
    emit_loop,
    emit_store,
    emit_widened,
    vector_of,
    wide_vector_of,
    zeros_of,
)

# Rows, a multiple of 4, that are summed in the storage dtype: few enough for the sum to round as often as PyTorch's.
FLOAT_ROWS, DOUBLE_ROWS = 128, 64


@intrinsic
def clear(typing, values, size):
    vector = vector_of(values)

    def generate(context, builder, signature, args):
        values, size = args

        def turn(i, _):
            emit_store(builder, values, i, vector, zeros_of(vector))

        emit_loop(builder, I64(0), size, I64(vector.count), [], turn)
        return context.get_dummy_value()

    return types.void(values, types.int64), generate


@intrinsic
def are_few(typing, rows, chunks, sums):
    """Whether a task's rows are in one chunk, and all may be in its sums: these are then the totals."""

    def generate(context, builder, signature, args):
        fit = builder.icmp_signed("<=", args[0], I64(_rows_of(sums)))
        return builder.and_(fit, builder.icmp_signed("==", args[1], I64(1)))

    return types.boolean(types.int64, types.int64, sums), generate


@intrinsic
def is_full(typing, r, next_r, start, stop, sums):
    """Whether with the block of row r the sums since the last flush have all rows that they may have, or will."""

    def generate(context, builder, signature, args):
        r, next_r, start, stop = args[:4]
        since = builder.srem(builder.sub(r, start), I64(_rows_of(sums)))
        last = builder.icmp_signed("==", since, I64(_rows_of(sums) - 4))
        return builder.or_(last, builder.icmp_signed(">=", next_r, stop))

    return types.boolean(*[types.int64] * 4, sums), generate


def _rows_of(sums):
    return DOUBLE_ROWS if sums.dtype == types.float64 else FLOAT_ROWS


@intrinsic
def flush(typing, totals, errors, sums, size):
    """The sums join the float64 totals and begin again at zero.

    Sums of float32 lose nothing in float64; those of float64 lose their last bits, which are added up in ``errors``.
    """
    vector, wide = vector_of(sums), wide_vector_of(sums)

    def generate(context, builder, signature, args):
        totals, errors, sums, size = args

        def turn(i, _):
            part = emit_load(builder, sums, i, vector)
            if vector == wide:
                _emit_add_exactly(builder, totals, errors, i, wide, part)
            else:
                _emit_add(builder, totals, i, wide, emit_widened(builder, part, wide))
            emit_store(builder, sums, i, vector, zeros_of(vector))

        emit_loop(builder, I64(0), size, I64(vector.count), [], turn)
        return context.get_dummy_value()

    return types.void(totals, errors, sums, types.int64), generate


@intrinsic
def join(typing, totals, errors, chunks, size, own_bytes, like):
    """The chunks' totals, added in the order of their rows into the first; with float64, the errors into those."""
    vector, wide = vector_of(like), wide_vector_of(like)

    def generate(context, builder, signature, args):
        totals, errors, chunks, size, own_bytes, _ = args
        width, step = I64(vector.count), builder.sdiv(own_bytes, I64(8))

        def join_chunk(chunk, _):
            other = builder.mul(chunk, step)

            def turn(i, _):
                there = builder.add(other, i)
                part = emit_load(builder, totals, there, wide)
                if vector == wide:
                    _emit_add_exactly(builder, totals, errors, i, wide, part)
                    _emit_add(builder, errors, i, wide, emit_load(builder, errors, there, wide))
                else:
                    _emit_add(builder, totals, i, wide, part)

            emit_loop(builder, I64(0), size, width, [], turn)

        def add_errors(i, _):
            _emit_add(builder, totals, i, wide, emit_load(builder, errors, i, wide))

        emit_loop(builder, I64(1), chunks, I64(1), [], join_chunk)
        if vector == wide:
            emit_loop(builder, I64(0), size, width, [], add_errors)
        return context.get_dummy_value()

    return types.void(totals, errors, types.int64, types.int64, types.int64, like), generate


def _emit_add(builder, pointer, i, vector, part):
    total = builder.fadd(emit_load(builder, pointer, i, vector), part, flags=FASTMATH)
    emit_store(builder, pointer, i, vector, total)


def _emit_add_exactly(builder, totals, errors, i, vector, part):
    emit_add_exactly(builder, [emit_address(builder, pointer, i, vector) for pointer in (totals, errors)], part)
