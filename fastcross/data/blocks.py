"""Arrow columns to the arrays of a block: numbers as they are, categories as codes into the block's dictionaries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fastcross.data.columns import Columns
from fastcross.data.errors import BadRow
from fastcross.data.split import TIME
from fastcross.data.vocabulary import hash_strings

Array = npt.NDArray[Any]
WEEKDAYS = pa.array(["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"])


@dataclass(frozen=True)
class Coded:
    """A column of categories, one or several per row: values[i] is dictionary[codes[i]]."""

    codes: Array  # (n,) int32; n is the number of rows, or of all values of a bag
    dictionary: pa.Array  # strings, not necessarily distinct; a null entry stands for a missing value
    counts: Array | None = None  # bags: (rows,) int32, values per row
    weights: Array | None = None  # bags: (n,) float32


@dataclass(frozen=True)
class Block:
    """Rows as they were read, before vocabularies and statistics are known."""

    rows: int
    dense: Array  # (rows, num_dense) float64, missing = NaN, "log" applied
    label: Array | None  # (rows,) int32, the id of a class; float64, a quantity
    categorical: list[Coded]
    bags: list[Coded]
    time: Array | None = None  # (rows,) TIME, of the column that orders the rows
    carried: pa.Array | None = None  # (rows,) of the column to carry along: texts, or Parquet's own type
    weight: Array | None = None  # (rows,) float32
    group: Array | None = None  # (rows,) int64, a hash of its text
    skipped: list[int] = field(default_factory=list)  # rows that were left out, counted from 0 among all of the block


def to_block(
    table: pa.Table, columns: Columns, *, labelled: bool, trim: bool = False, carry: str | None = None
) -> Block:
    """Raises BadRow, or an Arrow error, where a row of the table does not fit the columns."""
    dense = np.empty((table.num_rows, len(columns.dense or ())))
    for i, (name, transform) in enumerate(zip(columns.dense or (), columns.transforms, strict=True)):
        x = _numbers(table[name], name)
        if not columns.integers and (np.abs(x) > np.finfo(np.float32).max).any():
            raise BadRow(f"column {name} must be finite; got {x[np.abs(x) > np.finfo(np.float32).max][0]}")
        dense[:, i] = np.copysign(np.log1p(np.abs(x)), x) if transform == "log" else x
    categorical = [_coded(as_text(table[name]), trim) for name in columns.categorical or ()]
    for name in columns.datetimes or ():
        categorical += [_coded(part, trim=False) for part in _hour_and_weekday(table[name], name)]
    return Block(
        rows=table.num_rows,
        dense=dense,
        label=_label(table[columns.label], columns) if labelled and columns.label else None,
        categorical=categorical,
        bags=[_bag(table, name, columns, trim) for name in columns.bags or ()],
        time=_time(table[columns.time], columns) if labelled and columns.time else None,
        carried=_carried(table[carry]) if carry else None,
        weight=_weight(table[columns.sample_weight], columns) if labelled and columns.sample_weight else None,
        group=_group(table[columns.group]) if labelled and columns.group else None,
    )


def _carried(column: pa.ChunkedArray) -> pa.Array:
    """In a type of its own, so that a number stays the number it is in other tables."""
    textual = pa.types.is_binary(column.type) or pa.types.is_dictionary(column.type)
    return (pc.cast(as_text(column), pa.string()) if textual else column).combine_chunks()


def _numbers(column: pa.ChunkedArray, name: str) -> Array:
    if pa.types.is_string(column.type):
        column = pc.utf8_trim_whitespace(column)
    try:
        return pc.cast(column, pa.float64(), safe=False).to_numpy()
    except pa.ArrowInvalid:
        value = next((value.as_py() for value in column if value.is_valid), None)
        raise BadRow(f"column {name} must be a number; got {value!r}") from None


def _weight(column: pa.ChunkedArray, columns: Columns) -> Array:
    assert columns.sample_weight is not None
    weight = _numbers(column, columns.sample_weight)
    wrong = ~((weight >= 0) & (weight <= np.finfo(np.float32).max))
    if wrong.any():
        found = weight[wrong][0]
        shown = "nothing" if np.isnan(found) else f"{found:g}"
        raise BadRow(f"the weight (column {columns.sample_weight}) must be finite and at least 0; got {shown}")
    return weight.astype(np.float32)


def _group(column: pa.ChunkedArray) -> Array:
    coded = _coded(as_text(column), trim=True)
    return hash_strings(coded.dictionary).view(np.int64)[coded.codes]


def _label(column: pa.ChunkedArray, columns: Columns) -> Array:
    if columns.is_regression:
        assert columns.label is not None
        quantity = _numbers(column, columns.label)
        if not np.isfinite(quantity).all():
            wrong = quantity[~np.isfinite(quantity)][0]
            shown = "nothing" if np.isnan(wrong) else f"{wrong:g}"
            raise BadRow(f"the label (column {columns.label}) must be a finite number; got {shown}")
        return np.array(quantity, np.float64)  # a copy: Arrow's own memory is read-only
    assert columns.classes is not None
    coded = _coded(as_text(column), trim=True)
    ids = {name: i for i, name in enumerate(columns.classes)}
    ids |= {spelling: ids[name] for spelling, name in columns.aliases.items()}
    numbers = {float(name): i for name, i in ids.items() if is_number(name)}
    lookup = np.zeros(len(coded.dictionary), np.int32)
    for i, value in enumerate(coded.dictionary.to_pylist()):
        found = ids.get(value) if value is not None else None
        if found is None and value is not None and is_number(value):
            found = numbers.get(float(value))  # "1.0" or "1.000e+00" where a class is called "1"
        if found is None:
            allowed = " or ".join(columns.classes) if len(ids) < 20 else f"one of {len(ids)} classes"
            raise BadRow(f"the label (column {columns.label}) must be {allowed}; got {value if value else 'nothing'}")
        lookup[i] = found
    return lookup[coded.codes]


def _coded(column: pa.ChunkedArray, trim: bool) -> Coded:
    encoded = column.dictionary_encode(null_encoding="encode").combine_chunks()
    values = pc.cast(encoded.dictionary, pa.string())  # checks that bytes are UTF-8, once for each distinct value
    values = pc.utf8_trim_whitespace(values) if trim else values
    return Coded(encoded.indices.to_numpy(zero_copy_only=False).astype(np.int32, copy=False), values)


def _bag(table: pa.Table, name: str, columns: Columns, trim: bool) -> Coded:
    lists = _lists(table[name], columns.separator_of(name))
    counts = pc.fill_null(pc.list_value_length(lists), 0).to_numpy().astype(np.int32)
    coded = _coded(as_text(pc.list_flatten(lists)), trim)
    weights = None
    if name in columns.weights:
        raw = _lists(table[columns.weights[name]], columns.separator_of(name))
        if not np.array_equal(pc.fill_null(pc.list_value_length(raw), 0).to_numpy(), counts):
            raise BadRow(f"column {columns.weights[name]} must have a weight for each value of column {name}")
        weights = pc.cast(pc.list_flatten(raw), pa.float32()).to_numpy()
        if not np.isfinite(weights).all():
            raise BadRow(f"column {columns.weights[name]} must be finite")
    return Coded(coded.codes, coded.dictionary, counts, weights)


def _lists(column: pa.ChunkedArray, separator: str) -> pa.ChunkedArray:
    """A list column as it is; text split at the separator."""
    if pa.types.is_fixed_size_list(column.type):
        return pc.cast(column, pa.list_(column.type.value_type))
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        return column
    return pc.split_pattern(as_text(column), separator)


def _hour_and_weekday(column: pa.ChunkedArray, name: str) -> Iterator[pa.ChunkedArray]:
    moment = _moments(column, name)
    yield pc.cast(pc.hour(moment), pa.string())
    yield pc.take(WEEKDAYS, pc.day_of_week(moment))


def _time(column: pa.ChunkedArray, columns: Columns) -> Array:
    assert columns.time is not None
    if pa.types.is_timestamp(column.type):
        with suppress(pa.ArrowInvalid):  # years that nanoseconds do not reach
            column = pc.cast(pc.cast(column, pa.timestamp("ns")), pa.int64())
    if columns.time_as == "datetime" and not pa.types.is_integer(column.type):
        column = pc.multiply_checked(pc.cast(_moments(column, columns.time), pa.int64()), 1000)
    time = np.zeros(len(column), TIME)
    time["rounded"] = _numbers(column, columns.time)
    if np.isnan(time["rounded"]).any():
        raise BadRow(f"the time (column {columns.time}) must be given; got nothing")
    with suppress(pa.ArrowInvalid):  # what is no whole number is as exact as it will be
        whole = pc.cast(as_text(column) if pa.types.is_binary(column.type) else column, pa.int64()).to_numpy()
        near = np.abs(time["rounded"]) < 2.0**62
        time["rest"][near] = whole[near] - time["rounded"][near].astype(np.int64)
    return time


def _moments(column: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    """Microseconds since 1970 in UTC: of a date, a date-time, a text in the manner of ISO 8601, or Unix times."""
    if pa.types.is_temporal(column.type):
        return pc.cast(column, pa.timestamp("us"), safe=False)
    first = next((value.as_py() for value in column if value.is_valid), "")
    if isinstance(first, int | float) or is_number(first):
        numbers = _numbers(column, name)
        missing = np.isnan(numbers)
        units = unix_units(numbers)
        with np.errstate(invalid="ignore"):
            return pa.chunked_array([pa.array((numbers / units * 1e6).astype("datetime64[us]"), mask=missing)])
    for kind in (pa.timestamp("us"), pa.timestamp("us", "UTC")):  # only the second takes texts that name a zone
        with suppress(pa.ArrowInvalid):
            return pc.cast(pc.cast(pc.utf8_trim_whitespace(as_text(column)), kind), pa.timestamp("us"), safe=False)
    raise BadRow(f"column {name} must be a date or a date-time as in 2024-01-31 12:30:00; got {first!r}")


def unix_units(numbers: Array) -> Array:
    """How many of its units make a second, for each Unix time: 1 for seconds, 1,000 for milliseconds, ….

    The ranges of a century in seconds, milliseconds, … do not overlap."""
    return 1000.0 ** np.clip(np.floor((np.log10(np.maximum(np.abs(numbers), 1)) - 8) / 3), 0, 3)


def as_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Strings, or bytes that are checked to be strings later."""
    if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
        return column
    if pa.types.is_dictionary(column.type):
        column = pc.cast(column, column.type.value_type)
    return pc.cast(column, pa.string())


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
