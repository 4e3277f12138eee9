"""What a compiled kernel is called with, declared once: its operands, sizes, scalars and scratch memory.

From a ``Layout`` follow the packed task, the checks of every tensor behind an address, the size and the place of every
piece of scratch, and, inside the kernel, the unpacked values under the same names.

A task is a block of 64-bit words (``unpack.py`` reads it): the number of the next chunk, how many chunks there are, how
many items each of them has, how many items there are in all, how many bytes of scratch each chunk has for itself; the
address of the scratch memory; the position that a chunk reported; then, in the order of declaration, the operands'
addresses, each row operand's followed by the stride between its rows, the sizes, the scalars, the offset of each piece
of scratch.
"""

import ctypes
import functools
import struct
from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from fastcross.kernels.cpu.door import address, address_of_rows, scratch
from fastcross.kernels.cpu.emit import lane_count
from fastcross.kernels.cpu.threads import Task
from fastcross.kernels.cpu.unpack import (
    HEADER,
    HIDDEN,
    INDEX,
    INTEGER,
    OWN,
    REAL,
    SCALAR,
    SHARED,
    WIDE,
    WORD_OF_FOUND,
    WORD_OF_MEMORY,
    Field,
    reader,
)  # fmt: skip

# Multiply-adds that are worth a thread of their own, and a chunk of their own.
WORK_PER_THREAD, WORK_PER_CHUNK = 1 << 16, 1 << 20
CHUNKS_PER_THREAD = 4
ALIGNMENT = 64  # bytes: no two pieces share a cache line, so that no two threads do
PLANS = 1024  # that are kept, for each layout

Size = Callable[[Any], int]  # from the sizes, as attributes, to a number
NOTHING: Mapping[str, Any] = MappingProxyType({})


class Operand(NamedTuple):
    """A tensor of the caller's."""

    shape: tuple[str, ...]  # names of sizes
    are_rows: bool  # (M, d) with any stride between the rows, which the kernel knows as stride_NAME; else contiguous
    kind: str
    when: str | None  # a size: where it is 0 the kernel touches nothing, and no address is taken


class Piece(NamedTuple):
    """A part of the scratch memory."""

    elements: Size
    kind: str


def rows(*shape: str, kind: str = REAL, when: str | None = None) -> Operand:
    return Operand(shape, True, kind, when)


def whole(*shape: str, kind: str = REAL, when: str | None = None) -> Operand:
    return Operand(shape, False, kind, when)


def real(elements: Size) -> Piece:
    """Of the storage dtype."""
    return Piece(elements, REAL)


def wide(elements: Size) -> Piece:
    """Of float64."""
    return Piece(elements, WIDE)


def index(elements: Size) -> Piece:
    """Of int64."""
    return Piece(elements, INDEX)


class Layout:
    """The declaration of a kernel, or of several that work on the same task one after another.

    ``items`` names the size that is split into chunks, of a multiple of ``together`` items each but for the last;
    ``work`` gives the multiply-adds per item. The caller gives the
    ``sizes``; the ``derived`` ones follow from them, and from ``lanes``, the elements of a vector register. A kernel
    sees all of them, the ``operands``, the ``scalars`` (of the storage dtype), the ``shared`` scratch and its chunk's
    ``own``, besides ``chunk``, ``chunks``, the range of items ``start``, ``stop``, and ``own_bytes``, from a chunk's
    own piece to the next chunk's. A kernel written for the layout that this one ``extends`` takes its tasks, too.
    """

    def __init__(
        self,
        name: str,
        *,
        items: str,
        work: Size,
        together: int = 1,
        operands: Mapping[str, Operand] = NOTHING,
        sizes: tuple[str, ...] = (),
        derived: Mapping[str, Size] = NOTHING,
        scalars: tuple[str, ...] = (),
        shared: Mapping[str, Piece] = NOTHING,
        own: Mapping[str, Piece] = NOTHING,
        extends: "Layout | None" = None,
    ) -> None:
        self.name, self.items, self.work, self.together = name, items, work, together
        self.fields: list[Field] = list(extends.fields) if extends else [Field(each, INTEGER) for each in HEADER]
        for each, operand in operands.items():
            self.fields += [Field(each, operand.kind)] + [Field(f"stride_{each}", INTEGER)] * operand.are_rows
        self.fields += [Field(each, INTEGER) for each in (*sizes, *derived)]
        self.fields += [Field(each, SCALAR) for each in scalars]
        self.fields += [Field(each, piece.kind, SHARED) for each, piece in shared.items()]
        self.fields += [Field(each, piece.kind, OWN) for each, piece in own.items()]
        names = [field.name for field in self.fields]
        if len(set(names)) < len(names):
            raise TypeError(f"{name} has a name twice: {sorted(names)}")
        self.operands, self.sizes, self.derived, self.scalars = dict(operands), sizes, dict(derived), scalars
        self.shared, self.own = dict(shared), dict(own)
        if extends:
            self.operands, self.derived = extends.operands | self.operands, extends.derived | self.derived
            self.shared, self.own = extends.shared | self.shared, extends.own | self.own
            self.sizes, self.scalars = extends.sizes + sizes, extends.scalars + scalars
        self.plan = functools.lru_cache(PLANS)(functools.partial(Plan, self))
        # Called by a kernel with its block: ``take`` gives the values for a chunk that no other thread has taken, of
        # which ``chunk`` reaches ``chunks`` when there is none left; ``first`` those of the first chunk.
        self.take, self.first = reader(name, self.fields, takes=True), reader(name, self.fields, takes=False)


