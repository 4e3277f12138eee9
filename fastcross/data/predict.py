"""Rows to predict: read with the encoder of a run or a cache, labels absent or ignored unless asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from os import PathLike
from pathlib import Path

from fastcross.batch import Bag, Batch
from fastcross.data.build import read_in_order
from fastcross.data.cache import Cache
from fastcross.data.encoder import Encoder
from fastcross.data.errors import DataError, Problems
from fastcross.data.sources import Source, open_for_prediction, resolve_paths
from fastcross.data.table import TextTable


def read_for_prediction(
    source: Source,
    encoder: Encoder | Cache | str | PathLike[str],
    *,
    batch_size: int = 4096,
    on_error: str = "stop",
    labelled: bool = False,
) -> PredictionRows:
    """Batches of the rows of `source`, in the format the encoder was fitted on, with labels if `labelled`.

    encoder: an Encoder, the folder of one, a cache, or the folder of one.
    """
    if not isinstance(encoder, Encoder | Cache):
        path = Path(encoder)
        encoder = Cache.open(path) if (path / "manifest.json").exists() else Encoder.load(path)
    return PredictionRows(
        source, encoder.encoder if isinstance(encoder, Cache) else encoder, batch_size, on_error, labelled
    )


class PredictionRows:
    """Iterates over batches of at most batch_size rows; afterwards `rows`, `unknown` and `problems` say what was met.

    unknown: per column, how many values were not in the vocabulary and became id 0; problems: the rows that were
    skipped (on_error="skip"), with their lines, so that predictions can be matched with the file.
    """

    def __init__(self, source: Source, encoder: Encoder, batch_size: int, on_error: str, labelled: bool) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1; got {batch_size}")
        self.paths, self.encoder, self.batch_size, self.labelled = resolve_paths(source), encoder, batch_size, labelled
        self._reset(on_error)

    def _reset(self, on_error: str) -> None:
        self.rows = 0
        schema = self.encoder.schema
        self.unknown = dict.fromkeys((*schema.categorical_names, *schema.bag_names), 0)
        self.problems = Problems(on_error)

    def __iter__(self) -> Iterator[Batch]:
        self._reset(self.problems.on_error)
        columns = self.encoder.columns
        for path in self.paths:
            before = self.rows
            table = replace(open_for_prediction(path, self.encoder.format, columns), labelled=self.labelled)
            if self.labelled and isinstance(table, TextTable) and columns.label not in table.dialect.names:
                raise DataError(f"{path}: no column {columns.label}, which holds the label")
            for block, _ in read_in_order(table, path, self.problems):
                self.rows += block.rows
                batch, unknown = self.encoder.encode(block)
                for name, count in unknown.items():
                    self.unknown[name] += count
                for lo in range(0, block.rows, self.batch_size):
                    yield _slice(batch, lo, min(lo + self.batch_size, block.rows))
            if self.rows == before:
                raise DataError(f"{path}: no rows" + (f"; {self.problems}" if self.problems else ""))


def _slice(batch: Batch, lo: int, hi: int) -> Batch:
    """Rows lo ... hi - 1."""
    bags = []
    for bag in batch.bags:
        first = int(bag.offsets[lo])
        values = slice(first, int(bag.offsets[hi]) if hi < len(batch) else len(bag.values))
        weights = None if bag.weights is None else bag.weights[values]
        bags.append(Bag(bag.values[values], bag.offsets[lo:hi] - first, weights))
    label = None if batch.label is None else batch.label[lo:hi]
    return Batch(batch.dense[lo:hi], batch.categorical[lo:hi], tuple(bags), label)
