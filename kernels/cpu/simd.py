"""Vector registers in Numba: what a CPU kernel is written in when the order of its loads and multiply-adds matters.

A pointer is Numba's ``CPointer`` to float32 or float64, as a C function gets it; indices count elements. A ``Vector``
holds ``lanes`` neighbouring elements, 32 bytes in all, and lives in a register. LLVM translates the same source for
AVX2, AVX-512 and NEON.
"""

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

REGISTER_BYTES = 32
# Sums may be reordered and contracted; NaN and infinity keep their meaning.
FASTMATH = ("reassoc", "contract", "nsz")
OPTIONS: dict[str, Any] = {"fastmath": set(FASTMATH), "error_model": "numpy"}
inline = njit(forceinline=True, **OPTIONS)


class Vector(types.Type):
    def __init__(self, real: types.Float, count: int) -> None:
        self.real, self.count = real, count
        super().__init__(f"Vector({real}, {count})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, vector):
        super().__init__(manager, vector, _native(vector))


def lane_count(itemsize: int) -> int:
    return REGISTER_BYTES // itemsize


def _native(vector: Vector) -> ir.VectorType:
    return ir.VectorType(ir.FloatType() if vector.real == types.float32 else ir.DoubleType(), vector.count)


def _vector_of(pointer: types.CPointer) -> Vector:
    return Vector(pointer.dtype, lane_count(pointer.dtype.bitwidth // 8))


def _address(builder, pointer, index, vector):
    element = builder.gep(pointer, [index])
    return builder.bitcast(element, _native(vector).as_pointer())


@intrinsic
def lanes(typing, pointer):
    """Elements per vector; known to the compiler."""
    count = _vector_of(pointer).count
    return types.int64(pointer), lambda context, builder, signature, args: ir.Constant(ir.IntType(64), count)


@intrinsic
def at(typing, pointer, index):
    """The pointer to the element ``index``."""
    return pointer(pointer, types.int64), lambda context, builder, signature, args: builder.gep(args[0], [args[1]])


@intrinsic
def zeros(typing, pointer):
    """A vector of zeros, for the dtype of the pointer."""
    vector = _vector_of(pointer)
    return vector(pointer), lambda context, builder, signature, args: ir.Constant(_native(vector), None)


@intrinsic
def load(typing, pointer, index):
    vector = _vector_of(pointer)

    def generate(context, builder, signature, args):
        return builder.load(_address(builder, *args, vector), align=vector.real.bitwidth // 8)

    return vector(pointer, types.int64), generate


@intrinsic
def store(typing, pointer, index, value):
    def generate(context, builder, signature, args):
        builder.store(args[2], _address(builder, *args[:2], value), align=value.real.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, value), generate


def _mask(builder, vector, count):
    """True for the first ``count`` lanes."""
    i64 = ir.IntType(64)
    every = ir.Constant(ir.VectorType(i64, vector.count), list(range(vector.count)))
    return builder.icmp_signed("<", every, _splat(builder, count, ir.VectorType(i64, vector.count)))


def _splat(builder, value, kind):
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.IntType(32)(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(ir.IntType(32), kind.count), None))


@intrinsic
def load_first(typing, pointer, index, count):
    """The first ``count`` elements, then zeros: memory past them is not touched."""
    vector = _vector_of(pointer)

    def generate(context, builder, signature, args):
        kind, i32 = _native(vector), ir.IntType(32)
        mask = _mask(builder, vector, args[2])
        name = f"llvm.masked.load.v{vector.count}f{vector.real.bitwidth}.p0"
        function = ir.FunctionType(kind, [kind.as_pointer(), i32, mask.type, kind])
        masked = cgutils.get_or_insert_function(builder.module, function, name)
        address = _address(builder, *args[:2], vector)
        return builder.call(masked, [address, i32(vector.real.bitwidth // 8), mask, ir.Constant(kind, None)])

    return vector(pointer, types.int64, types.int64), generate


@intrinsic
def store_first(typing, pointer, index, value, count):
    """The first ``count`` lanes."""

    def generate(context, builder, signature, args):
        kind, i32 = _native(value), ir.IntType(32)
        mask = _mask(builder, value, args[3])
        name = f"llvm.masked.store.v{value.count}f{value.real.bitwidth}.p0"
        function = ir.FunctionType(ir.VoidType(), [kind, kind.as_pointer(), i32, mask.type])
        masked = cgutils.get_or_insert_function(builder.module, function, name)
        builder.call(masked, [args[2], _address(builder, *args[:2], value), i32(value.real.bitwidth // 8), mask])
        return context.get_dummy_value()

    return types.void(pointer, types.int64, value, types.int64), generate


def _prefetch(write: int):
    def fetch(typing, pointer, index):
        def generate(context, builder, signature, args):
            i8, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
            function = ir.FunctionType(ir.VoidType(), [i8, i32, i32, i32])
            native = cgutils.get_or_insert_function(builder.module, function, "llvm.prefetch.p0")
            address = builder.bitcast(builder.gep(args[0], [args[1]]), i8)
            builder.call(native, [address, i32(write), i32(2), i32(1)])  # 2: the second cache, 1: data
            return context.get_dummy_value()

        return types.void(pointer, types.int64), generate

    return intrinsic(fetch)


# Ask for the cache line of an element before it is needed, to read or to write it.
prefetch, prefetch_write = _prefetch(0), _prefetch(1)


@intrinsic
def splat(typing, pointer, index):
    """The element in every lane."""
    vector = _vector_of(pointer)

    def generate(context, builder, signature, args):
        return _splat(builder, builder.load(builder.gep(args[0], [args[1]])), _native(vector))

    return vector(pointer, types.int64), generate


@intrinsic
def fma(typing, a, b, c):
    """a b + c."""

    def generate(context, builder, signature, args):
        return builder.fadd(builder.fmul(*args[:2], flags=FASTMATH), args[2], flags=FASTMATH)

    return c(a, b, c), generate


@intrinsic
def add(typing, a, b):
    return a(a, b), lambda context, builder, signature, args: builder.fadd(*args, flags=FASTMATH)


@intrinsic
def mul(typing, a, b):
    return a(a, b), lambda context, builder, signature, args: builder.fmul(*args, flags=FASTMATH)


@intrinsic
def total(typing, value):
    """The sum of the lanes."""

    def generate(context, builder, signature, args):
        kind = _native(value)
        function = ir.FunctionType(kind.element, [kind.element, kind])
        name = f"llvm.vector.reduce.fadd.v{value.count}f{value.real.bitwidth}"
        reduce = cgutils.get_or_insert_function(builder.module, function, name)
        return builder.call(reduce, [ir.Constant(kind.element, 0.0), args[0]], fastmath=FASTMATH)

    return value.real(value), generate


@intrinsic
def widen(typing, value):
    """The lanes in float64."""
    wide = Vector(types.float64, value.count)

    def generate(context, builder, signature, args):
        return args[0] if wide == value else builder.fpext(args[0], _native(wide))

    return wide(value), generate


@intrinsic
def narrow(typing, value, pointer):
    """The lanes in the dtype of the pointer."""
    vector = _vector_of(pointer)

    def generate(context, builder, signature, args):
        return args[0] if vector == value else builder.fptrunc(args[0], _native(vector))

    return vector(value, pointer), generate


@intrinsic
def load_wide(typing, wide, index, pointer):
    """As many float64 as a vector of the pointer's dtype has lanes."""
    vector = Vector(types.float64, _vector_of(pointer).count)

    def generate(context, builder, signature, args):
        return builder.load(_address(builder, *args[:2], vector), align=8)

    return vector(wide, types.int64, pointer), generate


@intrinsic
def splat_wide(typing, value, pointer):
    """A float64 in as many lanes as a vector of the pointer's dtype has."""
    vector = Vector(types.float64, _vector_of(pointer).count)

    def generate(context, builder, signature, args):
        return _splat(builder, args[0], _native(vector))

    return vector(types.float64, pointer), generate


@inline
def load_upto(pointer, index, count):
    """All lanes, or the first ``count`` and zeros; where ``count`` is ``lanes(pointer)``, the compiler sees that."""
    return load(pointer, index) if count == lanes(pointer) else load_first(pointer, index, count)


@inline
def store_upto(pointer, index, value, count):
    if count == lanes(pointer):
        store(pointer, index, value)
    else:
        store_first(pointer, index, value, count)
