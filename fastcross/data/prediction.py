"""Rows to predict: read with the encoder of a run or a cache, labels absent or ignored unless asked for."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from fastcross.batch import Bag, Batch
from fastcross.data.blocks import (
    BadRow,
    Block,
    as_text,
    category_of_date,
    kind_of_type,
    level_of,
    moments_of,
    number_of_date,
)
from fastcross.data.cache import Cache
from fastcross.data.columns import DataError
from fastcross.data.encoder import Encoder, Hashing, Ids
from fastcross.data.formats.parquet import PLACES, MemoryTable
from fastcross.data.formats.reading import Problems, Source, Table, check_kind, get_format, read_in_order, resolve_paths

Array = npt.NDArray[Any]
LATEST = 2.0**63  # as a Unix time: of nanoseconds, which are 64 bits


def read_for_prediction(
    source: Source | pa.Table,
    encoder: Encoder | Cache | str | PathLike[str],
    *,
    batch_size: int = 4096,
    on_error: str = "stop",
    labelled: bool = False,
    id_column: str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> PredictionRows:
    """Batches of the rows of `source`: a table of Arrow, or files in the format the encoder was fitted on; with labels
    if `labelled`.

    encoder: an Encoder, the folder of one, a cache, or the folder of one; id_column: a column to carry along, a feature
    or not; progress: a function of (stage, done, total), in bytes of the files.
    """
    if not isinstance(encoder, Encoder | Cache):
        path = Path(encoder)
        encoder = Cache.open(path) if (path / "manifest.json").exists() else Encoder.load(path)
    encoder = encoder.encoder if isinstance(encoder, Cache) else encoder
    return PredictionRows(source, encoder, batch_size, on_error, labelled, id_column, progress)


class PredictionRows:
    """Iterates over batches of at most batch_size rows; afterwards its attributes say what was met.

    rows: how many there were; unknown: per column, how many values were not in the vocabulary and became id 0;
    warnings: columns of other types than in training, and columns with many more unknown values than there;
    problems: the bad rows that were skipped (on_error="skip"), with their lines, and files that break off;
    skipped: their numbers among all rows of the files, counted from 0 without header and blank lines; numbers: those of
    the rows that were read; ids: the values of the id column. So prediction i is that of row numbers[i], called ids[i].
    Those who use the rows as they come find all of this up to date for the batches so far, and may take arrays out of
    id_blocks, which hold the ids in order, so that they do not pile up.
    """

    def __init__(
        self,
        source: Source | pa.Table,
        encoder: Encoder,
        batch_size: int,
        on_error: str,
        labelled: bool = False,
        id_column: str | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1; got {batch_size}")
        self.table = source if isinstance(source, pa.Table) else None
        self.paths = [PLACES[0]] if isinstance(source, pa.Table) else resolve_paths(source)
        if self.table is None:
            check_kind(self.paths, encoder.format)
        self.encoder, self.batch_size = encoder, batch_size
        self.labelled, self.id_column, self.progress = labelled, id_column, progress
        self._reset(on_error)

    def _reset(self, on_error: str) -> None:
        self.rows = 0
        schema = self.encoder.schema
        self.unknown = dict.fromkeys((*schema.categorical_names, *schema.bag_names), 0)
        self.problems = Problems(on_error)
        self.skipped: list[int] = []
        self.id_blocks: list[pa.Array] = []
        self.values = dict.fromkeys(self.unknown, 0)  # of each column, known or not
        self.retyped: dict[str, tuple[str, str]] = {}

    @property
    def warnings(self) -> list[str]:
        """Of the rows so far."""
        found = [
            f"column {name} held {before} in training and holds {now} here: they are compared as texts, and what is "
            "not written alike is unknown to the model; make them of one type"
            for name, (before, now) in self.retyped.items()
        ]
        shares = {name: count / self.values[name] for name, count in self.unknown.items() if count}
        rare = {name: self.encoder.rare.get(name, 0.0) for name in shares}
        # Two standard deviations above what the training rows had, so that few rows raise no false alarm.
        many = [n for n, p in rare.items() if shares[n] > p + 0.05 + 2 * math.sqrt(p * (1 - p) / self.values[n])]
        if many:
            shown = ", ".join(f"{name} {shares[name]:.1%} (in training {rare[name]:.1%})" for name in many)
            found.append(f"values that the model does not know, or that were rare in training: {shown}")
        return found

    @property
    def numbers(self) -> npt.NDArray[np.int64]:
        """The number of each row that was read, among all rows."""
        return np.delete(np.arange(self.rows + len(self.skipped)), self.skipped)

    @property
    def ids(self) -> list[Any]:
        return [value for array in self.id_blocks for value in array.to_pylist()]

    def __iter__(self) -> Iterator[Batch]:
        self._reset(self.problems.on_error)
        sizes = [self.table.nbytes] if self.table is not None else [path.stat().st_size for path in self.paths]
        total, before = sum(sizes), 0
        for path, size in zip(self.paths, sizes, strict=True):
            rows = self.rows
            table = self._open(path)
            self._compare_types(table, path)
            for block, read_bytes in read_in_order(table, path, self.problems):
                yield from self._batches(block)
                if self.progress:
                    self.progress("predict", before + read_bytes, total)
            if self.rows == rows:
                raise DataError(f"{path}: no rows" + (f"; {self.problems}" if self.problems else ""))
            before += size

    def _open(self, path: Path) -> Table:
        columns = self.encoder.columns
        if self.table is not None:
            return MemoryTable.for_prediction(self.table, columns, self.labelled, self.id_column)
        return get_format(self.encoder.format).open_for_prediction(path, columns, self.labelled, self.id_column)

    def _compare_types(self, table: Table, path: Path) -> None:
        known = self.encoder.columns.types
        if known and (schema := table.schema(path)) is not None:
            for name, before in known.items():
                now = kind_of_type(schema.field(name).type)
                if now not in (before, None):
                    self.retyped[name] = (before, now)

    def _batches(self, block: Block) -> Iterator[Batch]:
        first = self.rows + len(self.skipped)
        self.skipped += [first + i for i in block.skipped]
        self.rows += block.rows
        if block.carried is not None:
            self.id_blocks.append(block.carried)
        batch, unknown = self.encoder.encode(block)
        for name, count in unknown.items():
            self.unknown[name] += count
        for name, coded in zip(self.unknown, (*block.categorical, *block.bags), strict=True):
            self.values[name] += len(coded.codes)
        for lo in range(0, block.rows, self.batch_size):
            yield _slice(batch, lo, min(lo + self.batch_size, block.rows))


def _slice(batch: Batch, lo: int, hi: int) -> Batch:
    """Rows lo ... hi - 1."""
    bags = []
    for bag in batch.bags:
        first = int(bag.offsets[lo])
        values = slice(first, int(bag.offsets[hi]) if hi < len(batch) else len(bag.values))
        weights = None if bag.weights is None else bag.weights[values]
        bags.append(Bag(bag.values[values], bag.offsets[lo:hi] - first, weights))
    of_rows = (None if column is None else column[lo:hi] for column in batch.beside)
    return Batch(batch.dense[lo:hi], batch.categorical[lo:hi], tuple(bags), *of_rows)


class RowEncoder:
    """Rows as Python has them, a mapping from columns to values each, for requests of a few rows.

    Its time does not grow with the vocabularies, which it keeps as dicts; the numbers and ids are those of
    :func:`read_for_prediction`. A value is a number or None (dense), a text, an integer or None (categorical), a list
    of them or a text with separators (multi-valued), a text in the manner of ISO 8601 or a Unix time (date-time). A
    text that stands for a missing value in the files of the run does so here, too. DataError names the row, from 1, and
    the column.
    """

    def __init__(self, encoder: Encoder) -> None:
        self.encoder, self.columns = encoder, encoder.columns
        self.spellings = spellings = dict.fromkeys(("", *get_format(encoder.format).missing))
        named = zip(encoder.columns.categories, encoder.categorical, strict=True)
        self.known = {name: _dict_of(ids, spellings) for name, ids in named}
        self.of_bags = [_dict_of(ids, ()) for ids in encoder.bags]
        self.names = {*self.columns.inputs, *self.columns.weights.values()}
        self.limit = np.inf if self.columns.integers else float(np.finfo(np.float32).max)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> tuple[Batch, dict[str, int]]:
        """The rows as one batch, and per column how many of its values the vocabulary does not know."""
        for i, row in enumerate(rows, 1):
            if not isinstance(row, Mapping):
                raise DataError(f"row {i} must map columns to values; got {_shown(row)}")
            for name in self.names:
                if name not in row:
                    raise DataError(f"row {i}: column {name} is missing")
        unseen: dict[str, int] = {}
        columns = [self._ids(rows, name, unseen) for name in self.columns.categorical or ()]
        moments = {name: self._moments(rows, name) for name in self.columns.datetimes or ()}
        for name, part in self.columns.categories_of_dates:
            texts = category_of_date(moments[name], part).to_pylist()
            columns.append(_looked_up(self.known[f"{name}.{part}"], texts, self.spellings))
        dense = np.empty((len(rows), len(self.columns.quantities)))
        for j, name in enumerate(self.columns.dense or ()):
            dense[:, j] = [self._number(row[name], i, name) for i, row in enumerate(rows, 1)]
        for j, (name, part) in enumerate(self.columns.numbers_of_dates, len(self.columns.dense or ())):
            dense[:, j] = number_of_date(moments[name], part)
        for name in self.columns.levels:
            texts = [level_of(x) for x in dense[:, (self.columns.dense or ()).index(name)].tolist()]
            columns.append(self._known_ids(f"{name}.level", texts, unseen))
        categorical = np.stack(columns, 1) if columns else np.empty((len(rows), 0), np.int64)
        of_bags = zip(self.columns.bags or (), self.of_bags, strict=True)
        bags = [self._bag(rows, name, known, unseen) for name, known in of_bags]
        scaled = torch.from_numpy(self.encoder.numbers(dense))
        return Batch(scaled, torch.from_numpy(categorical), tuple(bags)), unseen

    def _ids(self, rows: Sequence[Mapping[str, Any]], name: str, unseen: dict[str, int]) -> Array:
        return self._known_ids(name, [_text(row[name], i, name) for i, row in enumerate(rows, 1)], unseen)

    def _known_ids(self, name: str, texts: Sequence[str | None], unseen: dict[str, int]) -> Array:
        known = self.known[name]
        ids = _looked_up(known, texts, self.spellings)
        if not isinstance(known, Hashing):
            unseen[name] = self._count_unseen(ids, texts)
        return ids

    def _count_unseen(self, ids: Iterable[int], texts: Sequence[str | None]) -> int:
        pairs = zip(ids, texts, strict=True)
        return sum(not found and text is not None and text not in self.spellings for found, text in pairs)

    def _number(self, value: Any, i: int, name: str) -> float:
        if value is None:
            return float("nan")
        try:
            if isinstance(value, bool) or not isinstance(value, int | float | np.number):
                raise ValueError
            number = float(value)
            if (abs(number) <= self.limit and abs(number) != np.inf) or number != number:
                return number
        except (ValueError, OverflowError):
            pass
        raise DataError(f"row {i}: column {name} must be a finite number; got {_shown(value)}")

    def _moments(self, rows: Sequence[Mapping[str, Any]], name: str) -> pa.ChunkedArray:
        """Each row by itself: what a text or a number means shall not depend on its neighbours."""
        moments = []
        for i, row in enumerate(rows, 1):
            value = row[name]
            value = None if isinstance(value, str) and not value.strip() else value
            try:
                if isinstance(value, bool) or not isinstance(value, str | int | float | datetime.date | None):
                    raise BadRow
                if isinstance(value, int | float) and abs(value) > LATEST:
                    raise BadRow
                moments += moments_of(pa.chunked_array([pa.array([value], from_pandas=True)]), name).chunks
            except (BadRow, pa.ArrowException, OverflowError):
                raise DataError(
                    f"row {i}: column {name} must be a date-time as in 2024-01-31 12:30:00, or a Unix time; "
                    f"got {_shown(value)}"
                ) from None
        return pa.chunked_array(moments, pa.timestamp("us"))

    def _bag(self, rows: Sequence[Mapping[str, Any]], name: str, known: Any, unseen: dict[str, int]) -> Bag:
        weight = self.columns.weights.get(name)
        counts, texts, weights = [], [], []
        for i, row in enumerate(rows, 1):
            values = self._values(row[name], i, name)
            texts += [_text(value, i, name) for value in values]
            counts.append(len(values))
            if weight is not None:
                given = self._values(row[weight], i, weight, numbers=True)
                if len(given) != len(values):
                    raise DataError(
                        f"row {i}: column {weight} must have a weight for each of {len(values)} values of {name}; "
                        f"got {len(given)}"
                    )
                of_row = [self._number(value, i, weight) for value in given]
                if any(value != value for value in of_row):
                    raise DataError(f"row {i}: column {weight} must hold numbers; got {_shown(row[weight])}")
                weights += of_row
        ids = _looked_up(known, texts, ())
        if not isinstance(known, Hashing):
            unseen[name] = self._count_unseen(ids, texts)
        offsets = np.cumsum(counts, dtype=np.int64) - np.array(counts, np.int64)
        found = None if weight is None else torch.tensor(weights, dtype=torch.float32)
        return Bag(torch.from_numpy(ids), torch.from_numpy(offsets), found)

    def _values(self, value: Any, i: int, name: str, numbers: bool = False) -> list[Any]:
        """A row's list, which may be a text with separators."""
        if value is None or (isinstance(value, str) and value in self.spellings):
            return []
        if not isinstance(value, str):
            if not isinstance(value, list | tuple):
                raise DataError(f"row {i}: column {name} must be a list, or a text of several; got {_shown(value)}")
            return list(value)
        bag = name if not numbers else next(bag for bag, weight in self.columns.weights.items() if weight == name)
        parts = value.split(self.columns.separator_of(bag))
        if not numbers:
            return parts
        try:
            return [float(part) for part in parts]
        except ValueError:
            raise DataError(f"row {i}: column {name} must hold numbers; got {_shown(value)}") from None


