"""Blocks of rows: Arrow columns as arrays, before vocabularies and statistics are known; and their way over the disk.

Numbers are as they are, categories are codes into the block's own dictionaries. Between the two halves of `prepare`
the blocks wait in a spool: read once, kept as codes until the vocabularies are known. There each block's codes are
stored column by column, so that a vocabulary reads its own column only, in long runs.
"""

from __future__ import annotations

import itertools
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fastcross.data.columns import Columns
from fastcross.data.spelling import to_plain

Array = npt.NDArray[Any]
Item = TypeVar("Item")
Result = TypeVar("Result")
WORKERS = min(os.cpu_count() or 1, 8)
WEEKDAYS = pa.array(["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"])
# A point in time, or any number: nanoseconds and ids of 64 bits are not all float64s.
TIME = np.dtype([("rounded", np.float64), ("rest", np.int64)])


class BadRow(Exception):
    """Somewhere among the rows being converted is a bad one; the reader narrows it down and reports the place."""


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
    dense: Array  # (rows, numeric features) float64, missing = NaN
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
    dense = np.empty((table.num_rows, len(columns.quantities)))
    for i, name in enumerate(columns.dense or ()):
        x = _numbers(table[name], name, columns.decimals.get(name))
        if not columns.integers and (np.abs(x) > np.finfo(np.float32).max).any():
            raise BadRow(f"column {name} must be finite; got {x[np.abs(x) > np.finfo(np.float32).max][0]}")
        dense[:, i] = x
    categorical = [_coded(as_text(table[name]), trim) for name in columns.categorical or ()]
    moments = {name: moments_of(table[name], name) for name in columns.datetimes or ()}
    for i, (name, part) in enumerate(columns.numbers_of_dates, len(columns.dense or ())):
        dense[:, i] = number_of_date(moments[name], part)
    for name, part in columns.categories_of_dates:
        categorical.append(_coded(category_of_date(moments[name], part), trim=False))
    categorical += [_levels(dense[:, (columns.dense or ()).index(name)]) for name in columns.levels]
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


def _numbers(column: pa.ChunkedArray, name: str, decimal_mark: str | None = None) -> Array:
    """Durations are seconds, times of the day seconds since midnight."""
    if pa.types.is_duration(column.type) or pa.types.is_time(column.type):
        return _seconds(column)
    if pa.types.is_dictionary(column.type):
        column = pc.cast(column, column.type.value_type)
    if is_text(column.type):
        column = pc.utf8_trim_whitespace(pc.cast(column, pa.string()))
    try:
        if decimal_mark and pa.types.is_string(column.type):
            column = to_plain(column, decimal_mark)
        return pc.cast(column, pa.float64(), safe=False).to_numpy()
    except pa.ArrowInvalid:
        value = next((value.as_py() for value in column if value.is_valid), None)
        raise BadRow(f"column {name} must be a number; got {value!r}") from None


def _seconds(column: pa.ChunkedArray) -> Array:
    units = pc.cast(pc.cast(column, pa.int64() if column.type.bit_width == 64 else pa.int32()), pa.float64())
    return units.to_numpy() / {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}[column.type.unit]


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


def _levels(x: Array) -> Coded:
    encoded = pa.array(x, from_pandas=True).dictionary_encode(null_encoding="encode")
    texts = pa.array(map(level_of, encoded.dictionary.to_pylist()), pa.string())
    return Coded(encoded.indices.to_numpy(zero_copy_only=False).astype(np.int32, copy=False), texts)


def level_of(number: float | None) -> str | None:
    """A number as a category: 7 for 7.0, however it was written."""
    if number is None or number != number:
        return None
    return str(int(number)) if number.is_integer() else repr(number)


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


def category_of_date(moments: pa.ChunkedArray, part: str) -> pa.ChunkedArray:
    """One of CATEGORIES_OF_DATES, as texts."""
    if part == "weekday":
        return pc.take(WEEKDAYS, pc.day_of_week(moments))
    return pc.cast({"hour": pc.hour, "month": pc.month}[part](moments), pa.string())


def number_of_date(moments: pa.ChunkedArray, part: str) -> Array:
    """One of NUMBERS_OF_DATES; NaN where missing. The days are those since 1970."""
    if part == "days":
        whole = pc.cast(pc.cast(moments, pa.date32()), pa.int32())
    else:
        whole = {"day": pc.day, "year": pc.year}[part](moments)
    return pc.cast(whole, pa.float64()).to_numpy()


