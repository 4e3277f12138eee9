"""Inside a kernel: the values of its task under their names, as ``declaration.py`` says and ``plan.py`` packs them."""

from collections import namedtuple
from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fastcross.kernels.cpu.declaration import Declaration
from fastcross.kernels.cpu.fields import (
    HEADER,
    HIDDEN,
    INDEX,
    INTEGER,
    OWN,
    REAL,
    SCALAR,
    WIDE,
    WORD_OF_FOUND,
    WORD_OF_MEMORY,
    Field,
)  # fmt: skip
from fastcross.kernels.cpu.native.claim import emit_claim

_WORD = ir.IntType(64)


def take(layout: Declaration) -> Any:
    """The intrinsic that gives a kernel, for its block, the values of a chunk that no other thread has taken.

    When there is none left, ``chunk`` is not below ``chunks``.
    """
    return _reader(layout, takes=True)


def first(layout: Declaration) -> Any:
    """The intrinsic that gives the values of the first chunk, for what runs before or after all chunks."""
    return _reader(layout, takes=False)


def _reader(layout: Declaration, takes: bool) -> Any:
    """The block comes as a pointer to the storage dtype, which is how a kernel knows what it is compiled for."""
    fields = layout.fields
    values: Any = namedtuple(layout.name, [field.name for field in fields])  # type: ignore[misc]

    def read(typing, task):
        kinds = {REAL: task, WIDE: types.CPointer(types.float64), INDEX: types.CPointer(types.int64)}
        kinds |= {INTEGER: types.int64, SCALAR: task.dtype}
        result = types.NamedTuple([kinds[field.kind] for field in fields], values)

        def generate(context, builder, signature, args):
            unpack = _Unpack(builder, builder.bitcast(args[0], _WORD.as_pointer()), fields)
            found = unpack.header(takes)
            for i in range(len(HEADER), len(fields)):
                found.append(unpack.field(i, context.get_value_type(result.types[i]), found[0]))
            return context.make_tuple(builder, result, found)

        return result(task), generate

    return intrinsic(read)


@intrinsic
def report(typing, block, position):
    """Tells the caller of a position, such as that of an operand that is out of range: the smallest counts."""

    def generate(context, builder, signature, args):
        found = builder.gep(builder.bitcast(args[0], _WORD.as_pointer()), [_WORD(WORD_OF_FOUND)])
        builder.atomic_rmw("umin", found, args[1], "monotonic")  # unsigned: "none", -1, is the largest
        return context.get_dummy_value()

    return types.void(block, types.int64), generate


class _Unpack:
    """Emits the loads of a task's words."""

    def __init__(self, builder: ir.IRBuilder, words: ir.Value, fields: Sequence[Field]) -> None:
        self.builder, self.words, self.fields = builder, words, fields

    def word(self, index: int, kind: ir.Type = _WORD) -> ir.Value:
        place = self.builder.gep(self.words, [_WORD(index)])
        return self.builder.load(self.builder.bitcast(place, kind.as_pointer()))

    def header(self, takes: bool) -> list[ir.Value]:
        builder, chunks, length, items = self.builder, self.word(1), self.word(2), self.word(3)
        chunk = emit_claim(builder, self.words, chunks) if takes else _WORD(0)  # all that the threads exchange
        start = builder.mul(chunk, length)
        end = builder.add(start, length)
        stop = builder.select(builder.icmp_signed("<", end, items), end, items)
        return [chunk, chunks, start, stop, self.word(4)]

    def field(self, index: int, native: ir.Type, chunk: ir.Value) -> ir.Value:
        builder, field, word = self.builder, self.fields[index], index + HIDDEN
        if field.kind == INTEGER:
            return self.word(word)
        if field.kind == SCALAR:
            value = self.word(word, ir.DoubleType())
            return value if native == ir.DoubleType() else builder.fptrunc(value, native)
        place = self.word(word)
        if field.scratch:
            place = builder.add(place, self.word(WORD_OF_MEMORY))
        if field.scratch == OWN:
            place = builder.add(place, builder.mul(chunk, self.word(HEADER.index("own_bytes"))))
        return builder.inttoptr(place, native)