def _dict_of(ids: Ids, spellings: Iterable[str]) -> Any:
    """Text -> id; None is the missing value, and so is each of its spellings that is no value itself."""
    if isinstance(ids, Hashing):
        return ids
    known = {text: i for i, text in enumerate(ids.values.to_pylist(), 1)}
    missing = known.get(None, 0)
    return known | {text: missing for text in (None, *spellings) if text not in known}


def _looked_up(known: Any, texts: Sequence[str | None], spellings: Container[str | None]) -> Array:
    if isinstance(known, Hashing):
        texts = [None if text in spellings else text for text in texts]
        return known.ids(pa.array(texts, pa.string())).astype(np.int64)
    return np.array([known.get(text, 0) for text in texts], np.int64)


def _text(value: Any, i: int, name: str) -> str | None:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:  # half of a surrogate pair, which JSON can say
            raise DataError(f"row {i}: column {name} must be a text of Unicode; got {value!a}") from None
        return value
    if value is None or (isinstance(value, float) and value != value):
        return None
    if isinstance(value, bool | int | float | np.number):
        return as_text(pa.chunked_array([[value]]))[0].as_py() if isinstance(value, bool | float) else str(value)
    raise DataError(f"row {i}: column {name} must be a text or an integer; got {_shown(value)}")


def _shown(value: Any) -> str:
    """A value as an error cites it, never the whole of a long one."""
    text = ascii(value) if not isinstance(value, list | dict) else f"{type(value).__name__} of {len(value)}"
    return text if len(text) <= 60 else f"{text[:57]}..."
