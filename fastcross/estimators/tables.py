"""Whatever holds rows, as a table of Arrow; nothing is copied that Arrow can look at where it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np
import pyarrow as pa

from fastcross.data.columns import DataError


def is_path(X: object) -> bool:
    return isinstance(X, str | PathLike)


def has_names(X: object) -> bool:
    """Whether the columns of ``X`` have names of their own: those of an array have not."""
    if hasattr(X, "toarray"):  # a sparse matrix, which may be a mapping, but not of names
        return False
    return isinstance(X, pa.Table | pa.RecordBatch | Mapping) or _is(X, "pandas") or _is(X, "polars")


def to_table(X: Any, place: str = "X", names: Sequence[str] | None = None) -> pa.Table:
    """The rows of a pandas, polars or Arrow table, a dict of arrays, or an array, whose columns are called x0, x1, …
    unless ``names`` says otherwise. A DataError names the column that is there twice, or holds values of several types.
    """
    if isinstance(X, pa.RecordBatch):
        X = pa.Table.from_batches([X])
    if isinstance(X, pa.Table):
        _check_distinct(X.column_names, place)
        return X
    if _is(X, "polars"):
        X = X.collect() if hasattr(X, "collect") else X
        _check_objects({name: X[name] for name, kind in X.schema.items() if str(kind) == "Object"}, place)
        return X.to_arrow()
    if _is(X, "pandas"):
        _check_distinct([str(name) for name in X.columns], place)
        columns = {str(name): _column(X[name], f"{place}: column {name}") for name in X.columns}
        return pa.table(columns)
    if isinstance(X, Mapping):
        columns = {str(name): _column(values, f"{place}: column {name}") for name, values in X.items()}
        sizes = {name: len(column) for name, column in columns.items()}
        if len(set(sizes.values())) > 1:
            raise DataError(f"{place}: the columns must have as many rows; got {sizes}")
        return pa.table(columns)
    array = np.asarray(X)
    names = [f"x{i}" for i in range(array.shape[1])] if names is None else names
    return pa.table({name: _column(array[:, i], f"{place}: column {name}") for i, name in enumerate(names)})


def add_column(table: pa.Table, name: str, column: pa.Array) -> tuple[pa.Table, str]:
    """The table with another column, and the name it got: the one that is wished for, if it is free."""
    while name in table.column_names:
        name += "_"
    return table.append_column(name, column), name


def _is(X: object, package: str) -> bool:
    return any(kind.__module__.partition(".")[0] == package for kind in type(X).__mro__) and hasattr(X, "columns")


def _column(values: Any, place: str) -> pa.Array | pa.ChunkedArray:
    """Not a number is a missing value."""
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    if isinstance(values, np.ndarray) and values.dtype.kind in "US":
        values = values.astype(object)  # Arrow reads no texts of fixed width
    try:
        return pa.array(values, from_pandas=True)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise DataError(f"{place} {_mixture(values, error)}") from None


def _mixture(values: Any, error: Exception) -> str:
    """Which types of values a column holds, and where each of them comes first."""
    first: dict[str, int] = {}
    for row, value in enumerate(values):
        if value is not None and value == value:
            first.setdefault(type(value).__name__, row)
    if len(first) < 2:
        return f"cannot be read: {str(error).splitlines()[0]}"
    listed = ", ".join(f"{kind} in row {row + 1}" for kind, row in list(first.items())[:3])
    return f"holds values of several types: {listed}; make them one type, as texts with astype(str)"


def _check_objects(columns: Mapping[str, Any], place: str) -> None:
    """polars keeps what it does not understand as objects, which Arrow cannot take over."""
    for name, values in columns.items():
        raise DataError(f"{place}: column {name} {_mixture(values.to_list(), TypeError('objects'))}")


def _check_distinct(names: Sequence[str], place: str) -> None:
    if twice := sorted({name for name in names if list(names).count(name) > 1}):
        raise DataError(f"{place}: a column is there twice: {', '.join(twice)}")
