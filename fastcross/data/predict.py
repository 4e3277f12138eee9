"""Rows to predict: read with the vocabularies and statistics of a cache, labels absent or ignored unless asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from os import PathLike

import numpy as np
import torch

from fastcross.batch import Bag, Batch
from fastcross.data.build import read_in_order
from fastcross.data.cache import Cache
from fastcross.data.columns import Columns
from fastcross.data.convert import Block, Coded
from fastcross.data.encode import Encoder, Standardisation
from fastcross.data.errors import DataError, Problems
from fastcross.data.sources import Source, open_for_prediction, resolve_paths
from fastcross.data.table import TextTable
from fastcross.data.vocabulary import Hashing, Vocabulary


def read_for_prediction(
    source: Source,
    cache: Cache | str | PathLike[str],
    *,
    batch_size: int = 4096,
    on_error: str = "stop",
    labelled: bool = False,
) -> PredictionRows:
    """Batches of the rows of `source`, in the format the cache was made from, with labels if `labelled`."""
    cache = cache if isinstance(cache, Cache) else Cache.open(cache)
    return PredictionRows(source, cache, batch_size, on_error, labelled)


class PredictionRows:
    """Iterates over batches of at most batch_size rows; afterwards `rows`, `unknown` and `problems` say what was met.

    unknown: per column, how many values were not in the vocabulary and became id 0; problems: the rows that were
    skipped (on_error="skip"), with their lines, so that predictions can be matched with the file.
    """

    def __init__(self, source: Source, cache: Cache, batch_size: int, on_error: str, labelled: bool = False) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1; got {batch_size}")
        manifest = cache.manifest
        self.paths, self.batch_size, self.labelled = resolve_paths(source), batch_size, labelled
        self.columns = Columns.make(manifest["columns"])
        self.format: str = manifest["configuration"]["format"]
        self.standardise = Standardisation(*(np.array(manifest["standardisation"][k]) for k in ("mean", "scale")))
        buckets = manifest["configuration"]["hash_buckets"]
        self.encoders: dict[str, Encoder] = {}
        for kind, names in (("categorical", cache.schema.categorical_names), ("bag", cache.schema.bag_names)):
            for i, name in enumerate(names):
                saved = cache.path / "vocabulary" / f"{kind}{i}.arrow"
                self.encoders[name] = Hashing(buckets) if buckets else Vocabulary.load(saved)
        self._reset(on_error)

    def _reset(self, on_error: str) -> None:
        self.rows = 0
        self.unknown = dict.fromkeys(self.encoders, 0)
        self.problems = Problems(on_error)

    def __iter__(self) -> Iterator[Batch]:
        self._reset(self.problems.on_error)
        for path in self.paths:
            before = self.rows
            table = replace(open_for_prediction(path, self.format, self.columns), labelled=self.labelled)
            if self.labelled and isinstance(table, TextTable) and self.columns.label not in table.dialect.names:
                raise DataError(f"{path}: no column {self.columns.label}, which holds the label")
            for block, _ in read_in_order(table, path, self.problems):
                self.rows += block.rows
                yield from self._batches(block)
            if self.rows == before:
                raise DataError(f"{path}: no rows" + (f"; {self.problems}" if self.problems else ""))

    def _batches(self, block: Block) -> Iterator[Batch]:
        dense = torch.from_numpy(self.standardise(block.dense))
        ids = [
            self._ids(name, coded)
            for name, coded in zip(self.columns.categorical or (), block.categorical, strict=True)
        ]
        categorical = torch.stack(ids, dim=1) if ids else torch.empty((block.rows, 0), dtype=torch.int64)
        bags = [(self._ids(n, coded), coded) for n, coded in zip(self.columns.bags or (), block.bags, strict=True)]
        kind = torch.float32 if self.columns.num_outputs == 1 else torch.int64
        label = None if block.label is None else torch.from_numpy(block.label).to(kind)
        for lo in range(0, block.rows, self.batch_size):
            rows = slice(lo, min(lo + self.batch_size, block.rows))
            chosen = tuple(_slice(values, coded, rows) for values, coded in bags)
            yield Batch(dense[rows], categorical[rows], chosen, None if label is None else label[rows])

    def _ids(self, name: str, coded: Coded) -> torch.Tensor:
        ids = self.encoders[name].ids(coded.dictionary)
        if isinstance(self.encoders[name], Vocabulary):
            unknown = (ids == 0) & coded.dictionary.is_valid().to_numpy(zero_copy_only=False)
            self.unknown[name] += int(unknown[coded.codes].sum())
        return torch.from_numpy(ids[coded.codes].astype(np.int64))


def _slice(values: torch.Tensor, coded: Coded, rows: slice) -> Bag:
    assert coded.counts is not None
    bounds = np.concatenate([[0], np.cumsum(coded.counts, dtype=np.int64)])
    chosen = slice(bounds[rows.start], bounds[rows.stop])
    weights = None if coded.weights is None else torch.from_numpy(np.array(coded.weights[chosen]))
    return Bag(values[chosen], torch.from_numpy(bounds[rows] - bounds[rows.start]), weights)
