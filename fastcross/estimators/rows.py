"""Rows to fit on and to predict: whatever holds them as a table of Arrow, with labels and weights as columns of it.

Nothing is copied that Arrow can look at where it is. What is wrong is named by column and row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import assert_all_finite, check_consistent_length, column_or_1d

from fastcross.data.blocks import kind_of_type
from fastcross.data.columns import DataError
from fastcross.data.inference import LABEL_NAMES

Array = npt.NDArray[Any]


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
        columns = {str(name): _column(values, f"{place}: column {name}") for name, values in X.items()}
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
    if isinstance(getattr(values, "dtype", None), np.dtype) and values.dtype.kind in "biuf":
        return pa.array(np.asarray(values), from_pandas=True)
    if isinstance(values, np.ndarray) and values.dtype.kind in "US":
        values = values.astype(object)  # Arrow reads no texts of fixed width
    values = _readable(values)
    try:
        return pa.array(values, from_pandas=True)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise DataError(f"{place} {_mixture(values, error)}") from None


def _readable(values: Any) -> Any:
    """What pandas has and Arrow has not: sparse columns become dense, intervals texts, periods their first moments."""
    kind = type(getattr(values, "dtype", None)).__name__
    if kind == "SparseDtype":
        return values.sparse.to_dense()
    if kind == "IntervalDtype":
        return values.astype(str).where(values.notna(), None)
    if kind == "PeriodDtype":
        return values.dt.to_timestamp()
    if kind != "CategoricalDtype" or getattr(values.cat.categories.dtype, "kind", "O") in "biuf":
        return values
    if all(isinstance(category, str) for category in values.cat.categories):
        return values
    return values.cat.rename_categories(list(map(str, values.cat.categories)))


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


def chosen_names(chosen: Any, names: Sequence[str]) -> tuple[str, ...]:
    """The columns that scikit-learn's categorical_features choose: by names, positions, or a mask."""
    if isinstance(chosen, str) and chosen == "from_dtype":
        return ()
    array = np.asarray([chosen] if isinstance(chosen, str) else chosen)
    if array.ndim == 1 and array.dtype == bool:
        if len(array) != len(names):
            raise ValueError(f"categorical_features must be a mask of {len(names)} columns; got {len(array)}")
        return tuple(name for name, is_chosen in zip(names, array.tolist(), strict=True) if is_chosen)
    if array.ndim != 1 or (array.dtype.kind not in "iuUO" and array.size):
        raise ValueError(f'categorical_features must be names, positions, a mask or "from_dtype"; got {chosen!r}')
    if array.dtype.kind in "iu":
        if outside := [each for each in array.tolist() if not 0 <= each < len(names)]:
            raise ValueError(f"categorical_features must be positions below {len(names)}; got {outside[0]}")
        return tuple(names[each] for each in array.tolist())
    if absent := [str(name) for name in array.tolist() if str(name) not in names]:
        raise ValueError(f"categorical_features name no column {', '.join(absent)}; the columns are {', '.join(names)}")
    return tuple(map(str, array.tolist()))


def numbers_of(table: pa.Table, names: Sequence[str]) -> list[str]:
    """The columns of numbers, but for those that are stored as categories."""
    kinds = {name: table.schema.field(name).type for name in names}
    return [n for n, kind in kinds.items() if kind_of_type(kind) == "numbers" and not pa.types.is_dictionary(kind)]


@dataclass(frozen=True)
class Rows:
    """A table with the label and, where there is one, the weight among its columns."""

    table: pa.Table
    label: str
    weight: str | None = None
    classes: Array | None = None  # of a classifier: the different labels, in order
    class_weight: Any = None  # of a classifier: class -> how much its rows count

    @property
    def texts(self) -> tuple[str, ...] | None:
        """The classes as a file would hold them."""
        return None if self.classes is None else tuple(map(str, self.classes.tolist()))

    @property
    def features(self) -> list[str]:
        return [name for name in self.table.column_names if name not in (self.label, self.weight)]

    def renamed(self, other: Rows) -> Rows:
        """With label and weight under the names that they have in other rows."""
        names = {self.label: other.label, self.weight: other.weight or self.weight}
        table = self.table.rename_columns([names.get(name, name) for name in self.table.column_names])
        return Rows(table, other.label, other.weight, self.classes, self.class_weight)


