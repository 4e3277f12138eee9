"""The input files that a user names, and their blocks in order."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterable, Iterator
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from fastcross.data.blocks import Block
from fastcross.data.errors import DataError, Problems
from fastcross.data.formats.lines import open_binary
from fastcross.data.formats.table import Table
from fastcross.data.parallel import map_in_order

COMPRESSED = {
    b"BZh": "bzip2",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ": "xz",
    b"PK\x03\x04": "zip",
    b"\x04\x22\x4d\x18": "lz4",
}
PLACES, PLACE_BYTES = 64, 16384  # of the sample by which a changed file is noticed
Source = str | PathLike[str] | Iterable[str | PathLike[str]]


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


def sample_digest(path: Path) -> str:
    """Of the bytes at 64 places: a file that was replaced may have the size and the time of the one before."""
    digest, size = hashlib.sha256(), path.stat().st_size
    with open(path, "rb") as file:
        for i in range(PLACES):
            file.seek(max(0, size - PLACE_BYTES) * i // (PLACES - 1))
            digest.update(file.read(PLACE_BYTES))
    return digest.hexdigest()


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
