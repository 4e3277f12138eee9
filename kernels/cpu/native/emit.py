"""LLVM's instructions for vector registers, emitted by the intrinsics of ``simd.py`` and ``blocks.py``.

A ``Vector`` holds ``lanes`` neighbouring elements, 32 bytes in all, and lives in a register. LLVM translates the same
instructions for AVX2, AVX-512 and NEON.
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


def emit_load(builder, pointer, index, vector):
    return builder.load(_address(builder, pointer, index, vector), align=vector.real.bitwidth // 8)


def emit_store(builder, pointer, index, vector, value):
    builder.store(value, _address(builder, pointer, index, vector), align=vector.real.bitwidth // 8)


def _masked_load(builder, pointer, index, vector, mask):
    kind, bits = native(vector), vector.real.bitwidth
    load = declare(
        builder, f"llvm.masked.load.v{vector.count}f{bits}.p0", kind, kind.as_pointer(), I32, mask.type, kind
    )
    return builder.call(
        load, [_address(builder, pointer, index, vector), I32(bits // 8), mask, ir.Constant(kind, None)]
    )


def emit_loads_upto(builder, places, vector, count):
    """The first ``count`` elements at each (pointer, index), then zeros: memory past them is not touched.

    Where ``count`` is the number of lanes, no mask is needed, which costs time; LLVM sees where that is always so.
    """
    with builder.if_else(builder.icmp_signed("==", count, I64(vector.count))) as (whole, part):
        with whole:
            full, from_full = [emit_load(builder, *place, vector) for place in places], builder.block
        with part:
            mask = _mask(builder, vector, count)
            masked, from_masked = [_masked_load(builder, *place, vector, mask) for place in places], builder.block
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


def emit_splat(builder, value, kind):
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(I32, kind.count), None))


def emit_fma(builder, a, b, c):
    return builder.fadd(builder.fmul(a, b, flags=FASTMATH), c, flags=FASTMATH)


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


def _address(builder, pointer, index, vector):
    return builder.bitcast(builder.gep(pointer, [index]), native(vector).as_pointer())
