"""What every format reads with: the files that a user names, their blocks in order, and the records of a text.

A text comes in blocks of whole lines, plain or gzip, that know their place; with quotes, in blocks of whole records,
for a quoted value may span lines. A quote opens only at the start of a value and must close before a delimiter or a
line end; inside, two quotes stand for one. Where a record breaks these rules its first line is a bad row and the next
record starts on the next line, so that one forgotten quote costs one row and not the rest of the file.

Arrow parses the blocks, but does not stream the file (pyarrow.csv.open_csv): of a gzip that breaks off it drops rows
that were decompressed already (9,293 of 13,323, measured), it numbers records where a quoted value spans lines, skips
no row whose value cannot be converted, and ends at a forgotten quote and at a value longer than its block. Up to blocks
of numbers our reading takes 6 % more processor time than its stream (5 million rows of Criteo, one thread, no gzip).
"""

from __future__ import annotations

import glob
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from os import PathLike, fspath
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import numpy as np

from fastcross.data.blocks import Block, map_in_order
from fastcross.data.columns import Columns, DataError
from fastcross.data.formats import FORMATS
from fastcross.data.inference import Finding

if TYPE_CHECKING:
    import pyarrow as pa

EXAMPLES = 10  # of bad rows, shown in a report
COMPRESSED = {
    b"BZh": "bzip2",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ": "xz",
    b"PK\x03\x04": "zip",
    b"\x04\x22\x4d\x18": "lz4",
}
LONGEST_LINE = 64 << 20
Decompressor = Any  # zlib does not name its type
DAMAGED, LOST = "the gzip stream is damaged or ends early", "all from here on is lost"
FAILED_CHECK = "the gzip stream fails its own checksum: some of what was read before is wrong"
NEWLINE, RETURN = 10, 13
Source = str | PathLike[str] | Iterable[str | PathLike[str]]


@dataclass
class Problems:
    """Bad rows met so far: the first one raises (on_error="stop"), or each is counted (on_error="skip").

    truncated: one message for each file that breaks off, whose rest is lost however many rows that was.
    """

    on_error: str = "stop"
    places: list[tuple[str, int]] = field(default_factory=list)  # file, line (row for Parquet), each from 1
    examples: list[str] = field(default_factory=list)
    truncated: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.on_error not in ("stop", "skip"):
            raise ValueError(f'on_error must be "stop" or "skip"; got {self.on_error!r}')

    def add(self, path: Path, line: int, reason: str, *, unit: str = "line") -> None:
        message = f"{path}, {unit} {line}: {reason}"
        if self.on_error == "stop":
            raise DataError(message)
        self.places.append((str(path), line))
        if len(self.examples) < EXAMPLES:
            self.examples.append(message)

    def truncate(self, path: Path, line: int, reason: str) -> None:
        """The unfinished row counts as a bad one; what came after it nobody can count."""
        self.add(path, line, reason)
        self.truncated.append(f"{path}, line {line}: {reason}")

    def extend(self, other: Problems) -> None:
        self.places += other.places
        self.truncated += other.truncated
        self.examples += other.examples[: EXAMPLES - len(self.examples)]

    def __len__(self) -> int:
        return len(self.places)

    def __str__(self) -> str:
        if not self.places:
            return "no rows skipped"
        more = f"\n  … and {len(self) - len(self.examples)} more" if len(self) > len(self.examples) else ""
        return f"{len(self)} rows skipped:\n  " + "\n  ".join(self.examples) + more


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

    def block(self, path: Path, chunk: Any, problems: Problems) -> Block:
        """A chunk as numbers and codes. Where ``to_block`` raises BadRow, ``find_bad`` finds the rows, ``problems``
        hears of each, and the block is made of the others, with ``skipped``."""

    def schema(self, path: Path) -> pa.Schema | None:
        """The types that a file declares; None where all is text."""

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


