"""Text files, plain or gzip, as blocks of whole lines (with quotes: of whole records) that know their place."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fastcross.data.errors import DataError, Problems
from fastcross.data.formats.records import records, sound_cut

BLOCK_BYTES = 16 << 20  # of text: large enough to amortise a parser call, small enough to hold a few in memory
LONGEST_LINE = 64 << 20
Decompressor = Any  # zlib does not name its type
DAMAGED, LOST = "the gzip stream is damaged or ends early", "all from here on is lost"
FAILED_CHECK = "the gzip stream fails its own checksum: some of what was read before is wrong"


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
    path: Path, problems: Problems, block_bytes: int = BLOCK_BYTES, quoting: Quoting | None = None
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


def open_binary(path: Path) -> IO[bytes]:
    try:
        return open(path, "rb")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None


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