class Plan:
    """All of a call that follows from its sizes, for at most ``threads`` threads.

    ``layout.plan(dtype, threads, M=…, d=…)`` makes one, and finds it again for the same sizes.
    """

    def __init__(self, layout: Layout, dtype: torch.dtype, threads: int, **sizes: int) -> None:
        if sizes.keys() != set(layout.sizes):
            raise TypeError(f"{layout.name} needs the sizes {sorted(layout.sizes)}; got {sorted(sizes)}")
        known = SimpleNamespace(lanes=lane_count(dtype.itemsize), **sizes)
        for name, size in layout.derived.items():
            setattr(known, name, size(known))
        self.layout, self.dtype, self.sizes, values = layout, dtype, known, vars(known)
        items = values[layout.items]
        self.threads, self.chunks, chunk_items = chunks(items, layout.work(known), threads, layout.together)
        self.pieces, self.bytes, own_bytes = self._place()
        # What a task's block holds, but for addresses and scalars, which differ from call to call.
        word = {field.name: HIDDEN + i for i, field in enumerate(layout.fields) if i >= len(HEADER)}
        self._words: list[Any] = [0, self.chunks, chunk_items, items, own_bytes, 0, -1] + [0] * len(word)
        for name in (*layout.sizes, *layout.derived):
            self._words[word[name]] = int(values[name])
        for name, offset, _ in self.pieces:
            self._words[word[name]] = offset
        self._operands = [
            (name, word[name], each.are_rows, None if each.when and not values[each.when] else self._expected(each))
            for name, each in layout.operands.items()
        ]
        self._scalars = [(name, word[name]) for name in layout.scalars]
        kinds = ["q"] * HIDDEN + ["d" if field.kind == SCALAR else "q" for field in layout.fields]
        self._pack = struct.Struct("".join(kinds)).pack
        self._block: Any = ctypes.c_int64 * len(self._words)

    @staticmethod
    def found(task: Task) -> int:
        """The smallest position that a chunk reported (``unpack.report``); -1 if none did."""
        return task.block[WORD_OF_FOUND]

    def _expected(self, operand: Operand) -> tuple[torch.dtype, Any]:
        return _dtype(operand.kind, self.dtype), tuple(vars(self.sizes)[size] for size in operand.shape)

    def _place(self) -> tuple[list[tuple[str, int, int]], int, int]:
        """Each piece's name, offset and size in bytes; the size of all; that of a chunk's own.

        The first chunk's own pieces lie behind the shared ones, those of the other chunks behind them.
        """
        pieces, end, shared = [], 0, 0
        for group in (self.layout.shared, self.layout.own):
            shared = end
            for name, piece in group.items():
                size = piece.elements(self.sizes) * _dtype(piece.kind, self.dtype).itemsize
                pieces.append((name, end, size))
                end += -(-size // ALIGNMENT) * ALIGNMENT
        return pieces, end + (self.chunks - 1) * (end - shared), end - shared

    def task(self, **values: Any) -> Task:
        """The task of a call, with no chunk taken yet: a tensor for each operand, a number for each scalar, by name."""
        words, operands = self._words.copy(), tuple(values.values())
        memory, words[WORD_OF_MEMORY] = scratch(self.bytes)
        try:
            for name, word, are_rows, expected in self._operands:
                t = values.pop(name)
                if expected is None:
                    continue
                if are_rows:
                    words[word], words[word + 1] = address_of_rows(name, t, *expected)
                else:
                    words[word] = address(name, t, *expected)
            for name, word in self._scalars:
                words[word] = values.pop(name)
        except KeyError as missing:
            raise TypeError(f"{self.layout.name} needs {missing}") from None
        if values:
            raise TypeError(f"{self.layout.name} knows nothing of {sorted(values)}")
        return Task(self._block.from_buffer_copy(self._pack(*words)), memory, operands, self.threads)


def _dtype(kind: str, real: torch.dtype) -> torch.dtype:
    return {REAL: real, WIDE: torch.float64, INDEX: torch.int64}[kind]


class Chunks(NamedTuple):
    """Ranges of items: more than threads where they are large, for a core may be slower than another."""

    threads: int
    number: int
    items: int  # of each but the last


def chunks(items: int, work: int, threads: int, together: int) -> Chunks:
    """For ``work`` multiply-adds per item; a single range where they are few."""
    threads = min(threads, items, items * work // WORK_PER_THREAD)
    if threads < 2:
        return Chunks(1, 1, items)
    number = threads * min(CHUNKS_PER_THREAD, max(1, items * work // (threads * WORK_PER_CHUNK)))
    each = -(-items // (together * number)) * together
    return Chunks(threads, -(-items // each), each)