def _time(column: pa.ChunkedArray, columns: Columns) -> Array:
    assert columns.time is not None
    if pa.types.is_timestamp(column.type):
        with suppress(pa.ArrowInvalid):  # years that nanoseconds do not reach
            column = pc.cast(pc.cast(column, pa.timestamp("ns")), pa.int64())
    if columns.time_as == "datetime" and not pa.types.is_integer(column.type):
        micros = pc.cast(moments_of(column, columns.time), pa.int64())
        try:
            column = pc.multiply_checked(micros, 1000)
        except pa.ArrowInvalid:  # as of the year 9999, which stands for "never": to the microsecond is exact enough
            column = pc.multiply(pc.cast(micros, pa.float64(), safe=False), 1000.0)
    time = np.zeros(len(column), TIME)
    time["rounded"] = _numbers(column, columns.time)
    if np.isnan(time["rounded"]).any():
        raise BadRow(f"the time (column {columns.time}) must be given; got nothing")
    with suppress(pa.ArrowInvalid):  # what is no whole number is as exact as it will be
        whole = pc.cast(as_text(column) if pa.types.is_binary(column.type) else column, pa.int64()).to_numpy()
        near = np.abs(time["rounded"]) < 2.0**62
        time["rest"][near] = whole[near] - time["rounded"][near].astype(np.int64)
    return time


