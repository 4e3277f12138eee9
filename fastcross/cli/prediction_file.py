"""Predictions in a file: CSV, Parquet or NumPy's format, written as the rows come, and there whole or not at all."""

import contextlib
import csv
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet

from fastcross.files import atomic

Array = npt.NDArray[Any]
SUFFIXES = (".csv", ".parquet", ".npy")


class Writer(Protocol):
    def write(self, rows: Array, ids: pa.Array | None, probability: Array) -> None:
        """The next rows: their numbers, their ids, and (n,) or (n, C) probabilities, NaN where a row has none."""


@contextlib.contextmanager
def prediction_file(path: Path, classes: Sequence[str], id_column: str | None = None) -> Iterator[Writer]:
    """Writes predictions in the format of the file's name; the file is there when the block ends without error.

    CSV and Parquet have the columns `row` (from 1), the id column if there is one, and probabilities: of the second of
    two classes, else of each; without classes, of a quantity, the column is `prediction`. Where the classes have names
    of their own, these stand in the columns' names, and a column `class` holds the likeliest one. A row that could not
    be read has its number and nothing more. NumPy's format holds the numbers alone, (rows,) or (rows, classes), NaN for
    such a row.
    """
    names = _column_names(classes, id_column)
    with atomic(path) as temporary, contextlib.ExitStack() as stack:
        if path.suffix == ".npy":
            array = _ArrayFile(stack.enter_context(open(temporary, "wb")), len(classes))
            yield array
            array.finish()
        elif path.suffix == ".parquet":
            yield _ParquetFile(temporary, names, classes, stack)
        else:
            file = stack.enter_context(open(temporary, "w", newline="", encoding="utf-8"))
            yield _CsvFile(file, names, classes)


def _column_names(classes: Sequence[str], id_column: str | None) -> list[str]:
    plain = tuple(classes) == ("0", "1")
    shown = classes[1:] if len(classes) == 2 else classes
    predicted = ["probability"] if plain else [*(f"probability_{name}" for name in shown), "class"]
    predicted = predicted if classes else ["prediction"]
    if id_column in predicted:
        raise ValueError(f"the id column {id_column} has the name of a column of the output")
    if id_column is None:
        return ["row", *predicted]
    return ["row_number" if id_column == "row" else "row", id_column, *predicted]


class _ArrayFile:
    """An .npy file that grows; its header is written again when the number of rows is known."""

    def __init__(self, file: IO[bytes], num_classes: int) -> None:
        self.file, self.shape, self.rows = file, () if num_classes in (0, 2) else (num_classes,), 0
        self._write_header()
        self.start = file.tell()

    def write(self, rows: Array, ids: pa.Array | None, probability: Array) -> None:
        self.file.write(np.ascontiguousarray(probability, np.float64).tobytes())
        self.rows += len(rows)

    def finish(self) -> None:
        self.file.seek(0)
        self._write_header()
        assert self.file.tell() == self.start, "NumPy leaves room in the header for any number of rows"

    def _write_header(self) -> None:
        description = {"descr": "<f8", "fortran_order": False, "shape": (self.rows, *self.shape)}
        np.lib.format.write_array_header_1_0(self.file, description)


class _ParquetFile:
    """Opened with the first rows, which tell the type of the ids."""

    def __init__(self, path: Path, names: list[str], classes: Sequence[str], stack: contextlib.ExitStack) -> None:
        self.path, self.names, self.classes, self.stack = path, names, classes, stack
        self.file: pyarrow.parquet.ParquetWriter | None = None

    def write(self, rows: Array, ids: pa.Array | None, probability: Array) -> None:
        columns = [pa.array(rows, pa.int64()), *([ids] if ids is not None else [])]
        by_class = probability.reshape(len(probability), -1).T
        columns += [pa.array(column, pa.float64(), from_pandas=True) for column in by_class]
        if self.names[-1] == "class":
            columns.append(pa.array(_likeliest(probability, self.classes), pa.string()))
        table = pa.Table.from_arrays(columns, self.names)
        if self.file is None:
            self.file = self.stack.enter_context(pyarrow.parquet.ParquetWriter(self.path, table.schema))
        self.file.write_table(table)


class _CsvFile:
    def __init__(self, file: IO[str], names: list[str], classes: Sequence[str]) -> None:
        self.writer, self.names, self.classes = csv.writer(file, lineterminator="\n"), names, classes
        self.writer.writerow(names)

    def write(self, rows: Array, ids: pa.Array | None, probability: Array) -> None:
        by_class = probability.reshape(len(probability), -1).T.tolist()
        columns: list[Iterable[Any]] = [rows.tolist(), *([ids.to_pylist()] if ids is not None else [])]
        columns += [["" if p != p else f"{p:.9g}" for p in column] for column in by_class]
        if self.names[-1] == "class":
            columns.append(_likeliest(probability, self.classes))
        self.writer.writerows(zip(*columns, strict=True))


def _likeliest(probability: Array, classes: Sequence[str]) -> list[str | None]:
    """The name of each row's likeliest class, None for a row that has no probabilities."""
    absent = np.isnan(probability if probability.ndim == 1 else probability[:, 0])
    choice = probability >= 0.5 if probability.ndim == 1 else np.nan_to_num(probability).argmax(axis=1)
    return [None if missing else classes[int(i)] for i, missing in zip(choice, absent, strict=True)]
