"""What is known of a call before its addresses are: the checks, the words of its task, the place of its scratch."""

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastcross.kernels.cpu.buffers import SMALLEST, empty_output
from fastcross.kernels.cpu.compile import compiled
from fastcross.kernels.cpu.declaration import Declaration
from fastcross.kernels.cpu.door import addresses_of, addresses_of_fresh, check, reach, scratch
from fastcross.kernels.cpu.fields import (
    CLAIMS,
    HEADER,
    HIDDEN,
    INDEX,
    REAL,
    REGISTER_BYTES,
    WIDE,
    WORD_OF_FOUND,
    WORD_OF_MEMORY,
    Result,
)  # fmt: skip
from fastcross.kernels.cpu.internals import filling_maker
from fastcross.kernels.cpu.threads import Task, run_in_turn, thread_number
from fastcross.kernels.rows import stride_like

# Multiply-adds that are worth a thread of their own, and a chunk of their own with sums and without.
WORK_PER_THREAD, WORK_PER_CHUNK, WORK_PER_PLAIN_CHUNK = 1 << 16, 1 << 20, 1 << 16
CHUNKS_PER_THREAD = 4
KEPT_BYTES = 1 << 16  # of scratch memory, which small calls leave to the next
ALIGNMENT = 64  # bytes: no two pieces share a cache line, so that no two threads do


