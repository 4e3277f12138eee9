"""Where the records of a quoted text table end: a quoted value may span lines.

A quote opens only at the start of a value and must close before a delimiter or a line end; inside, two quotes stand
for one. Where a record breaks these rules its first line is a bad row and the next record starts on the next line, so
that one forgotten quote costs one row and not the rest of the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
NEWLINE, RETURN = 10, 13


@dataclass(frozen=True)
class Record:
    start: int
    end: int  # after its line end
    problem: str = ""


def sound_cut(data: bytes, delimiter: bytes, quote: bytes) -> tuple[int, int] | None:
    """Where the last whole record ends, and how many line ends outside quotes come before; None if quotes stand where
    they must not, and only the slow reading below can tell.

    In a sound text the quotes alternate: every other one opens, preceded by a delimiter, a line end or (of a doubled
    quote) a quote, and every other one closes, followed by one of these.
    """
    text = np.frombuffer(data, np.uint8)
    quotes = np.flatnonzero(text == quote[0])
    opening, closing = quotes[0::2], quotes[1::2]
    around = np.array([delimiter[0], NEWLINE, RETURN, quote[0]], np.uint8)
    before = text[opening[opening > 0] - 1]
    after = text[closing[closing < len(text) - 1] + 1]
    if not (np.isin(before, around[[0, 1, 3]]).all() and np.isin(after, around).all()):
        return None
    ends = np.flatnonzero(text == NEWLINE)
    outside = ends[np.searchsorted(quotes, ends) % 2 == 0]
    return (int(outside[-1]) + 1, len(outside)) if len(outside) else (0, 0)


def records(data: bytes, delimiter: bytes, quote: bytes, width: int, *, final: bool = True) -> Iterator[Record]:
    """The records of a text that starts with one; not `final`: an unfinished last one is left out."""
    start = 0
    next_quote = data.find(quote)
    while start < len(data):
        line_end = data.find(b"\n", start) + 1 or len(data)
        if next_quote != -1 and next_quote < start:
            next_quote = data.find(quote, start)
        if next_quote == -1 or next_quote >= line_end:  # the common case: a line without quotes
            end, found, problem = line_end, data.count(delimiter, start, line_end) + 1, ""
        else:
            end, found, problem = _quoted(data, start, delimiter, quote)
        if end == -1 and not final:
            return
        if not problem and found != width and data[start:line_end].strip():
            problem = f"expected {width} columns, got {found}"
        elif not problem and is_blank(data[start:end], width) and width == 1:
            problem = 'a blank line, which may be a row or none in a table of one column; a missing value is ""'
        if problem:
            end = line_end
        yield Record(start, end, problem)
        start = end


def is_blank(line: bytes, width: int) -> bool:
    """Whether a line holds no row; blanks are a value in a table of one column."""
    return not (line.strip(b"\r\n") if width == 1 else line.strip())


def _quoted(data: bytes, start: int, delimiter: bytes, quote: bytes) -> tuple[int, int, str]:
    """End, number of values and problem of the record at `start`; the end is -1 where a quote is still open."""
    found, at = 1, start
    line_end = data.find(b"\n", start) + 1 or len(data)
    while True:
        if data[at : at + 1] == quote:
            close = data.find(quote, at + 1)
            while close != -1 and data[close + 1 : close + 2] == quote:
                close = data.find(quote, close + 2)
            if close == -1:
                return -1, found, "a quote is opened and never closed"
            at = close + 1
            line_end = data.find(b"\n", at) + 1 or len(data)
            after = data[at : at + 1]
            if after not in (b"", b"\n", b"\r", delimiter):
                return line_end, found, f"a closing quote is followed by {after.decode(errors='replace')!r}"
        next_delimiter = data.find(delimiter, at, line_end)
        if next_delimiter == -1:
            return line_end, found, ""
        found, at = found + 1, next_delimiter + 1


def first_record(data: bytes, delimiter: bytes, quote: bytes) -> int:
    """Where the first record ends, whatever its width; the end of the first line if its quotes are in disorder."""
    end, _, problem = _quoted(data, 0, delimiter, quote)
    return data.find(b"\n") + 1 or len(data) if problem else end
