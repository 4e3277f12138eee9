"""Rows to fit on: features, labels and weights as one table, and what is wrong with them by name and row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import assert_all_finite, check_consistent_length, column_or_1d

from fastcross.data.columns import DataError
from fastcross.data.inference import LABEL_NAMES
from fastcross.estimators.tables import add_column

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Rows:
    """A table with the label and, where there is one, the weight among its columns."""

    table: pa.Table
    label: str
    weight: str | None = None
    classes: Array | None = None  # of a classifier: the different labels, in order

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
        return Rows(table, other.label, other.weight, self.classes)


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


def classified(table: pa.Table, y: Any, weight: Any, place: str, what: str, classes: Array | None = None) -> Rows:
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
    return weighted(Rows(table, label, classes=found if classes is None else classes), weight, place)


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
        return Rows(rows.table, rows.label, weight, rows.classes)
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
    return Rows(table, rows.label, name, rows.classes)
