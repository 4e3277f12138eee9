"""Which column of a table is what, and how a text file spells it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fastcross.data.errors import DataError

TRANSFORMS = ("log", "standard", "none")
LABEL_NAMES = ("label", "click", "target", "y")
FEW_VALUES = 20  # an integer column with no more distinct values than this, each seen ten times, counts as categorical


@dataclass(frozen=True)
class Columns:
    """The columns of a table. What is None is inferred from the first rows; a column that is named nowhere is not read.

    Dense columns are transformed by `transform`, one name for all or one per column:
    - "log": sign(x) · log(1 + |x|), the log transform of section 4.2, extended oddly to negative numbers;
    - "standard": (x - mean) / standard deviation over the training part (a constant column becomes 0);
    - "none": as it is.
    A missing number becomes 0 after the transform. A missing category is a value like any other, with its own id.
    """

    label: str | None = None
    dense: tuple[str, ...] | None = None
    categorical: tuple[str, ...] | None = None
    bags: tuple[str, ...] | None = None  # multi-valued: list columns of Parquet, or text with `separator`
    weights: dict[str, str] = field(default_factory=dict)  # bag -> the column with its weights
    classes: tuple[str, ...] = ("0", "1")  # the label's values in the order of their ids
    aliases: dict[str, str] = field(default_factory=dict)  # other spellings of a class
    transform: str | tuple[str, ...] = "standard"
    separator: str = "|"
    integers: bool = False  # dense columns hold integers only: "1.5" is an error

    def __post_init__(self) -> None:
        for name in ("dense", "categorical", "bags"):
            if isinstance(getattr(self, name), str):
                raise DataError(f"{name} must be a list of column names; got {getattr(self, name)!r}")
        for transform in (self.transform,) if isinstance(self.transform, str) else self.transform:
            if transform not in TRANSFORMS:
                raise DataError(f"transform must be one of {', '.join(TRANSFORMS)}; got {transform!r}")
        if len(self.classes) < 2:
            raise DataError(f"classes must name at least two values of the label; got {list(self.classes)}")
        named = [*((self.label,) if self.label else ()), *self.features, *self.weights.values()]
        twice = {name for name in named if named.count(name) > 1}
        if twice:
            raise DataError(f"columns are declared twice: {', '.join(sorted(twice))}")

    @property
    def features(self) -> tuple[str, ...]:
        return (*(self.dense or ()), *(self.categorical or ()), *(self.bags or ()))

    @property
    def transforms(self) -> tuple[str, ...]:
        """One per dense column."""
        return (self.transform,) * len(self.dense or ()) if isinstance(self.transform, str) else self.transform

    @property
    def num_outputs(self) -> int:
        return 1 if len(self.classes) == 2 else len(self.classes)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def make(cls, columns: Columns | str | dict[str, Any] | None) -> Columns:
        """From Columns, the label's name, a dict (as read from JSON), or nothing."""
        if columns is None or isinstance(columns, str):
            return cls(label=columns)
        if isinstance(columns, Columns):
            return columns
        unknown = set(columns) - {f.name for f in fields(cls)}
        if unknown:
            raise DataError(f"unknown key in columns: {', '.join(sorted(unknown))}")
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in columns.items()}
        return cls(**values)

    def complete(self, sample: pa.Table, place: str) -> Columns:
        """Fill in what is None from the table's first rows; check that what is declared exists."""
        names = sample.column_names
        label = self.label or next((name for name in names if name.lower() in LABEL_NAMES), None)
        if label is None:
            raise DataError(f"{place}: name the label column; the columns are {', '.join(names)}")
        absent = {label, *self.features, *self.weights.values()} - set(names)
        if absent:
            raise DataError(f"{place}: no column {', '.join(sorted(absent))}; the columns are {', '.join(names)}")
        if self.dense is not None or self.categorical is not None or self.bags is not None:
            declared = replace(self, label=label, dense=self.dense or (), categorical=self.categorical or ())
            declared = replace(declared, bags=self.bags or ())
        else:
            taken = {label, *self.weights.values(), *self.weights}
            kinds = {name: _kind(sample[name]) for name in names if name not in taken}
            dense, categorical, bags = (
                tuple(name for name, kind in kinds.items() if kind == wanted)
                for wanted in ("dense", "categorical", "bags")
            )
            declared = replace(self, label=label, dense=dense, categorical=categorical, bags=(*bags, *self.weights))
        if len(declared.transforms) != len(declared.dense or ()):
            raise DataError(
                f"transform must be one name or one per dense column; got {len(declared.transforms)} for "
                f"{len(declared.dense or ())} columns"
            )
        if not declared.features:
            raise DataError(f"{place}: no feature columns beside the label {label}")
        return declared


@dataclass(frozen=True)
class Dialect:
    """How a text table is written."""

    names: tuple[str, ...]
    delimiter: str = ","
    quote: str | None = '"'
    missing: tuple[str, ...] = ("",)
    trim: bool = False  # blanks around a value do not count
    first_line: str = ""  # a first line that starts so is not data: a header, a comment
    first_line_required: bool = False


def _kind(column: pa.ChunkedArray) -> str:
    """A number is dense, unless it is an integer with few distinct values; lists are bags; the rest is categorical."""
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return "bags"
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "dense"
    if pa.types.is_integer(kind):
        distinct = pc.count_distinct(column).as_py()
        return "categorical" if distinct <= FEW_VALUES and 10 * distinct <= len(column) else "dense"
    return "categorical"


def numbered(prefix: str, count: int, first: int = 1) -> tuple[str, ...]:
    return tuple(f"{prefix}{i}" for i in range(first, first + count))