def labels_of(table: pa.Table, y: Any, place: str, what: str) -> tuple[pa.Table, Array, str]:
    """The table without its labels, the labels, and their name; y may name a column, or be None for a usual name."""
    if y is None:
        y = next((name for name in table.column_names if name.lower() in LABEL_NAMES), None)
        if y is None:
            names = ", ".join(table.column_names)
            raise ValueError(
                f"{what} requires y to be passed, but the target y is None, and no column of {place} has the name of a "
                f"label ({', '.join(LABEL_NAMES)}); the columns are {names}"
            )
    if isinstance(y, str):
        if y not in table.column_names:
            raise DataError(f"{place}: no column {y}; the columns are {', '.join(table.column_names)}")
        return table.drop_columns([y]), table[y].to_numpy(), y
    name = getattr(y, "name", None)
    y = pa.chunked_array([y]) if isinstance(y, pa.Array) else y
    values = column_or_1d(y.to_numpy() if hasattr(y, "to_numpy") else y, warn=True)
    if len(values) != len(table):  # in scikit-learn's words
        check_consistent_length(np.empty(len(table)), values)
    return table, values, name if isinstance(name, str) and name not in table.column_names else "label"


def check_present(y: Array, place: str, name: str) -> None:
    """Raise where a label is missing or infinite."""
    missing = _is_missing(y) if y.dtype == object else y != y
    if np.any(missing):
        row = int(np.argmax(missing)) + 1
        raise DataError(f"{place}: Input y contains NaN: the label {name} is missing in row {row}, of {len(y):,}")
    if y.dtype.kind == "f":
        assert_all_finite(y, input_name="y")


def _is_missing(y: Array) -> Array:
    try:
        return pa.array(y, from_pandas=True).is_null().to_numpy(zero_copy_only=False)
    except pa.ArrowException:  # values of several types
        return np.array([value is None or (isinstance(value, float) and value != value) for value in y])


def classified(
    table: pa.Table, y: Any, weight: Any, place: str, what: str, classes: Array | None = None, class_weight: Any = None
) -> Rows:
    """Rows of a classifier; those of eval_set are given the classes that are known."""
    table, values, name = labels_of(table, y, place, what)
    check_present(values, place, name)
    check_classification_targets(values)
    try:
        found, codes = np.unique(values, return_inverse=True)
    except TypeError:
        raise DataError(f"{place}: the label {name} holds values of several types, which have no order") from None
    if classes is None and len(found) < 2:
        raise ValueError(f"{what} needs at least two classes; the label {name} has one class, {found.tolist()[0]!r}")
    texts = pa.array(list(map(str, found.tolist())))
    table, label = add_column(table, name, pa.DictionaryArray.from_arrays(codes.astype(np.int32), texts))
    known = found if classes is None else classes
    rows = Rows(table, label, classes=known)
    if class_weight is None:
        return weighted(rows, weight, place)
    if isinstance(class_weight, str):  # scikit-learn knows which texts there are
        weights = compute_class_weight(class_weight, classes=found, y=values)
        class_weight = dict(zip(found.tolist(), weights.tolist(), strict=True))
    if not isinstance(class_weight, Mapping):
        raise ValueError(f'class_weight must map classes to weights, or be "balanced"; got {class_weight!r}')
    if unknown := [name for name in class_weight if name not in known]:
        raise ValueError(f"class_weight names {unknown[0]!r}, which is no class; the classes are {known.tolist()}")
    of_rows = np.array([class_weight.get(name, 1.0) for name in found.tolist()], np.float64)[codes]
    if isinstance(weight, str):
        if weight not in rows.features:
            return weighted(rows, weight, place)  # which says so
        weight, rows = table[weight].to_numpy(), replace(rows, table=table.drop_columns([weight]))
    rows = weighted(rows, of_rows if weight is None else of_rows * np.asarray(weight), place)
    return replace(rows, class_weight=class_weight)


def measured(table: pa.Table, y: Any, weight: Any, place: str, what: str) -> Rows:
    """Rows of a regressor."""
    table, values, name = labels_of(table, y, place, what)
    check_present(values, place, name)
    try:
        numbers = values.astype(np.float64)
    except (TypeError, ValueError):
        raise DataError(f"{place}: the label {name} must hold numbers; got {values[0]!r}") from None
    table, label = add_column(table, name, pa.array(numbers))
    return weighted(Rows(table, label), weight, place)


def weighted(rows: Rows, weight: Any, place: str) -> Rows:
    """With weights: None, the name of a column, or one for each row."""
    if weight is None:
        return rows
    if isinstance(weight, str):
        if weight not in rows.features:
            raise DataError(f"{place}: no column {weight} to weigh rows by; the columns are {', '.join(rows.features)}")
        return replace(rows, weight=weight)
    size = len(rows.table)
    values = np.asarray(weight)
    values = np.full(size, float(values)) if values.ndim == 0 else values
    if values.shape != (size,):
        raise ValueError(f"sample_weight must be ({size},), one for each row of {place}; got {values.shape}")
    try:
        numbers = values.astype(np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"sample_weight must hold numbers; got {values.dtype}") from None
    wrong = ~((numbers >= 0) & np.isfinite(numbers))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(
            f"sample_weight must be finite and at least 0; got {numbers[row]:g} in row {row + 1} of {place}"
        )
    table, name = add_column(rows.table, "sample_weight", pa.array(numbers))
    return replace(rows, table=table, weight=name)