class Plan:
    """All of a call that follows from the sizes and from the descriptions of the tensors, which are checked here."""

    def __init__(
        self, layout: Declaration, dtype: torch.dtype, threads: int, sizes: Mapping[str, int], tensors: Sequence[Any]
    ) -> None:
        self.layout, self.dtype = layout, dtype
        known = SimpleNamespace(lanes=REGISTER_BYTES // dtype.itemsize, **sizes)
        values = self.sizes = vars(known)
        present = []
        for (name, operand), t in zip(layout.operands.items(), tensors, strict=True):
            if operand.optional:
                values[f"has_{name}"] = t is not None
            if t is not None or not operand.optional:
                present.append((name, operand, t))
                if not isinstance(t, Tensor) or t.dim() != len(operand.shape):
                    check(name, t, _dtype(operand.kind, dtype), operand.shape, operand.are_rows)
                for size, number in zip(operand.shape, t.shape, strict=True):
                    if size not in layout.derived:
                        values.setdefault(size, number)
        for name in layout.shape_sizes:
            values.setdefault(name, 0)
        for name, rule in layout.derived.items():
            values[name] = rule(known)
        for name, operand, t in present:
            shape = [values[size] for size in operand.shape]
            check(name, t, _dtype(operand.kind, dtype), shape, operand.are_rows)
        items = values[layout.items]
        least = WORK_PER_CHUNK if layout.adds_up else WORK_PER_PLAIN_CHUNK
        self.threads, self.chunks, chunk_items = chunks(items, layout.work(known), threads, layout.together, least)
        self.pieces, self.bytes, own_bytes = self._place(known)
        # What a task's block holds, but for addresses and scalars, which differ from call to call.
        word = self.word = {field.name: HIDDEN + i for i, field in enumerate(layout.fields) if i >= len(HEADER)}
        share = -(-self.chunks // self.threads)
        self._words = [0, self.chunks, chunk_items, items, own_bytes, 0, -1, share, thread_number()] + [0] * len(word)
        for name in layout.integers:
            self._words[word[name]] = int(values[name])
        for name, offset, _ in self.pieces:
            self._words[word[name]] = offset
        for (name, operand), t in zip(layout.operands.items(), tensors, strict=True):
            if operand.are_rows:
                self._words[word[name] + 1] = t.stride(0)
        self.made: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}  # shapes and strides of what is needed
        self._large: list[tuple[int, int]] = []  # results, and the operands that they resemble
        for i, (name, result) in enumerate(layout.results.items()):
            self._declare(i, name, result, tensors)
            if result.like:
                self._words[word[name] + 1] = stride_like(tensors[self._place_of(result.like)])
        self._makers = [
            filling_maker(*self.made[name], dtype) if name in self.made else None for name in layout.results
        ]
        self.reaches = {name: reach(t) for name, t in zip(layout.operands, tensors, strict=True)}
        self._names, self._reaches = list(self.reaches), list(self.reaches.values())
        self._places = [word[name] for name in (*layout.operands, *layout.results)]
        self._scalars = [word[name] for name in layout.scalars]
        self._block: Any = ctypes.c_int64 * len(self._words)
        self.frames: list[tuple[Any, Tensor]] = []  # blocks and scratch memory of calls that are done
        self._kernels: Callable[[Any], None] | None = None  # once they are compiled

    def _place(self, known: SimpleNamespace) -> tuple[list[tuple[str, int, int]], int, int]:
        """Each piece's name, offset and size in bytes; the size of all; that of a chunk's own.

        The first chunk's own pieces lie behind the shared ones, those of the other chunks behind them.
        """
        pieces, end, shared = [], 0, 0
        for group in (self.layout.shared, self.layout.own):
            shared = end
            for name, piece in group.items():
                size = piece.elements(known) * _dtype(piece.kind, self.dtype).itemsize
                pieces.append((name, end, size))
                end += -(-size // ALIGNMENT) * ALIGNMENT
        return pieces, end + (self.chunks - 1) * (end - shared), end - shared

    def _declare(self, i: int, name: str, result: Result, tensors: Sequence[Any]) -> None:
        """How result number ``i`` is made, if it is needed."""
        if result.when is not None and not self.sizes[result.when]:
            return
        shape = tuple(self.sizes[size] for size in result.shape)
        strides = (*shape[1:], 1)
        if result.like is not None:
            like = tensors[self._place_of(result.like)]
            strides = (stride_like(like), 1)
            if like.nbytes >= SMALLEST:
                self._large.append((i, self._place_of(result.like)))
        self.made[name] = shape, strides

    @property
    def has_large_results(self) -> bool:
        """Which take memory that earlier ones left."""
        return bool(self._large)

    def _place_of(self, operand: str) -> int:
        return list(self.layout.operands).index(operand)

    def run(self, tensors: tuple[Any, ...], scalars: Sequence[float] = ()) -> list[Any]:
        """Runs the layout's kernels on tensors like those that the plan was made for; returns the results."""
        block, memory, results = self.fill(tensors, scalars)
        self.kernels()(block)
        if self.bytes <= KEPT_BYTES:
            self.frames.append((block, memory))
        return results

    def kernels(self) -> Callable[[Any], None]:
        """All of the layout's kernels, each on its threads, as a function of the block."""
        if self._kernels is None:
            own = f".{self.layout.name}"
            threads = [self.threads if kernel.endswith(own) else 1 for kernel in self.layout.kernels]
            kernels = [compiled(kernel, self.dtype) for kernel in self.layout.kernels]
            self._kernels = run_in_turn(list(zip(kernels, threads, strict=True)))
        return self._kernels

    def task(self, tensors: tuple[Any, ...], scalars: Sequence[float]) -> Task:
        """For a kernel that the caller runs; no chunk is taken yet."""
        block, memory, results = self.fill(tensors, scalars)
        return Task(block, memory, tensors, results, self.dtype, self.threads)

    def fill(self, tensors: tuple[Any, ...], scalars: Sequence[float]) -> tuple[Any, Tensor, list[Any]]:
        """The block of a task, its scratch memory, and its results."""
        results = [make and make() for make in self._makers] if not self._large else self._make_large(tensors)
        addresses = addresses_of(self._names, tensors, self._reaches)
        addresses += addresses_of_fresh(results)
        try:
            block, memory = self.frames.pop()
            block[0], block[WORD_OF_FOUND] = 0, -1
        except IndexError:  # all are in use
            block, memory = self.new_frame()
        for word, address in zip(self._places, addresses, strict=True):
            block[word] = address
        for word, scalar in zip(self._scalars, scalars, strict=True):
            struct.pack_into("d", block, 8 * word, scalar)
        return block, memory, results

    def new_frame(self) -> tuple[Any, Tensor]:
        """A block with all words that are the same in every call, and scratch memory for it."""
        words = self._words.copy()
        memory, words[WORD_OF_MEMORY] = scratch(self.bytes)
        return self._block(*words), memory

    def _make_large(self, tensors: Sequence[Any]) -> list[Any]:
        """The results, of which some resemble large operands and take memory that earlier ones left."""
        large = dict(self._large)
        results = [make and (i in large or make()) for i, make in enumerate(self._makers)]
        for i, place in self._large:
            result = results[i] = empty_output(tensors[place])
            check("a result", result, self.dtype, tensors[place].shape, are_rows=True)
            assert result.stride() == (stride_like(tensors[place]), 1)
        return results


def found(task: Task) -> int:
    """The smallest position that a chunk reported (``native.unpack.report``); -1 if none did."""
    return task.block[WORD_OF_FOUND]


def _dtype(kind: str, real: torch.dtype) -> torch.dtype:
    return {REAL: real, WIDE: torch.float64, INDEX: torch.int64}[kind]


class Chunks(NamedTuple):
    """Ranges of items: more than threads where they are large, for a core may be slower than another."""

    threads: int
    number: int
    items: int  # of each but the last


def chunks(items: int, work: int, threads: int, together: int, least: int = WORK_PER_CHUNK) -> Chunks:
    """For ``work`` multiply-adds per item, ``least`` of them per chunk; a single range where they are few."""
    threads = min(threads, items, items * work // WORK_PER_THREAD)
    if threads < 2:
        return Chunks(1, 1, items)
    share = max(1, min(CHUNKS_PER_THREAD, CLAIMS // threads, items * work // (threads * least)))
    each = -(-items // (together * threads * share)) * together
    return Chunks(threads, -(-items // each), each)
