"""CSV with a header; the columns are declared or inferred."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from fastcross.data.columns import Columns
from fastcross.data.errors import DataError, Problems
from fastcross.data.formats.lines import read_blocks
from fastcross.data.formats.records import first_record
from fastcross.data.formats.samples import sample_text
from fastcross.data.formats.table import Head, check_distinct, check_present
from fastcross.data.formats.text import Dialect, TextTable
from fastcross.data.inference import complete

MISSING = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "?")


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


FORMAT = Csv()


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
