"""Text tables: CSV and its relatives, parsed by Arrow in blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.csv

from fastcross.data.blocks import Block, to_block
from fastcross.data.columns import Columns
from fastcross.data.errors import BadRow, DataError, Problems
from fastcross.data.formats.lines import LineBlock, Quoting, first_line, read_blocks
from fastcross.data.formats.records import Record, is_blank, records
from fastcross.data.formats.table import Head, check_present, find_bad
from fastcross.data.inference import Finding

PARSED_AT_ONCE = 1 << 20  # bytes: what Arrow holds in the processor's cache between its passes


@dataclass(frozen=True)
class Dialect:
    """How a text table is written."""

    names: tuple[str, ...]
    delimiter: str = ","
    quote: str | None = '"'
    missing: tuple[str, ...] = ("",)
    trim: bool = False  # blanks around a value do not count
    first_line: str = ""  # a first line that starts so is not data: a header, a comment
    header: bool = False  # the first line is there, and is exactly so

    @property
    def quoting(self) -> Quoting | None:
        return Quoting(self.delimiter.encode(), self.quote.encode(), len(self.names)) if self.quote else None

    @property
    def spellings_of_missing(self) -> list[str]:
        return [*self.missing, *(f" {m}" for m in self.missing if self.trim)]


@dataclass(frozen=True)
class TextTable:
    """A text table; `labelled` says whether the label is to be read, `carry` names a column to keep as text."""

    dialect: Dialect
    columns: Columns
    labelled: bool = True
    carry: str | None = None
    findings: tuple[Finding, ...] = ()
    looked_at: str = ""

    def chunks(self, path: Path, problems: Problems) -> Iterator[tuple[LineBlock, int]]:
        at_start = bool(self.dialect.first_line)
        for block in read_blocks(path, problems, quoting=self.dialect.quoting):
            if at_start:
                block = self._without_first_line(block)
                at_start = not block.data.strip()
            yield block, block.read_bytes

    def block(self, path: Path, chunk: LineBlock, problems: Problems) -> Block:
        if chunk.ends is not None:
            try:
                return self._parse(chunk.data, chunk.ends)
            except (pa.ArrowInvalid, BadRow):
                pass
        found = [record for record in self._records(chunk.data) if record.problem or self._is_row(chunk.data, record)]
        good = [i for i, record in enumerate(found) if not record.problem]
        bad = {i: record.problem for i, record in enumerate(found) if record.problem}

        def parse(lo: int, hi: int) -> Block:
            return self._parse(b"".join(chunk.data[found[i].start : found[i].end] for i in good[lo:hi]), hi - lo)

        bad |= {good[i]: reason for i, reason in find_bad(parse, 0, len(good), self.dialect.names).items()}
        line, start = chunk.first_line, 0
        for i in sorted(bad):
            line, start = line + chunk.data.count(b"\n", start, found[i].start), found[i].start
            problems.add(path, line, bad[i])
        good = [i for i in good if i not in bad]
        return replace(parse(0, len(good)), skipped=sorted(bad))

    def with_columns(self, columns: Columns, labelled: bool) -> TextTable:
        return replace(self, columns=columns, labelled=labelled)

    def _parse(self, data: bytes, ends: int) -> Block:
        """Rows of `ends` lines or records, blank lines among them."""
        number = pa.int64() if self.columns.integers else pa.float64()
        types = dict.fromkeys(self.columns.read(self.labelled, self.carry), pa.string())
        # Categories are read as bytes; that they are UTF-8 is checked on the distinct ones only, by to_block.
        types |= dict.fromkeys(self.columns.dense or (), number) | dict.fromkeys(
            self.columns.categorical or (), pa.binary()
        )
        if self.carry:
            types[self.carry] = pa.string()
        if not data.strip():
            table = pa.schema([(name, types[name]) for name in types]).empty_table()
        else:
            table = read_csv(data, self.dialect, types, ends)
            if table.num_rows != ends and (
                len(self.dialect.names) == 1
                or table.num_rows != sum(self._is_row(data, record) for record in self._records(data))
            ):
                raise BadRow("a carriage return stands inside a value, or a line of a single column is blank")
        return to_block(table, self.columns, labelled=self.labelled, trim=self.dialect.trim, carry=self.carry)

    def _records(self, data: bytes) -> Iterator[Record]:
        quoting = self.dialect.quoting
        # A quote that no text has: every line is a record.
        quote = quoting.quote if quoting else b"\0no quote"
        return records(data, self.dialect.delimiter.encode(), quote, len(self.dialect.names))

    def _is_row(self, data: bytes, record: Record) -> bool:
        return not is_blank(data[record.start : record.end], len(self.dialect.names))

    def _without_first_line(self, block: LineBlock) -> LineBlock:
        """The first block without the header or comment, which is the first line that is not blank."""
        data, prefix = block.data, self.dialect.first_line.encode()
        start = len(data) - len(data.lstrip(b"\r\n"))
        if data.startswith(prefix, start):
            end = data.find(b"\n", start + len(prefix)) + 1
            rest = data[start + len(prefix) : end].strip()
            if not (self.dialect.header and rest):
                lines = data.count(b"\n", 0, end)
                ends = None if block.ends is None else max(block.ends - lines + prefix.count(b"\n"), 0)
                return replace(block, first_line=block.first_line + lines, data=data[end:], ends=ends)
        if self.dialect.header and data.strip():
            found = data[start : data.find(b"\n", start)].decode(errors="replace").strip()
            line = block.first_line + data.count(b"\n", 0, start)
            raise DataError(f"{block.path}, line {line}: the header must be that of the first file; got {found[:200]}")
        return block


@dataclass(frozen=True)
class FixedText:
    """A format of text files whose columns are known."""

    name: str
    dialect: Dialect
    columns: Columns
    recognises: Callable[[Head], bool]

    @property
    def missing(self) -> tuple[str, ...]:
        return self.dialect.missing

    def open(self, path: Path, columns: Columns | None) -> TextTable:
        if columns is not None:
            raise DataError(f'format "{self.name}" has fixed columns; declare columns with format "csv" or "parquet"')
        return TextTable(self.dialect, self.columns)

    def open_for_prediction(self, path: Path, columns: Columns, labelled: bool, carry: str | None) -> TextTable:
        """The label's column may be absent from every row."""
        line = first_line(path, skip=self.dialect.first_line)
        names = self.dialect.names
        if line.count(self.dialect.delimiter) + 1 == len(names) - 1:
            names = tuple(name for name in names if name != columns.label)
        check_present(path, columns.read(labelled, carry), names)
        return TextTable(replace(self.dialect, names=names), columns, labelled, carry)


