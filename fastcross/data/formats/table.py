"""What a format is made of: a table that yields blocks, and the search for the bad rows of a block.

A block is parsed whole by Arrow; only when that fails is it halved until the bad rows are found, so a clean file
never pays for the precision of its error messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from fastcross.data.blocks import Block
from fastcross.data.columns import Columns
from fastcross.data.errors import BadRow, DataError, Problems
from fastcross.data.formats.lines import first_line, open_binary
from fastcross.data.inference import Finding


@dataclass(frozen=True)
class Head:
    """What a format is recognised by."""

    path: Path
    start: bytes

    @classmethod
    def read(cls, path: Path) -> Head:
        with open_binary(path) as file:
            return cls(path, file.read(16))

    @cached_property
    def line(self) -> str:
        """The first line that is not blank."""
        return first_line(self.path)


class Table(Protocol):
    """A readable input: raw chunks come in order from one thread, blocks are made of them on several."""

    @property
    def columns(self) -> Columns: ...

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was found out about the columns, for the report; empty where the format fixes them."""

    @property
    def looked_at(self) -> str:
        """The rows that it was found out from, in words."""

    def chunks(self, path: Path, problems: Problems) -> Iterator[tuple[Any, int]]:
        """The raw chunks of a file, and how many bytes of it are read so far."""

    def block(self, path: Path, chunk: Any, problems: Problems) -> Block: ...

    def with_columns(self, columns: Columns, labelled: bool) -> Table:
        """The same table, where other columns are read."""


class Format(Protocol):
    @property
    def missing(self) -> tuple[str, ...]:
        """The texts that stand for a missing value; none where the format has values that are null."""

    def recognises(self, head: Head) -> bool: ...

    def open(self, path: Path, columns: Columns | None) -> Table:
        """The table of a first file; columns that are not declared are inferred from its rows."""

    def open_for_prediction(self, path: Path, columns: Columns, labelled: bool, carry: str | None) -> Table:
        """The table of other rows: the label is read only if `labelled`; `carry` names a column to keep as text."""


def find_bad(parse: Callable[[int, int], Block], lo: int, hi: int, names: tuple[str, ...]) -> dict[int, str]:
    """The rows in [lo, hi) that `parse` refuses, each with the reason, found by halving."""
    if lo == hi:
        return {}
    try:
        parse(lo, hi)
        return {}
    except (pa.ArrowException, BadRow) as error:
        if hi - lo == 1:
            return {lo: _reason(error, names)}
    middle = (lo + hi) // 2
    return find_bad(parse, lo, middle, names) | find_bad(parse, middle, hi, names)


def check_present(path: Path, wanted: tuple[str, ...], names: tuple[str, ...]) -> None:
    absent = sorted(set(wanted) - set(names))
    if absent:
        raise DataError(f"{path}: no column {', '.join(absent)}; the columns are {', '.join(names)}")


def check_distinct(place: Path | str, names: Sequence[str]) -> None:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        shown = ", ".join(name or "(without a name)" for name in twice)
        raise DataError(f"{place}: the header names a column twice: {shown}")


def first_sentence(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _reason(error: BaseException, names: tuple[str, ...]) -> str:
    """Arrow's message for one bad row in the words of this package."""
    text = first_sentence(error)
    if match := re.search(r"Expected (\d+) columns, got (\d+)", text):
        return f"expected {match[1]} columns, got {match[2]}"
    if "UTF8" in text or "UTF-8" in text:
        return "bytes that are not UTF-8"
    if match := re.search(r"CSV column (?:#(\d+)|'?([^':]*)'?).*conversion error to (\w+): invalid value '(.*)'", text):
        kind = "an integer" if match[3] == "int64" else "a number"
        column = match[2] or names[int(match[1])]
        return f"column {column} must be {kind}; got {match[4]!r}"
    return text
