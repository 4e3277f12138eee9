"""Which column of a table is what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

TRANSFORMS = ("auto", "log", "standard", "none")
TASKS = ("auto", "classification", "regression")
CATEGORIES_OF_DATES = ("hour", "weekday", "month")  # what comes again, and has no order that a number could have
NUMBERS_OF_DATES = ("day", "year", "days")
PARTS_OF_DATES = CATEGORIES_OF_DATES + NUMBERS_OF_DATES
FIRST_PARTS = ("hour", "weekday")  # of runs that name no parts
_LISTS = ("dense", "levels", "categorical", "bags", "datetimes", "parts", "drop", "classes")
_TEXTS = ("label", "separator", "time", "time_as", "task", "sample_weight", "group")
_OPTIONAL = ("label", "time", "sample_weight", "group")
_MAPPINGS = ("weights", "aliases", "separators", "decimals", "types")


class DataWarning(UserWarning):
    """A part of the input says less to the model than it seems to; the message says which, and what to do."""


class DataError(ValueError):
    """The input cannot be used as it is; the message names the file and, where there is one, the line."""


@dataclass(frozen=True)
class Columns:
    """The columns of a table.

    If dense, categorical, bags and datetimes are all None they are inferred; otherwise a column that is named nowhere
    is inferred if `infer_rest`, and not read if not.

    Dense columns are transformed by `transform`, one name for all or one per column:
    - "log": sign(x) · log(1 + |x|), the log transform of section 4.2, extended oddly to negative numbers; standardised;
    - "standard": (x - mean) / standard deviation over the training part (a constant column becomes 0);
    - "auto": a logarithm where the column has heavy tails, standardised, both ends cut off at 8 standard deviations;
    - "none": as it is.
    All but "none" cut off what lies beyond the training part's least and largest value. A missing number becomes the
    mean (0 with "none"); if the training part has gaps, a further feature, NAME.missing, says so. The `levels` are
    dense columns whose values are categories, too: NAME.level. A missing category is a value like any other.

    A date-time (in UTC) becomes three categories, NAME.hour, NAME.weekday and NAME.month, and three numbers: NAME.day
    (of the month), NAME.year and NAME.days. Days count from 1970 or from the first date: standardised, it is the same.
    Dates after the last of the training part are taken for that, as numbers are cut off. What has one value in the
    training part is left out, but for the weekday, which also says that a date is missing.
    """

    label: str | None = None
    dense: tuple[str, ...] | None = None
    categorical: tuple[str, ...] | None = None
    bags: tuple[str, ...] | None = None  # multi-valued: list columns of Parquet, or text with a separator
    weights: dict[str, str] = field(default_factory=dict)  # bag -> the column with its weights
    classes: tuple[str, ...] | None = None  # the label's values in the order of their ids; None: found in the data
    aliases: dict[str, str] = field(default_factory=dict)  # other spellings of a class
    transform: str | tuple[str, ...] = "auto"
    levels: tuple[str, ...] = ()
    separator: str = "|"
    integers: bool = False  # dense columns hold integers only: "1.5" is an error
    datetimes: tuple[str, ...] | None = None
    parts: tuple[str, ...] | None = None  # the features of the date-times; None: hour and weekday, as in earlier runs
    separators: dict[str, str] = field(default_factory=dict)  # bag -> its separator, where it is another one
    drop: tuple[str, ...] = ()
    infer_rest: bool = False
    time: str | None = None  # orders the rows for a split by time
    time_as: str = "number"  # or "datetime"
    task: str = "auto"  # what the label is: classes, a quantity, or whichever of them it looks like
    sample_weight: str | None = None  # how much each row counts, in the loss and in the metrics; no feature
    decimals: dict[str, str] = field(default_factory=dict)  # dense column -> the decimal mark of "$1,200" or "3,5"
    types: dict[str, str] = field(
        default_factory=dict
    )  # of categories, in a table whose columns have types of their own
    group: str | None = None  # rows of one user, query, …: AUC is measured within each; a feature all the same

    def __post_init__(self) -> None:
        for transform in (self.transform,) if isinstance(self.transform, str) else self.transform:
            if transform not in TRANSFORMS:
                raise DataError(f"transform must be one of {', '.join(TRANSFORMS)}; got {transform!r}")
        for name in _LISTS:
            value = getattr(self, name)
            if value is not None and not (isinstance(value, tuple) and all(isinstance(item, str) for item in value)):
                raise DataError(f"{name} must be a list of texts; got {value!r}")
        for name in _TEXTS:
            if not isinstance(getattr(self, name), str | (type(None) if name in _OPTIONAL else str)):
                raise DataError(f"{name} must be a text; got {getattr(self, name)!r}")
        for name in _MAPPINGS:
            value = getattr(self, name)
            if not isinstance(value, dict) or not all(isinstance(text, str) for pair in value.items() for text in pair):
                raise DataError(f"{name} must map texts to texts; got {value!r}")
        if not isinstance(self.integers, bool) or not isinstance(self.infer_rest, bool):
            raise DataError(
                f"integers and infer_rest must be true or false; got {self.integers!r}, {self.infer_rest!r}"
            )
        for name, separator in (("", self.separator), *self.separators.items()):
            if not separator:
                raise DataError(f"the separator{f' of {name}' if name else ''} must not be empty")
        if wrong := {mark for mark in self.decimals.values() if mark not in (".", ",")}:
            raise DataError(f'decimals must be "." or ","; got {min(wrong)!r}')
        if self.classes is not None and len(set(self.classes)) < max(2, len(self.classes)):
            raise DataError(f"classes must name at least two different values; got {list(self.classes)}")
        if self.task not in TASKS:
            raise DataError(f"task must be one of {', '.join(TASKS)}; got {self.task!r}")
        if self.task == "regression" and self.classes is not None:
            raise DataError(f"a label of classes is no quantity: declare task regression or {self.classes}, not both")
        only = (name for name in (self.label, self.sample_weight) if name)
        named = [*only, *self.inputs, *self.weights.values(), *self.drop]
        for names in (named, list(self.features)):
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise DataError(f"columns are declared twice: {', '.join(twice)}")

    @property
    def inputs(self) -> tuple[str, ...]:
        """The columns that features are made from."""
        return (*(self.dense or ()), *(self.categorical or ()), *(self.bags or ()), *(self.datetimes or ()))

    @property
    def categories(self) -> tuple[str, ...]:
        """The names of the categorical features: the categorical columns, the parts of the date-times, the levels."""
        parts = (f"{name}.{part}" for name, part in self.categories_of_dates)
        return (*(self.categorical or ()), *parts, *(f"{name}.level" for name in self.levels))

    @property
    def quantities(self) -> tuple[str, ...]:
        """The names of the numeric features: the dense columns, the numbers of the date-times."""
        return (*(self.dense or ()), *(f"{name}.{part}" for name, part in self.numbers_of_dates))

    @property
    def categories_of_dates(self) -> list[tuple[str, str]]:
        """The column and the part of it that each feature is."""
        return [(name, part) for name, part in self._parts() if part in CATEGORIES_OF_DATES]

    @property
    def numbers_of_dates(self) -> list[tuple[str, str]]:
        return [(name, part) for name, part in self._parts() if part in NUMBERS_OF_DATES]

    def _parts(self) -> list[tuple[str, str]]:
        parts = self.all_parts(FIRST_PARTS) if self.parts is None else self.parts
        return [(name, part) for name, _, part in (feature.rpartition(".") for feature in parts)]

    def all_parts(self, kinds: tuple[str, ...] = PARTS_OF_DATES) -> tuple[str, ...]:
        """Of every date-time; but what a column is called already is that column."""
        parts = (f"{name}.{kind}" for name in self.datetimes or () for kind in kinds)
        return tuple(part for part in parts if part not in self.inputs)

    def source_of(self, feature: str) -> str:
        """The column that a feature is made from: that of NAME.hour or NAME.missing is NAME."""
        return feature if feature in self.inputs else feature.rpartition(".")[0]

    @property
    def features(self) -> tuple[str, ...]:
        """All but the flags of missing numbers, which only the data tell."""
        return (*self.quantities, *self.categories, *(self.bags or ()))

    @property
    def transforms(self) -> tuple[str, ...]:
        """One per numeric feature."""
        dense = self.dense or ()
        of_dense = (self.transform,) * len(dense) if isinstance(self.transform, str) else self.transform
        return (*of_dense, *("auto",) * len(self.numbers_of_dates))

    @property
    def num_outputs(self) -> int:
        if self.is_regression:
            return 1
        assert self.classes is not None
        return 1 if len(self.classes) == 2 else len(self.classes)

    @property
    def is_regression(self) -> bool:
        return self.task == "regression"

    @property
    def kind_of_label(self) -> str:
        """The task of a Schema."""
        return "regression" if self.is_regression else "binary" if self.num_outputs == 1 else "multiclass"

    def read(self, labelled: bool, carry: str | None = None) -> tuple[str, ...]:
        """The columns to read; `carry` and the time only if they are not among the others."""
        beside = (self.label, self.time, self.sample_weight, self.group) if labelled else ()
        others = (*beside, carry)
        return tuple(dict.fromkeys([*self.inputs, *self.weights.values(), *(name for name in others if name)]))

    def separator_of(self, bag: str) -> str:
        return self.separators.get(bag, self.separator)

    def to_dict(self) -> dict[str, Any]:
        """As JSON; what came after caches and runs were first written is left out where it says nothing."""
        unsaid: dict[str, Any] = {
            "task": "auto",
            "sample_weight": None,
            "group": None,
            "parts": None,
            "decimals": {},
            "types": {},
            "levels": (),
        }
        return {name: value for name, value in asdict(self).items() if unsaid.get(name, ...) != value}

    @classmethod
    def declare(
        cls,
        label: str | None = None,
        *,
        dense: Iterable[str] = (),
        categorical: Iterable[str] = (),
        multi: Mapping[str, str] | None = None,
        datetimes: Iterable[str] = (),
        drop: Iterable[str] = (),
        task: str = "auto",
        sample_weight: str | None = None,
        group: str | None = None,
    ) -> Columns:
        """Say what some columns are and leave the others to be inferred; multi: multi-valued column -> separator."""
        lists = (tuple(dense), tuple(categorical), tuple(multi or ()))
        return cls(
            label,
            *lists,
            datetimes=tuple(datetimes),
            separators=dict(multi or {}),
            drop=tuple(drop),
            infer_rest=True,
            task=task,
            sample_weight=sample_weight,
            group=group,
        )

    @classmethod
    def make(cls, columns: Columns | str | dict[str, Any] | None) -> Columns:
        """From Columns, the label's name, a dict (as read from JSON), or nothing."""
        if columns is None or isinstance(columns, str):
            return cls(label=columns)
        if isinstance(columns, Columns):
            return columns
        if not isinstance(columns, dict):
            raise DataError(f"columns must be an object with keys such as label and dense; got {columns!r}")
        unknown = set(columns) - {f.name for f in fields(cls)}
        if unknown:
            raise DataError(f"unknown key in columns: {', '.join(sorted(map(str, unknown)))}")
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in columns.items()}
        try:
            return cls(**values)
        except TypeError as error:  # an unhashable or uncountable value where a text or a list belongs
            raise DataError(f"columns cannot be understood ({error}); got {columns!r}") from None


def numbered(prefix: str, count: int, first: int = 1) -> tuple[str, ...]:
    return tuple(f"{prefix}{i}" for i in range(first, first + count))
