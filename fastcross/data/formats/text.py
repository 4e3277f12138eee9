"""Text tables, parsed by Arrow in blocks: CSV with a header, and the data sets of the paper, with known columns."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.csv

from fastcross.data.blocks import BadRow, Block, find_bad, first_sentence, is_number, to_block
from fastcross.data.columns import Columns, DataError, numbered
from fastcross.data.formats.reading import (
    Head,
    LineBlock,
    Problems,
    Quoting,
    Record,
    check_distinct,
    check_present,
    first_line,
    first_record,
    is_blank,
    open_binary,
    read_blocks,
    records,
    sound_cut,
)
from fastcross.data.inference import Finding, Sample, complete

BLOCK_BYTES = 16 << 20  # of text: large enough to amortise a parser call, small enough to hold a few in memory
PARSED_AT_ONCE = 1 << 20  # bytes: what Arrow holds in the processor's cache between its passes
MISSING = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "?")
FIRST_BYTES = 4 << 20  # that columns are inferred from
PIECES, PIECE_BYTES = 8, 1 << 20  # further ones, evenly spread from there to the end


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
        for block in read_blocks(path, problems, BLOCK_BYTES, self.dialect.quoting):
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

    def schema(self, path: Path) -> None:
        return None

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
        types |= dict.fromkeys(self.columns.decimals, pa.string())
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


@dataclass(frozen=True)
class Csv:
    missing: tuple[str, ...] = MISSING

    def recognises(self, head: Head) -> bool:
        return True

    def open(self, path: Path, columns: Columns | None) -> TextTable:
        dialect = read_dialect(path)
        sample = sample_text(path, dialect)
        completed, findings = complete(columns or Columns(), sample)
        return TextTable(dialect, completed, findings=findings, looked_at=sample.where)

    def open_for_prediction(self, path: Path, columns: Columns, labelled: bool, carry: str | None) -> TextTable:
        dialect = read_dialect(path)
        check_present(path, columns.read(labelled, carry), dialect.names)
        return TextTable(dialect, columns, labelled, carry)


CSV = Csv()


def read_dialect(path: Path) -> Dialect:
    """That of a CSV file with a header; the delimiter is the likeliest of comma, tab, semicolon in the header line."""
    block = next((block for block in read_blocks(path, Problems(), 1 << 16) if block.data.strip()), None)
    if block is None:
        raise DataError(f"{path}: the file is empty")
    data = block.data.lstrip(b"\r\n")
    delimiter = max(",\t;", key=data[: data.find(b"\n")].decode(errors="replace").count)
    try:
        header = data[: first_record(data, delimiter.encode(), b'"')].strip(b"\r\n").decode()
    except UnicodeDecodeError:
        line = block.first_line + block.data[: -len(data)].count(b"\n")
        raise DataError(f"{path}, line {line}: bytes that are not UTF-8") from None
    try:
        names = [name.strip() for name in next(csv.reader([header], delimiter=delimiter))]
    except csv.Error as error:  # such as lines that end in carriage returns alone
        raise DataError(f"{path}, line 1: not the header of a table ({error})") from None
    check_distinct(f"{path}, line 1", names)
    return Dialect(tuple(names), delimiter, missing=MISSING, first_line=header, header=True)


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
    rows = f"{len(table):,} rows"
    where = f"{rows} from all over {path.name}"
    if whole or _is_gzip(path):
        where = f"{'all' if whole else 'the first'} {rows} of {path.name}"
    return Sample(str(path), table, whole, "line", line_of, where)


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


# Criteo's click logs: label, 13 integers, 26 hexadecimal strings; tab-separated, no header, empty = missing.
#
# Section 4.2: the integers are normalised by a log transform. Some of them are negative, where the paper says nothing;
# here sign(x) · log(1 + |x|) is used, which is odd, monotone and finite everywhere. A missing integer becomes 0, the
# value the transform gives to a count of none; a missing category is a category of its own.
INTEGERS = numbered("I", 13)
CATEGORIES = numbered("C", 26)


def _is_criteo(head: Head) -> bool:
    return head.line.count("\t") in (38, 39) and not head.line.startswith(("label", "C1"))


CRITEO = FixedText(
    "criteo",
    Dialect(names=("label", *INTEGERS, *CATEGORIES), delimiter="\t", quote=None),
    Columns("label", INTEGERS, CATEGORIES, (), classes=("0", "1"), transform="log", integers=True),
    _is_criteo,
)


# Adult, in UCI's format: six numbers and eight categories.
#
# The two sums of money are log-transformed, the other numbers standardised; `?` is missing. The test file begins
# with a comment and ends its labels with a dot.
KINDS = {  # in the order of the file
    "age": "dense",
    "workclass": "categorical",
    "fnlwgt": "dense",
    "education": "categorical",
    "education-num": "dense",
    "marital-status": "categorical",
    "occupation": "categorical",
    "relationship": "categorical",
    "race": "categorical",
    "sex": "categorical",
    "capital-gain": "dense",
    "capital-loss": "dense",
    "hours-per-week": "dense",
    "native-country": "categorical",
}
DENSE = tuple(name for name, kind in KINDS.items() if kind == "dense")


def _is_adult(head: Head) -> bool:
    fields = head.line.split(",")
    return head.line.startswith("|1x3") or (
        len(fields) in (14, 15) and fields[0].isdigit() and fields[1].startswith(" ")
    )


ADULT = FixedText(
    "adult",
    Dialect((*KINDS, "income"), quote=None, missing=("?", ""), trim=True, first_line="|"),
    Columns(
        "income",
        DENSE,
        tuple(name for name, kind in KINDS.items() if kind == "categorical"),
        (),
        classes=("<=50K", ">50K"),
        aliases={"<=50K.": "<=50K", ">50K.": ">50K"},
        transform=tuple("log" if name.startswith("capital") else "standard" for name in DENSE),
        integers=True,
    ),
    _is_adult,
)


# Covertype of section 4.5, in UCI's format: 54 dense features, fed to the cross network directly.
#
# Ten numbers are standardised, 44 flags (wilderness areas and soil types) stay as they are; the label is 1 … 7.
NUMBERS = (
    "Elevation",
    "Aspect",
    "Slope",
    "Horizontal_Distance_To_Hydrology",
    "Vertical_Distance_To_Hydrology",
    "Horizontal_Distance_To_Roadways",
    "Hillshade_9am",
    "Hillshade_Noon",
    "Hillshade_3pm",
    "Horizontal_Distance_To_Fire_Points",
)
FLAGS = (*numbered("Wilderness_Area", 4), *numbered("Soil_Type", 40))


def _is_covertype(head: Head) -> bool:
    fields = head.line.split(",")
    return head.line.startswith("Elevation,") or (
        len(fields) in (54, 55) and all(field.lstrip("-").isdigit() for field in fields)
    )


COVERTYPE = FixedText(
    "covertype",
    Dialect((*NUMBERS, *FLAGS, "Cover_Type"), quote=None, first_line="Elevation,"),
    Columns(
        "Cover_Type",
        NUMBERS + FLAGS,
        (),
        (),
        classes=numbered("", 7),
        transform=("standard",) * len(NUMBERS) + ("none",) * len(FLAGS),
        integers=True,
    ),
    _is_covertype,
)


# Higgs of section 4.5, in UCI's format: the label first, then 28 standardised features.
FEATURES = numbered("feature", 28)


def _is_higgs(head: Head) -> bool:
    fields = head.line.split(",")
    return len(fields) == 29 and fields[0][:1] in "01" and all(map(is_number, fields))


HIGGS = FixedText(
    "higgs",
    Dialect(("label", *FEATURES), quote=None),
    Columns("label", FEATURES, (), (), classes=("0", "1"), transform="standard"),
    _is_higgs,
)
