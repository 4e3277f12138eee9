"""The columnar cache on disk: memory-mapped arrays, sliced into batches without per-row Python."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from fastcross.data.batch import Batch, Schema


class Cache:
    """A prepared data set: `Cache.open(path)` or the result of `prepare`."""

    path: Path
    schema: Schema
    sizes: dict[str, int]  # rows of "train", "validation", "test"
    fingerprint: str  # of inputs and configuration; a run stores it and passes it to open() when it resumes
    manifest: dict[str, Any]  # what made the cache

    @classmethod
    def open(cls, path: str | PathLike[str], *, fingerprint: str | None = None) -> Cache:
        """Open a cache; with `fingerprint`, raise DataError unless it is the one the cache was made with."""
        raise NotImplementedError

    def num_batches(self, part: str, batch_size: int, *, drop_last: bool = False, world_size: int = 1) -> int:
        raise NotImplementedError

    def batches(
        self,
        part: str,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        epoch: int = 0,
        start: int = 0,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> Iterator[Batch]:
        """Batches of a part from batch index `start` on; the order depends on (seed, epoch) alone."""
        raise NotImplementedError