def read_csv(
    data: bytes, dialect: Dialect, types: dict[str, pa.DataType], ends: int = -1, *, lenient: bool = False
) -> pa.Table:
    """Arrow's table of a text without header and with `ends` records; `lenient` leaves out rows of another width."""
    quoted_newlines = (
        dialect.quote is not None and data.count(b"\n") != ends
    )  # Arrow is slower if it has to look for them
    at_once = min(PARSED_AT_ONCE, len(data))

    def read(block_size: int) -> pa.Table:
        return pyarrow.csv.read_csv(
            pa.BufferReader(data),
            read_options=pyarrow.csv.ReadOptions(
                column_names=dialect.names, use_threads=False, block_size=max(block_size, 1)
            ),
            parse_options=pyarrow.csv.ParseOptions(
                delimiter=dialect.delimiter,
                quote_char=dialect.quote or False,
                ignore_empty_lines=True,
                newlines_in_values=quoted_newlines,
                invalid_row_handler=(lambda row: "skip") if lenient else None,
            ),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types=types,
                include_columns=list(types),
                null_values=dialect.spellings_of_missing,
                strings_can_be_null=True,
                check_utf8=True,
            ),
        )

    try:
        return read(at_once)
    except pa.ArrowInvalid:
        if len(data) <= at_once:
            raise
        return read(len(data) + 1)  # a record may be longer than what is parsed at once
