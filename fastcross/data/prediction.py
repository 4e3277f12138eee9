"""Rows to predict: read with the encoder of a run or a cache, labels absent or ignored unless asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fastcross.batch import Bag, Batch
from fastcross.data.blocks import Block, kind_of_type
from fastcross.data.cache import Cache
from fastcross.data.columns import DataError
from fastcross.data.encoder import Encoder
from fastcross.data.formats import get_format
from fastcross.data.formats.parquet import PLACES, MemoryTable, ParquetTable
from fastcross.data.formats.reading import Problems, Source, Table, check_kind, read_in_order, resolve_paths


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
        if known and isinstance(table, ParquetTable):
            schema = table.schema(path)
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
