"""LLVM's instructions for vector registers, and loops of them, for the intrinsics of the files beside this one.

A ``Vector`` holds ``count`` neighbouring elements in registers: 32 bytes of a pointer's dtype, or as many float64. LLVM
translates the same instructions for AVX2, AVX-512 and NEON.
"""

from llvmlite import ir
from numba import types
from numba.extending import models, register_model

from fastcross.kernels.cpu.fields import REGISTER_BYTES

# Sums of vectors may be reordered and contracted; NaN and infinity keep their meaning.
FASTMATH = ("reassoc", "contract", "nsz")
I32, I64 = ir.IntType(32), ir.IntType(64)


class Vector(types.Type):
    def __init__(self, real: types.Float, count: int) -> None:
        self.real, self.count = real, count
        super().__init__(f"Vector({real}, {count})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, vector):
        super().__init__(manager, vector, native(vector))


def native(vector: Vector) -> ir.VectorType:
    return ir.VectorType(ir.FloatType() if vector.real == types.float32 else ir.DoubleType(), vector.count)


def vector_of(pointer: types.CPointer) -> Vector:
    return Vector(pointer.dtype, 8 * REGISTER_BYTES // pointer.dtype.bitwidth)


def wide_vector_of(pointer: types.CPointer) -> Vector:
    """As many float64 as a vector of the pointer's dtype has lanes."""
    return Vector(types.float64, vector_of(pointer).count)


def zeros_of(vector: Vector) -> ir.Constant:
    return ir.Constant(native(vector), None)


def emit_loop(builder, start, stop, step, values, body):
    """``values = body(j, values)``, if there are any, for j in range(start, stop, step); what they are in the end."""
    before = builder.block
    look, turn, end = (builder.append_basic_block() for _ in range(3))
    builder.branch(look)
    builder.position_at_end(look)
    j, *now = (builder.phi(value.type) for value in (start, *values))
    builder.cbranch(builder.icmp_signed("<", j, stop), turn, end)
    builder.position_at_end(turn)
    after = body(j, now) or ()
    for phi, first, following in zip((j, *now), (start, *values), (builder.add(j, step), *after), strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(following, builder.block)
    builder.branch(look)
    builder.position_at_end(end)
    return now


def emit_columns(builder, d, vector, values, turn):
    """``values = turn(j, load, values)`` for each register's width of d columns; what they are in the end.

    ``load`` gives the registers at some (pointer, index); of the last columns those that there are, then zeros.
    """

    def whole(j, values):
        return turn(j, lambda places: (emit_load(builder, *place, vector) for place in places), values)

    def rest(j, values):
        return turn(j, lambda places: _emit_masked_loads(builder, places, vector, builder.sub(d, j)), values)

    width = I64(vector.count)
    full = builder.sub(d, builder.srem(d, width))
    values = emit_loop(builder, I64(0), full, width, values, whole)
    return emit_loop(builder, full, d, width, values, rest)


def emit_rows(builder, block, j):
    """Where column ``j`` of a block's four rows is: pointer and index."""
    pointer, stride = (builder.extract_value(block, i) for i in (0, 1))
    return [(pointer, builder.add(builder.mul(stride, I64(i)), j)) for i in range(4)]


def emit_load(builder, pointer, index, vector):
    return builder.load(emit_address(builder, pointer, index, vector), align=vector.real.bitwidth // 8)


def emit_store(builder, pointer, index, vector, value):
    builder.store(value, emit_address(builder, pointer, index, vector), align=vector.real.bitwidth // 8)


def _emit_masked_loads(builder, places, vector, count):
    kind, bits, mask = native(vector), vector.real.bitwidth, _mask(builder, vector, count)
    load = declare(
        builder, f"llvm.masked.load.v{vector.count}f{bits}.p0", kind, kind.as_pointer(), I32, mask.type, kind
    )
    addresses = [emit_address(builder, *place, vector) for place in places]
    return [builder.call(load, [address, I32(bits // 8), mask, zeros_of(vector)]) for address in addresses]


def emit_loads_upto(builder, places, vector, count):
    """The first ``count`` elements at each (pointer, index), then zeros: memory past them is not touched.

    Where ``count`` is the number of lanes, no mask is needed, which costs time; LLVM sees where that is always so.
    """
    with builder.if_else(builder.icmp_signed("==", count, I64(vector.count))) as (whole, part):
        with whole:
            full, from_full = [emit_load(builder, *place, vector) for place in places], builder.block
        with part:
            masked, from_masked = _emit_masked_loads(builder, places, vector, count), builder.block
    results = []
    for one, other in zip(full, masked, strict=True):
        result = builder.phi(native(vector))
        result.add_incoming(one, from_full)
        result.add_incoming(other, from_masked)
        results.append(result)
    return results


def emit_stores_upto(builder, places, vector, values, count):
    """The first ``count`` lanes of each value."""
    with builder.if_else(builder.icmp_signed("==", count, I64(vector.count))) as (whole, part):
        with whole:
            for place, value in zip(places, values, strict=True):
                emit_store(builder, *place, vector, value)
        with part:
            _emit_pieces(builder, places, vector, values, count)


def _emit_pieces(builder, places, vector, values, count):
    """Stores the first ``count`` lanes: half of them, a quarter, ... as its bits say.

    A masked store would take AMD's Zen 2 and 3 longer than all of these.
    """
    lanes = vector.count
    while lanes > 1:
        lanes //= 2
        takes = builder.icmp_signed("!=", builder.and_(count, I64(lanes)), I64(0))
        low, high = ([_lanes(builder, value, first, lanes) for value in values] for first in (0, lanes))
        with builder.if_then(takes):
            for (pointer, index), value in zip(places, low, strict=True):
                place = builder.bitcast(builder.gep(pointer, [index]), value.type.as_pointer())
                builder.store(value, place, align=vector.real.bitwidth // 8)
        values = [builder.select(takes, *halves) for halves in zip(high, low, strict=True)]
        done = builder.select(takes, I64(lanes), I64(0))
        places = [(pointer, builder.add(index, done)) for pointer, index in places]


def _lanes(builder, value, first, count):
    chosen = ir.Constant(ir.VectorType(I32, count), list(range(first, first + count)))
    return builder.shuffle_vector(value, value, chosen)


def _mask(builder, vector, count):
    """True for the first ``count`` lanes."""
    kind = ir.VectorType(I64, vector.count)
    return builder.icmp_signed("<", ir.Constant(kind, list(range(vector.count))), emit_splat(builder, count, kind))


def emit_prefetch(builder, pointer, index, write):
    """Asks for the cache line of an element before it is needed."""
    byte = ir.IntType(8).as_pointer()
    native_prefetch = declare(builder, "llvm.prefetch.p0", ir.VoidType(), byte, I32, I32, I32)
    address = builder.bitcast(builder.gep(pointer, [index]), byte)
    builder.call(native_prefetch, [address, I32(int(write)), I32(2), I32(1)])  # 2: the second cache, 1: data


def emit_splat(builder, value, kind):
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(I32, kind.count), None))


def emit_fma(builder, a, b, c):
    return builder.fadd(builder.fmul(a, b, flags=FASTMATH), c, flags=FASTMATH)


def emit_add_exactly(builder, places, value):
    """*places[0] += value, and *places[1] += what that rounded away: Knuth's sum of two numbers, in float64."""
    before, error = (builder.load(place, align=8) for place in places)
    # No operation has flags, which would allow LLVM to find that the error is zero.
    after = builder.fadd(before, value)
    added = builder.fsub(after, before)
    lost = builder.fadd(builder.fsub(before, builder.fsub(after, added)), builder.fsub(value, added))
    is_number = builder.fcmp_ordered("ord", lost, lost)  # where a sum is infinite, nothing is lost
    lost = builder.select(is_number, lost, ir.Constant(lost.type, None))
    builder.store(after, places[0], align=8)
    builder.store(builder.fadd(error, lost), places[1], align=8)


def emit_widened(builder, value, vector):
    """A vector's lanes in the dtype of ``vector``, where that is a wider one."""
    return value if value.type == native(vector) else builder.fpext(value, native(vector))


def emit_narrowed(builder, value, vector):
    return value if value.type == native(vector) else builder.fptrunc(value, native(vector))


def emit_total(builder, value):
    """The sum of a vector's lanes."""
    kind = value.type
    bits = 32 if kind.element == ir.FloatType() else 64
    reduce = declare(builder, f"llvm.vector.reduce.fadd.v{kind.count}f{bits}", kind.element, kind.element, kind)
    return builder.call(reduce, [ir.Constant(kind.element, 0.0), value], fastmath=FASTMATH)


def declare(builder, name, result, *arguments):
    """One of LLVM's own functions."""
    module = builder.module
    return module.globals.get(name) or ir.Function(module, ir.FunctionType(result, arguments), name)


def emit_address(builder, pointer, index, vector):
    return builder.bitcast(builder.gep(pointer, [index]), native(vector).as_pointer())
