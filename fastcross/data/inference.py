"""From a sample of rows to columns, with a reason for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import pyarrow as pa

from fastcross.data.columns import Columns
from fastcross.data.errors import DataError
from fastcross.data.kinds import NUMBER, Kind, Values, judge
from fastcross.data.labels import settle

LABEL_NAMES = ("label", "click", "clicked", "target", "y")
NAMES_OF_KINDS = {"bags": "multi-valued", "datetimes": "date-time", "drop": "dropped"}


@dataclass(frozen=True)
class Sample:
    """Rows from all over a file: text columns as strings, those of Parquet in their own types."""

    place: str
    table: pa.Table
    whole: bool  # all rows are in it
    unit: str  # what a place in the file is counted in: "line" or "row"
    find: Callable[[str, str], int | None]  # column, value -> the first place that has it
    where: str  # in words, for the report


@dataclass(frozen=True)
class Finding:
    """What a column was taken for, and why; a warning where few values decided."""

    column: str
    kind: str
    why: str
    warning: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def complete(columns: Columns, sample: Sample) -> tuple[Columns, tuple[Finding, ...]]:
    """Fill in what is not declared, and check that what is declared exists and can be read."""
    names = sample.table.column_names
    label = columns.label or next((name for name in names if name.lower() in LABEL_NAMES), None)
    if label is None:
        raise DataError(f"{sample.place}: name the label column; the columns are {', '.join(names)}")
    if label in columns.drop or label == columns.time:
        how = "dropped" if label in columns.drop else "the time"
        raise DataError(f"{sample.place}: the column {label} is the label, and cannot be {how}; name another label")
    others = [name for name in (columns.time, columns.sample_weight, columns.group) if name]
    absent = {label, *columns.inputs, *columns.weights.values(), *columns.drop, *others} - set(names)
    if absent:
        raise DataError(f"{sample.place}: no column {', '.join(sorted(absent))}; the columns are {', '.join(names)}")
    declared = {name: kind for kind in ("dense", "categorical", "bags", "datetimes") for name in _named(columns, kind)}
    declared |= dict.fromkeys(columns.weights, "bags") | dict.fromkeys(columns.drop, "drop")
    infer = columns.infer_rest or not any(getattr(columns, k) is not None for k in ("dense", "categorical", "bags"))
    kinds: dict[str, Kind] = {}
    for name in names:
        if name in (label, columns.sample_weight) or name in columns.weights.values():
            continue
        kind = judge(name, sample.table[name]) if infer or name in columns.inputs else Kind("drop", "not declared")
        if name in declared:
            _check_readable(sample, name, kind, declared[name])
            kind = Kind(declared[name], "declared")
        elif kind.name == "":
            raise DataError(_unreadable(sample, name, kind))
        elif name == columns.time and kind.name != "datetimes":
            kind = Kind("drop", "orders the rows; later ones would lie outside what was trained on")
        kinds[name] = kind
    completed = _with_kinds(columns, kinds, label)
    if columns.time:
        completed = replace(completed, time_as=_time_as(sample, columns.time))
    findings = [_finding(sample, name, kind) for name, kind in kinds.items()]
    if pa.types.is_nested(kind_of_label := sample.table[label].type):
        raise DataError(
            f"{sample.place}: the label (column {label}) must hold one value; it is of type {kind_of_label}"
        )
    if columns.sample_weight:
        findings.append(Finding(columns.sample_weight, "weight", "how much each row counts; no feature"))
    if completed.classes is None and not completed.is_regression:
        settled = settle(Values.of(sample.table[label]), label, whole=sample.whole, task=columns.task)
        completed = settled.of(completed) if settled else completed
    if len(completed.transforms) != len(completed.dense or ()):
        raise DataError(
            f"transform must be one name or one per dense column; got {len(completed.transforms)} for "
            f"{len(completed.dense or ())} columns"
        )
    if not completed.features:
        raise DataError(f"{sample.place}: no feature columns beside the label {label}")
    return completed, tuple(findings)


def _named(columns: Columns, kind: str) -> tuple[str, ...]:
    return getattr(columns, kind) or ()


def _with_kinds(columns: Columns, kinds: dict[str, Kind], label: str) -> Columns:
    """Declared columns keep the order in which they were declared; inferred ones follow in that of the file."""

    def named(wanted: str) -> tuple[str, ...]:
        declared = _named(columns, wanted)
        return (*declared, *(n for n, kind in kinds.items() if kind.name == wanted and n not in declared))

    inferred = {n: k.separator for n, k in kinds.items() if k.name == "bags" and k.separator != columns.separator}
    return replace(
        columns,
        label=label,
        dense=named("dense"),
        categorical=named("categorical"),
        bags=named("bags"),
        datetimes=named("datetimes"),
        separators=inferred | columns.separators,
        drop=(),
        infer_rest=False,
    )


def _finding(sample: Sample, name: str, kind: Kind) -> Finding:
    warning = ""
    if kind.stray is not None:
        place = sample.find(name, kind.stray)
        where = f", first in {sample.unit} {place}" if place else ""
        if kind.strays:
            others = "date-times" if kind.name == "datetimes" else "numbers"
            count = f"{kind.strays:,} of {len(sample.table):,} values are no {others}, such as"
        else:
            count = f"{kind.why}:"
        warning = f"{count} {kind.stray!r}{where}"
    return Finding(name, NAMES_OF_KINDS.get(kind.name, kind.name), kind.why, warning)


def _time_as(sample: Sample, time: str) -> str:
    column = sample.table[time]
    if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
        return "datetime"
    kind = judge(time, column)
    if kind.name == "datetimes":
        return "datetime"
    numbers, _ = Values.of(column).share(NUMBER)
    if numbers < 0.99:
        value = Values.of(column).texts[0].as_py()
        raise DataError(
            f"{sample.place}: the time (column {time}) must hold numbers or date-times such as 2024-01-31 12:30:00; "
            f"got {value!r}"
        )
    return "number"


def _check_readable(sample: Sample, name: str, kind: Kind, wanted: str) -> None:
    if kind.name == "" and wanted != "drop":
        raise DataError(_unreadable(sample, name, kind))


def _unreadable(sample: Sample, name: str, kind: Kind) -> str:
    return f"{sample.place}: column {name} is {kind.why}, which is no feature; flatten it into columns, or drop it"