def resolve_paths(source: Source) -> list[Path]:
    """The files of a path, a pattern (day_*.gz, in the order of their names), or a list of either."""
    named = [source] if isinstance(source, str | PathLike) else list(source)
    paths: list[Path] = []
    for name in (fspath(path) for path in named):
        found = sorted(glob.glob(name)) if glob.has_magic(name) and not Path(name).exists() else [name]
        if not found:
            raise DataError(f"{name}: no file matches")
        paths += map(Path, found)
    if not paths:
        raise DataError("no input files")
    for i, path in enumerate(paths):
        if first := next((other for other in paths[:i] if other.resolve() == path.resolve()), None):
            raise DataError(f"{path}: named twice, its rows would count twice (it is the file of {first}, too)")
        if path.is_dir():
            raise DataError(f"{path}: a folder; name its files, for example {path}/*")
        if path.exists() and not path.is_file():
            raise DataError(f"{path}: not a file on disk; it is read more than once, so write it to one first")
        with open_binary(path) as file:
            start = file.read(6)
        if not start:
            raise DataError(f"{path}: the file is empty")
        if other := next((name for magic, name in COMPRESSED.items() if start.startswith(magic)), None):
            raise DataError(f"{path}: compressed with {other}; text is read plain or with gzip")
    return paths


def check_kind(paths: Iterable[Path], format: str) -> None:
    """Raises for a Parquet file where text is read."""
    for path in paths:
        with open_binary(path) as file:
            if format != "parquet" and file.read(4) == b"PAR1":
                raise DataError(f"{path}: a Parquet file, where the format {format} is read")


def open_binary(path: Path) -> IO[bytes]:
    try:
        return open(path, "rb")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None


def check_present(path: Path, wanted: tuple[str, ...], names: tuple[str, ...]) -> None:
    absent = sorted(set(wanted) - set(names))
    if absent:
        raise DataError(f"{path}: no column {', '.join(absent)}; the columns are {', '.join(names)}")


def check_distinct(place: Path | str, names: Sequence[str]) -> None:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        shown = ", ".join(name or "(without a name)" for name in twice)
        raise DataError(f"{place}: the header names a column twice: {shown}")


def read_in_order(table: Table, path: Path, problems: Problems) -> Iterator[tuple[Block, int]]:
    """The blocks of a file, parsed on several threads, in order, with the bytes of the file read so far."""

    def parse(chunk: tuple[Any, int]) -> tuple[Block, Problems, int]:
        found = Problems(problems.on_error)
        return table.block(path, chunk[0], found), found, chunk[1]

    stream = Problems("skip")  # a stream that breaks off is reported after the bad rows before it
    for block, found, read_bytes in map_in_order(parse, table.chunks(path, stream)):
        problems.extend(found)
        yield block, read_bytes
    if stream and problems.on_error == "stop":
        raise DataError(stream.examples[0])
    problems.extend(stream)


@dataclass(frozen=True)
class Quoting:
    """What it takes to find the records of a text whose values may be quoted."""

    delimiter: bytes
    quote: bytes
    width: int


@dataclass(frozen=True)
class LineBlock:
    """Whole lines or records of one file, each ended by a newline."""

    path: Path
    first_line: int  # its number in the file, from 1
    data: bytes
    read_bytes: int  # of the file (compressed) consumed so far, for a progress bar
    ends: int | None  # line ends that end a record; None where quotes stand where they must not


class _Broken(Exception):
    """A gzip stream that is damaged or ends early; everything before was delivered."""


def read_blocks(
    path: Path, problems: Problems, block_bytes: int, quoting: Quoting | None = None
) -> Iterator[LineBlock]:
    """The file's blocks in order. A gzip stream that breaks off is reported at the line where it does."""
    line, carry, broken = 1, b"", ""
    with open_binary(path) as raw:
        texts = _texts(raw, block_bytes)
        while True:
            try:
                text = next(texts, b"")
            except _Broken as error:
                text, broken = b"", str(error)
            if line == 1 and not carry:
                text = text.removeprefix(b"\xef\xbb\xbf")
            if not text:
                break
            text = carry + text
            cut, ends = _cut(text, quoting, final=False)
            if len(text) - cut > LONGEST_LINE:
                if b"\n" not in text[cut:]:
                    at = line + text.count(b"\n", 0, cut)
                    raise DataError(f"{path}, line {at}: no line end within {LONGEST_LINE >> 20} MiB; not a text table")
                cut, ends = _cut(text, quoting, final=True)  # a quote was opened and never closed
            carry = text[cut:]
            if cut:
                yield LineBlock(path, line, text[:cut], raw.tell(), ends)
                line += text.count(b"\n", 0, cut)
        if broken:  # the unfinished line goes with the lost rest
            problems.truncate(path, line, broken)
        elif carry:
            carry += b"" if carry.endswith(b"\n") else b"\n"
            cut, ends = _cut(carry, quoting, final=False)
            yield LineBlock(path, line, carry, raw.tell(), ends if cut == len(carry) else None)