def moments_of(column: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
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


def is_text(kind: pa.DataType) -> bool:
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(check(kind) for check in (*checks, pa.types.is_binary, pa.types.is_large_binary))


def kind_of_type(kind: pa.DataType) -> str | None:
    """In a word, of the values that a typed column holds; None for one without values."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_boolean(kind):
        return "booleans"
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "numbers"
    if is_text(kind):
        return "texts"
    if pa.types.is_nested(kind):
        return "lists"
    return None if pa.types.is_null(kind) else "dates and times"


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def hash_strings(strings: pa.Array) -> Array:
    """FNV-1a, 64 bits, of each string's UTF-8 bytes: the same on every machine and in every version."""
    strings = pc.fill_null(strings, "")
    offsets = np.frombuffer(strings.buffers()[1], np.int32)[strings.offset : strings.offset + len(strings) + 1]
    data = np.frombuffer(strings.buffers()[2] or b"", np.uint8)
    start, length = offsets[:-1].astype(np.int64), np.diff(offsets)
    h = np.full(len(strings), 0xCBF29CE484222325, np.uint64)
    left = np.arange(len(strings))  # strings that have a byte at this position
    for position in range(int(length.max(initial=0))):
        left = left[length[left] > position]
        h[left] = (h[left] ^ data[start[left] + position]) * np.uint64(0x100000001B3)
    return h ^ (h >> np.uint64(32))  # the low bits of FNV alone are poor; the modulo sees mostly those


def find_bad(parse: Callable[[int, int], Block], lo: int, hi: int, names: tuple[str, ...]) -> dict[int, str]:
    """The rows in [lo, hi) that `parse` refuses, each with the reason, found by halving."""
    if lo == hi:
        return {}
    try:
        parse(lo, hi)
        return {}
    except (pa.ArrowException, BadRow) as error:
        if hi - lo == 1:
            return {lo: _reason(error, names)}
    middle = (lo + hi) // 2
    return find_bad(parse, lo, middle, names) | find_bad(parse, middle, hi, names)


def first_sentence(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _reason(error: BaseException, names: tuple[str, ...]) -> str:
    """Arrow's message for one bad row in the words of this package."""
    text = first_sentence(error)
    if match := re.search(r"Expected (\d+) columns, got (\d+)", text):
        return f"expected {match[1]} columns, got {match[2]}"
    if "UTF8" in text or "UTF-8" in text:
        return "bytes that are not UTF-8"
    if match := re.search(r"CSV column (?:#(\d+)|'?([^':]*)'?).*conversion error to (\w+): invalid value '(.*)'", text):
        kind = "an integer" if match[3] == "int64" else "a number"
        column = match[2] or names[int(match[1])]
        return f"column {column} must be {kind}; got {match[4]!r}"
    return text


def map_in_order(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Like map(), with as many items in memory as there are threads, and one more.

    Arrow and NumPy release the interpreter's lock, so threads are enough. A single item needs none."""
    items = iter(items)
    first = list(itertools.islice(items, 2))
    if len(first) < 2:
        yield from map(function, first)
        return
    items = itertools.chain(first, items)
    running: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(WORKERS) as pool:
        try:
            for item in items:
                running.append(pool.submit(function, item))
                if len(running) > WORKERS:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            for future in running:
                future.cancel()


@dataclass
class CodedFiles:
    """The codes of one column, and the dictionary of each block."""

    folder: Path
    sizes: list[int] = field(default_factory=list)  # codes per block
    dictionary_sizes: list[int] = field(default_factory=list)
    files: dict[str, IO[bytes]] = field(default_factory=dict)
    writer: pa.ipc.RecordBatchStreamWriter | None = None

    def append(self, coded: Coded, codes_elsewhere: bool) -> None:
        if not codes_elsewhere:
            self._file("codes").write(coded.codes.data)
            assert coded.counts is not None
            self._file("counts").write(coded.counts.data)
            if coded.weights is not None:
                self._file("weights").write(np.ascontiguousarray(coded.weights).data)
        self.sizes.append(len(coded.codes))
        self.dictionary_sizes.append(len(coded.dictionary))
        batch = pa.record_batch({"value": coded.dictionary})
        if self.writer is None:
            self.writer = pa.ipc.new_stream(self._file("dictionaries"), batch.schema)
        self.writer.write_batch(batch)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        for file in self.files.values():
            file.close()
        self.starts = np.cumsum([0, *self.sizes])
        self.dictionary_starts = np.cumsum([0, *self.dictionary_sizes])

    def save_ids(self, ids: Iterable[Array]) -> None:
        """Keep the ids of all dictionary entries, block after block."""
        with open(self.folder / "ids", "wb") as file:
            for array in ids:
                file.write(np.ascontiguousarray(array, np.int32).data)

    def ids(self, block: int) -> Array:
        """The ids of a block's dictionary entries."""
        first, count = self.dictionary_starts[block], self.dictionary_sizes[block]
        return np.fromfile(self.folder / "ids", np.int32, count, offset=4 * int(first))

    def dictionaries(self) -> Iterator[pa.Array]:
        with pa.OSFile(str(self.folder / "dictionaries")) as file:
            for batch in pa.ipc.open_stream(file):
                yield batch["value"]

    def _file(self, name: str) -> IO[bytes]:
        if name not in self.files:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.files[name] = open(self.folder / name, "wb")  # noqa: SIM115 - closed by close()
        return self.files[name]


class Spool:
    def __init__(self, folder: Path, columns: Columns) -> None:
        folder.mkdir()
        self.folder, self.columns = folder, columns
        self.rows: list[int] = []  # per block
        # What is transformed later keeps its precision until then.
        self.dense_dtype = np.float32 if set(columns.transforms) == {"none"} else np.float64
        self.categorical = [CodedFiles(folder / f"categorical{i}") for i in range(len(columns.categories))]
        self.bags = [CodedFiles(folder / f"bag{i}") for i in range(len(columns.bags or ()))]
        self.label_dtype = np.float64 if columns.is_regression else np.int32
        optional = {"time": columns.time, "weight": columns.sample_weight, "group": columns.group}
        names = ("dense", "label", "codes", *(name for name, column in optional.items() if column))
        self.files = {name: open(folder / name, "wb") for name in names}  # noqa: SIM115 - closed by close()

    def append(self, block: Block) -> None:
        assert block.label is not None
        self.rows.append(block.rows)
        self.files["dense"].write(np.ascontiguousarray(block.dense, self.dense_dtype).data)
        self.files["label"].write(np.ascontiguousarray(block.label, self.label_dtype).data)
        for name in ("time", "weight", "group"):
            if (values := getattr(block, name)) is not None:
                self.files[name].write(np.ascontiguousarray(values).data)
        for coded, files in zip(block.categorical, self.categorical, strict=True):
            self.files["codes"].write(np.ascontiguousarray(coded.codes).data)
            files.append(coded, codes_elsewhere=True)
        for coded, files in zip(block.bags, self.bags, strict=True):
            files.append(coded, codes_elsewhere=False)

    def close(self) -> None:
        for file in self.files.values():
            file.close()
        for files in (*self.categorical, *self.bags):
            files.close()
        self.starts = np.concatenate([[0], np.cumsum(self.rows)]).astype(np.int64)

    def blocks(self) -> Iterator[tuple[int, slice]]:
        """Index and rows of each block."""
        for i, rows in enumerate(self.rows):
            yield i, slice(int(self.starts[i]), int(self.starts[i]) + rows)

    def dense(self, block: int) -> Array:
        width = len(self.columns.quantities)
        flat = self._read("dense", self.dense_dtype, self.starts[block] * width, self.rows[block] * width)
        return flat.reshape(self.rows[block], width)

    def label(self, block: int) -> Array:
        return self._read("label", self.label_dtype, self.starts[block], self.rows[block])

    def beside(self, block: int) -> dict[str, Array]:
        """The weights and groups, as far as there are any."""
        kinds = {"weight": np.float32, "group": np.int64}
        found = {name: kind for name, kind in kinds.items() if name in self.files}
        return {name: self._read(name, kind, self.starts[block], self.rows[block]) for name, kind in found.items()}

    def time(self) -> Array:
        """Of all rows."""
        return np.fromfile(self.folder / "time", TIME)

    def codes(self, block: int) -> Array:
        """(k, rows): the codes of all categorical columns."""
        k = len(self.categorical)
        return self._read("codes", np.int32, self.starts[block] * k, self.rows[block] * k).reshape(k, self.rows[block])

    def column_codes(self, column: int, block: int) -> Array:
        first = self.starts[block] * len(self.categorical) + column * self.rows[block]
        return self._read("codes", np.int32, first, self.rows[block])

    def bag(self, column: int, block: int, name: str) -> Array:
        """The "codes", "counts" or "weights" of a bag."""
        files = self.bags[column]
        of_values = (files.starts[block], files.sizes[block])
        first, count = (self.starts[block], self.rows[block]) if name == "counts" else of_values
        dtype = np.float32 if name == "weights" else np.int32
        return self._read(f"bag{column}/{name}", dtype, first, count)

    def _read(self, name: str, dtype: npt.DTypeLike, first: int, count: int) -> Array:
        offset = int(first) * np.dtype(dtype).itemsize
        return np.fromfile(self.folder / name, dtype, int(count), offset=offset)
