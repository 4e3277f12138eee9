"""Rows to infer columns from: not the first ones alone, for logs are sorted by time or by user."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from fastcross.data.blocks import as_text
from fastcross.data.errors import DataError, Problems
from fastcross.data.formats.lines import open_binary, read_blocks
from fastcross.data.formats.records import sound_cut
from fastcross.data.formats.table import check_distinct, first_sentence
from fastcross.data.formats.text import Dialect, read_csv
from fastcross.data.inference import Sample

FIRST_BYTES = 4 << 20
PIECES, PIECE_BYTES = 8, 1 << 20  # further pieces, evenly spread from there to the end
PARQUET_ROWS = 1 << 14  # from the beginning and the end of each row group that is looked at


def sample_text(path: Path, dialect: Dialect) -> Sample:
    pieces = [(at, data) for at, data in _pieces(path, dialect) if data.strip()]
    tables = []
    for _, data in pieces:
        try:
            data.decode()
        except UnicodeDecodeError:  # the reading proper says in which line
            data = data.decode(errors="replace").encode()
        try:
            tables.append(read_csv(data, dialect, dict.fromkeys(dialect.names, pa.string()), lenient=True))
        except pa.ArrowInvalid as error:
            raise DataError(f"{path}: the columns cannot be inferred ({first_sentence(error)}); declare them") from None
    if not tables:
        raise DataError(f"{path}: a header, but no rows")
    whole = not _is_gzip(path) and path.stat().st_size <= FIRST_BYTES

    def line_of(column: str, value: str) -> int | None:
        return _line_of(path, dialect, pieces, dialect.names.index(column), value)

    table = pa.concat_tables(tables)
    where = "all" if whole else "the first" if _is_gzip(path) else "all over the file"
    return Sample(str(path), table, whole, "line", line_of, _where(table, where, path))


def sample_parquet(path: Path) -> Sample:
    pieces, first_rows = [], []  # the number of each piece's first row
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            check_distinct(path, file.schema_arrow.names)
            groups, rows, schema = file.metadata.num_row_groups, file.metadata.num_rows, file.schema_arrow
            starts = [1]
            for group in range(groups):
                starts.append(starts[-1] + file.metadata.row_group(group).num_rows)
            for group in sorted({round(i * (groups - 1) / PIECES) for i in range(PIECES + 1)}) if groups else ():
                last = (starts[group + 1] - starts[group] - 1) // PARQUET_ROWS
                wanted = {0, last // 2, last} if groups < 3 else {0}  # the later ones cost a reading of the whole group
                for i, batch in enumerate(file.iter_batches(PARQUET_ROWS, row_groups=[group])):
                    if i in wanted:
                        pieces.append(pa.Table.from_batches([batch]))
                        first_rows.append(starts[group] + i * PARQUET_ROWS)
                    if i == max(wanted):
                        break
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file ({first_sentence(error)})") from None
    if not rows:
        raise DataError(f"{path}: the file has no rows")

    def row_of(column: str, value: str) -> int | None:
        for first, piece in zip(first_rows, pieces, strict=True):
            if (found := pc.index(as_text(piece[column]), value).as_py()) >= 0:
                return first + found
        return None

    table = pa.concat_tables(pieces) if pieces else schema.empty_table()
    where = "all" if len(table) == rows else "all over the file"
    return Sample(str(path), table, len(table) == rows, "row", row_of, _where(table, where, path))


def _where(table: pa.Table, where: str, path: Path) -> str:
    rows = f"{len(table):,} rows"
    return f"{rows} from all over {path.name}" if where == "all over the file" else f"{where} {rows} of {path.name}"


def _pieces(path: Path, dialect: Dialect) -> Iterator[tuple[int, bytes]]:
    """Whole records from all over the file, each piece with its place in it; of a gzip file the beginning."""
    rest = path.stat().st_size - FIRST_BYTES
    blocks = read_blocks(path, Problems("skip"), FIRST_BYTES, dialect.quoting)
    first = next((block.data for block in blocks), b"")
    if rest <= 0 and not _is_gzip(path):
        first += b"".join(block.data for block in blocks)
    header = dialect.first_line.encode()
    start = first.find(b"\n", first.find(header) + len(header)) + 1
    yield start, first[start:]
    if _is_gzip(path) or rest <= 0:
        return
    length = min(PIECE_BYTES, rest // PIECES)
    with open_binary(path) as file:
        for i in range(PIECES):
            at = FIRST_BYTES + (rest - length) * i // (PIECES - 1)
            file.seek(at)
            data = file.read(length)
            begin = data.find(b"\n") + 1
            data = _whole_records(data[begin:], dialect)
            if data:
                yield at + begin, data


def _whole_records(data: bytes, dialect: Dialect) -> bytes:
    """The piece up to its last whole record; nothing if it seems to begin inside a quoted value."""
    quoting = dialect.quoting
    if quoting is None or quoting.quote not in data:
        return data[: data.rfind(b"\n") + 1]
    found = sound_cut(data, quoting.delimiter, quoting.quote)
    return data[: found[0]] if found else b""


def _line_of(path: Path, dialect: Dialect, pieces: list[tuple[int, bytes]], column: int, value: str) -> int | None:
    """The line of the first sampled record that has the value in this column."""
    for at, data in pieces:
        if value.encode() not in data:
            continue
        reader = csv.reader(
            io.StringIO(data.decode(errors="replace"), newline=""),
            delimiter=dialect.delimiter,
            quoting=csv.QUOTE_MINIMAL if dialect.quote else csv.QUOTE_NONE,
        )
        line = 0
        try:
            for row in reader:
                if len(row) > column and row[column] == value:
                    return _lines_before(path, at) + line + 1
                line = reader.line_num
        except csv.Error:  # a value too long for this reader: the line stays unnamed
            continue
    return None


def _lines_before(path: Path, at: int) -> int:
    """Line ends in the first `at` bytes of a file; of gzip, where only the first block is sampled, of its text."""
    if _is_gzip(path):
        first = next(read_blocks(path, Problems("skip"), FIRST_BYTES))
        return first.data.count(b"\n", 0, at)
    lines = 0
    with open_binary(path) as file:
        while at > 0 and (data := file.read(min(at, 1 << 24))):
            lines, at = lines + data.count(b"\n"), at - len(data)
    return lines


def _is_gzip(path: Path) -> bool:
    with open_binary(path) as file:
        return file.read(2) == b"\x1f\x8b"