def _cut(text: bytes, quoting: Quoting | None, *, final: bool) -> tuple[int, int | None]:
    """Where the last whole record of a text ends, and LineBlock.ends."""
    cut = text.rfind(b"\n") + 1
    if quoting is None or quoting.quote not in text:
        return cut, text.count(b"\n", 0, cut)
    if not final and (found := sound_cut(text, quoting.delimiter, quoting.quote)) is not None:
        return found
    end = 0
    for record in records(text[:cut], quoting.delimiter, quoting.quote, quoting.width, final=final):
        end = record.end
    return end, None


def first_line(path: Path, skip: str = "") -> str:
    """The first line of a text file that is not empty and does not start with `skip`."""
    for block in read_blocks(path, Problems(), 1 << 16):
        for number, line in enumerate(block.data.split(b"\n"), block.first_line):
            if line.strip() and not (skip and line.startswith(skip.encode())):
                try:
                    return line.rstrip(b"\r").decode()
                except UnicodeDecodeError:
                    raise DataError(f"{path}, line {number}: bytes that are not UTF-8") from None
    raise DataError(f"{path}: the file is empty")


def _salvage(stream: Decompressor, data: bytes) -> tuple[int, list[bytes]]:
    """What can be had of a damaged piece, byte by byte, for an error takes with it all that the same call had
    decompressed; and how many bytes were good."""
    found: list[bytes] = []
    for i in range(len(data)):
        try:
            found.append(stream.decompress(data[i : i + 1]))
        except zlib.error:
            return i, found
    return len(data), found


def _texts(raw: IO[bytes], block_bytes: int) -> Iterator[bytes]:
    """The file's text in pieces of at most block_bytes, none of them empty.

    zlib directly rather than the gzip module, which drops what it had already decompressed when the stream breaks off.
    """
    magic = raw.read(2)
    raw.seek(0)
    if magic != b"\x1f\x8b":
        while text := raw.read(block_bytes):
            yield text
        return
    pieces: list[bytes] = []
    size, stream, data = 0, zlib.decompressobj(wbits=31), b""
    broken = ""
    while not broken:
        data = data or raw.read(1 << 20)
        if stream.eof:  # files may be several gzip members in a row, padded with zeros
            data = data.lstrip(b"\0") or raw.read(1 << 20)
            stream = zlib.decompressobj(wbits=31) if data else stream
        if not data:
            broken = "" if stream.eof else f"{DAMAGED} (end of file inside the stream); {LOST}"
            break
        before = stream.copy()
        try:
            pieces.append(stream.decompress(data, block_bytes - size))
        except zlib.error as error:
            good, pieces_of_piece = _salvage(before, data)
            pieces += pieces_of_piece
            size += sum(map(len, pieces_of_piece))
            at = f"near byte {raw.tell() - len(data) + good:,} of {os.fstat(raw.fileno()).st_size:,}"
            broken = (
                FAILED_CHECK
                if "data check" in str(error) or "length check" in str(error)
                else f"{DAMAGED} ({error}; {at}); {LOST}"
            )
            break
        data = stream.unused_data if stream.eof else stream.unconsumed_tail
        size += len(pieces[-1])
        if size >= block_bytes:
            yield b"".join(pieces)
            pieces, size = [], 0
    if size:
        yield b"".join(pieces)
    if broken:
        raise _Broken(broken)


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


def get_format(name: str) -> Format:
    if name not in FORMATS:
        raise ValueError(f"format must be one of auto, {', '.join(FORMATS)}; got {name!r}")
    module, _, variable = FORMATS[name].partition(".")
    return getattr(import_module(f"fastcross.data.formats.{module}"), variable)


def detect_format(path: Path) -> str:
    """The name of the first format that recognises the file by its beginning."""
    head = Head.read(path)
    return next(name for name in FORMATS if get_format(name).recognises(head))
