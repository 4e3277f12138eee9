"""Tables as streams of blocks: text (CSV and its relatives) and Parquet.

A block is parsed whole by Arrow; only when that fails is it halved until the bad rows are found, so a clean file
never pays for the precision of its error messages.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from fastcross.data.columns import Columns, Dialect
from fastcross.data.convert import Block, convert
from fastcross.data.errors import BadRow, DataError, Problems
from fastcross.data.lines import LineBlock, first_line, open_binary, read_blocks

PARQUET_ROWS = 1 << 16
DEFAULT_MISSING = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "?")


class Table(Protocol):
    """A readable input: raw chunks come in order from one thread, blocks are made of them on several."""

    @property
    def columns(self) -> Columns: ...

    def chunks(self, path: Path, problems: Problems) -> Iterator[tuple[Any, int]]:
        """The raw chunks of a file, and how many bytes of it are read so far."""

    def block(self, path: Path, chunk: Any, problems: Problems) -> Block: ...


@dataclass(frozen=True)
class TextTable:
    """A text table; `labelled` says whether the label column is to be read."""

    dialect: Dialect
    columns: Columns
    labelled: bool = True

    def chunks(self, path: Path, problems: Problems) -> Iterator[tuple[LineBlock, int]]:
        prefix = self.dialect.first_line.encode()
        for block in read_blocks(path, problems):
            if prefix and block.first_line == 1:
                start, end = 0, block.data.find(b"\n") + 1
                if block.data.startswith(prefix):
                    start = end
                elif self.dialect.first_line_required:
                    found = block.data[: end - 1].decode(errors="replace")
                    raise DataError(f"{path}, line 1: the header must be that of the first file; got {found[:200]}")
                block = LineBlock(path, 1 + (start > 0), block.data[start:], block.read_bytes)
            yield block, block.read_bytes

    def block(self, path: Path, chunk: LineBlock, problems: Problems) -> Block:
        try:
            return self._parse(chunk.data)
        except (pa.ArrowInvalid, BadRow):
            pass
        lines = chunk.data.split(b"\n")[:-1]
        good = [i for i, line in enumerate(lines) if line.strip() and self._width_is_plausible(line)]
        bad = {i: self._width_message(line) for i, line in enumerate(lines) if line.strip()}
        for i in good:
            del bad[i]

        def parse(lo: int, hi: int) -> Block:
            return self._parse(b"".join(lines[i] + b"\n" for i in good[lo:hi]))

        bad |= {good[i]: reason for i, reason in find_bad(parse, 0, len(good), self.dialect.names).items()}
        for i in sorted(bad):
            problems.add(path, chunk.first_line + i, bad[i])
        return self._parse(b"".join(lines[i] + b"\n" for i in good if i not in bad))

    def _parse(self, data: bytes) -> Block:
        names = self.dialect.names
        number = pa.int64() if self.columns.integers else pa.float64()
        types = dict.fromkeys(self._used(), pa.string()) | dict.fromkeys(self.columns.dense or (), number)
        # Categories are read as bytes; that they are UTF-8 is checked on the distinct ones only, by convert.
        types |= dict.fromkeys(self.columns.categorical or (), pa.binary())
        if not data.strip():
            empty = pa.schema([(name, types[name]) for name in types]).empty_table()
            return convert(empty, self.columns, labelled=self.labelled)
        table = pyarrow.csv.read_csv(
            pa.BufferReader(data),
            read_options=pyarrow.csv.ReadOptions(column_names=names, use_threads=False, block_size=1 << 20),
            parse_options=pyarrow.csv.ParseOptions(
                delimiter=self.dialect.delimiter, quote_char=self.dialect.quote or False, ignore_empty_lines=True
            ),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types=types,
                include_columns=list(types),
                null_values=_spellings(self.dialect),
                strings_can_be_null=True,
                check_utf8=True,
            ),
        )
        if table.num_rows != data.count(b"\n") and table.num_rows != sum(
            1 for line in data.split(b"\n") if line.strip()
        ):
            raise BadRow("a quoted value spans lines, or a carriage return stands inside one")
        return convert(table, self.columns, labelled=self.labelled, trim=self.dialect.trim)

    def _used(self) -> tuple[str, ...]:
        label = (self.columns.label,) if self.labelled and self.columns.label else ()
        return (*label, *self.columns.features, *self.columns.weights.values())

    def _width_is_plausible(self, line: bytes) -> bool:
        quote = self.dialect.quote
        fields = line.count(self.dialect.delimiter.encode()) + 1
        return fields == len(self.dialect.names) or (quote is not None and quote.encode() in line)

    def _width_message(self, line: bytes) -> str:
        fields = line.count(self.dialect.delimiter.encode()) + 1
        return f"expected {len(self.dialect.names)} columns, got {fields}"


@dataclass(frozen=True)
class ParquetTable:
    columns: Columns
    labelled: bool = True

    def chunks(self, path: Path, problems: Problems) -> Iterator[tuple[tuple[int, pa.Table], int]]:
        label = (self.columns.label,) if self.labelled and self.columns.label else ()
        names = [*label, *self.columns.features, *self.columns.weights.values()]
        row = 1
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                absent = set(names) - set(file.schema_arrow.names)
                if absent:
                    raise DataError(f"{path}: no column {', '.join(sorted(absent))}")
                size = path.stat().st_size
                for batch in file.iter_batches(PARQUET_ROWS, columns=names):
                    row += len(batch)
                    done = size * (row - 1) // max(file.metadata.num_rows, 1)
                    yield (row - len(batch), pa.Table.from_batches([batch])), done
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path}, row {row}: not a readable Parquet file ({_first(error)})") from None

    def block(self, path: Path, chunk: tuple[int, pa.Table], problems: Problems) -> Block:
        row, table = chunk
        try:
            return convert(table, self.columns, labelled=self.labelled)
        except (pa.ArrowException, BadRow):
            pass

        def parse(lo: int, hi: int) -> Block:
            return convert(table.slice(lo, hi - lo), self.columns, labelled=self.labelled)

        bad = find_bad(parse, 0, len(table), ())
        for i in sorted(bad):
            problems.add(path, row + i, bad[i], unit="row")
        keep = pa.array([i for i in range(len(table)) if i not in bad], pa.int64())
        return convert(table.take(keep), self.columns, labelled=self.labelled)


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


def csv_dialect(path: Path) -> Dialect:
    """That of a CSV file with a header; the delimiter is the likeliest of comma, tab, semicolon in the header line."""
    header = first_line(path)
    delimiter = max(",\t;", key=header.count)
    names = [name.strip() for name in next(csv.reader([header], delimiter=delimiter))]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"{path}, line 1: the header names a column twice: {', '.join(twice)}")
    return Dialect(tuple(names), delimiter, missing=DEFAULT_MISSING, first_line=header, first_line_required=True)


def open_csv(path: Path, columns: Columns) -> TextTable:
    """A CSV file whose columns are declared, or inferred from its first rows."""
    dialect = csv_dialect(path)
    sample = next((block.data for block in read_blocks(path, Problems("skip"), block_bytes=4 << 20)), b"")
    sample = sample.split(b"\n", 1)[1]
    if not sample.strip():
        raise DataError(f"{path}: a header, but no rows")
    options = pyarrow.csv.ConvertOptions(null_values=_spellings(dialect), strings_can_be_null=True)
    try:
        table = pyarrow.csv.read_csv(
            pa.BufferReader(sample),
            read_options=pyarrow.csv.ReadOptions(column_names=dialect.names),
            # Rows of another width are left to the real reading, which says where they are.
            parse_options=pyarrow.csv.ParseOptions(delimiter=dialect.delimiter, invalid_row_handler=lambda row: "skip"),
            convert_options=options,
        )
    except pa.ArrowInvalid as error:
        raise DataError(f"{path}: the columns cannot be inferred ({_first(error)}); declare them") from None
    return TextTable(dialect, columns.complete(table, str(path)))


def open_parquet(path: Path, columns: Columns) -> ParquetTable:
    open_binary(path).close()
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            sample = next(file.iter_batches(PARQUET_ROWS), None)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file ({_first(error)})") from None
    if sample is None:
        raise DataError(f"{path}: the file has no rows")
    return ParquetTable(columns.complete(pa.Table.from_batches([sample]), str(path)))


def _spellings(dialect: Dialect) -> list[str]:
    return [*dialect.missing, *(f" {m}" for m in dialect.missing if dialect.trim)]


def _first(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _reason(error: BaseException, names: tuple[str, ...]) -> str:
    """Arrow's message for one bad row in the words of this package."""
    text = _first(error)
    if match := re.search(r"Expected (\d+) columns, got (\d+)", text):
        return f"expected {match[1]} columns, got {match[2]}"
    if "UTF8" in text or "UTF-8" in text:
        return "bytes that are not UTF-8"
    if match := re.search(r"CSV column (?:#(\d+)|'?([^':]*)'?).*conversion error to (\w+): invalid value '(.*)'", text):
        kind = "an integer" if match[3] == "int64" else "a number"
        column = match[2] or names[int(match[1])]
        return f"column {column} must be {kind}; got {match[4]!r}"
    return text
