"""From what a user names — files, a pattern, a format or none — to a table that can be read."""

from __future__ import annotations

import glob
from collections.abc import Iterable
from dataclasses import replace
from os import PathLike, fspath
from pathlib import Path

from fastcross.data.columns import Columns
from fastcross.data.criteo import criteo_table
from fastcross.data.datasets import adult_table, covertype_table, higgs_table
from fastcross.data.errors import DataError
from fastcross.data.lines import first_line, open_binary
from fastcross.data.table import ParquetTable, TextTable, csv_dialect, open_csv, open_parquet

FIXED = {"criteo": criteo_table, "covertype": covertype_table, "higgs": higgs_table, "adult": adult_table}
FORMATS = (*FIXED, "csv", "parquet")

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
    for path in paths:
        if path.is_dir():
            raise DataError(f"{path}: a folder; name its files, for example {path}/*")
        with open_binary(path) as file:
            if not file.read(1):
                raise DataError(f"{path}: the file is empty")
    return paths


def detect_format(path: Path) -> str:
    """By content: Parquet's magic bytes, else the shape of the first line."""
    with open_binary(path) as file:
        if file.read(4) == b"PAR1":
            return "parquet"
    line = first_line(path)
    fields = line.split(",")
    if line.count("\t") in (38, 39) and not line.startswith(("label", "C1")):
        return "criteo"
    if line.startswith("|1x3") or (len(fields) in (14, 15) and fields[0].isdigit() and fields[1].startswith(" ")):
        return "adult"
    if line.startswith("Elevation,") or (len(fields) in (54, 55) and all(f.lstrip("-").isdigit() for f in fields)):
        return "covertype"
    if len(fields) == 29 and fields[0][:1] in "01" and all(_is_number(f) for f in fields):
        return "higgs"
    return "csv"


def open_table(path: Path, format: str, columns: Columns | None) -> TextTable | ParquetTable:
    """The table of a first file; the columns of csv and parquet are completed from its first rows."""
    if format not in FORMATS:
        raise ValueError(f"format must be one of auto, {', '.join(FORMATS)}; got {format!r}")
    if format == "parquet":
        return open_parquet(path, columns or Columns())
    if format == "csv":
        return open_csv(path, columns or Columns())
    if columns is not None:
        raise DataError(f'format "{format}" has fixed columns; declare columns with format "csv" or "parquet"')
    return FIXED[format]()


def open_for_prediction(path: Path, format: str, columns: Columns) -> TextTable | ParquetTable:
    """The same table where the label may be absent, and is not read where it is present."""
    if format == "parquet":
        return ParquetTable(columns, labelled=False)
    if format == "csv":
        dialect = csv_dialect(path)
        absent = {*columns.features, *columns.weights.values()} - set(dialect.names)
        if absent:
            raise DataError(
                f"{path}: no column {', '.join(sorted(absent))}; the columns are {', '.join(dialect.names)}"
            )
        return TextTable(dialect, columns, labelled=False)
    table = FIXED[format]()
    line = first_line(path, skip=table.dialect.first_line)
    names = table.dialect.names
    if line.count(table.dialect.delimiter) + 1 == len(names) - 1:
        names = tuple(name for name in names if name != columns.label)
    return TextTable(replace(table.dialect, names=names), columns, labelled=False)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
