"""What a kernel's values are: its operands, results and pieces of scratch memory, and the words of a task."""

from collections.abc import Callable
from typing import Any, NamedTuple

# The kinds of a value: addresses of the storage dtype, of float64, of int64; an integer; a number of the storage dtype.
REAL, WIDE, INDEX, INTEGER, SCALAR = "real", "wide", "index", "integer", "scalar"
# Whose scratch a piece is: all chunks', or each chunk's.
SHARED, OWN = "shared", "own"
# What a kernel sees of the first words, and the words that it does not see.
HEADER = ("chunk", "chunks", "start", "stop", "own_bytes")
WORD_OF_MEMORY, WORD_OF_FOUND, WORD_OF_SHARE, WORD_OF_ASKING = range(len(HEADER), len(HEADER) + 4)
HIDDEN = 4
CLAIMS = 64  # chunks that a task's first word has bits for
REGISTER_BYTES = 32  # of a vector

Size = Callable[[Any], int]  # from the sizes, as attributes, to a number


class Field(NamedTuple):
    """A value that the kernel sees; it has one word of the task."""

    name: str
    kind: str
    scratch: str | None = None


class Operand(NamedTuple):
    """A tensor of the caller's, of which the kernel gets the address."""

    shape: tuple[str, ...]  # names of sizes, which it thereby gives
    are_rows: bool  # (M, d) with any stride between the rows, which the kernel knows as stride_NAME; else contiguous
    kind: str
    optional: bool  # the kernel knows whether it is there as has_NAME


class Result(NamedTuple):
    """A tensor that is made for the caller; empty where a size, ``when``, is 0."""

    shape: tuple[str, ...]
    like: str | None  # an operand whose rows it resembles, stride and all
    when: str | None


class Piece(NamedTuple):
    """A part of the scratch memory."""

    elements: Size
    kind: str


def rows(*shape: str, kind: str = REAL) -> Operand:
    return Operand(shape, True, kind, False)


def whole(*shape: str, kind: str = REAL, optional: bool = False) -> Operand:
    return Operand(shape, False, kind, optional)


def rows_like(operand: str, *shape: str, when: str | None = None) -> Result:
    return Result(shape, operand, when)


def fresh(*shape: str, when: str | None = None) -> Result:
    return Result(shape, None, when)


def real(elements: Size) -> Piece:
    """Of the storage dtype."""
    return Piece(elements, REAL)


def wide(elements: Size) -> Piece:
    """Of float64."""
    return Piece(elements, WIDE)


def index(elements: Size) -> Piece:
    """Of int64."""
    return Piece(elements, INDEX)
