"""Fitting an encoder to the training part of what was spooled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fastcross.data.encoder import Encoder, Ids, Standardisation
from fastcross.data.errors import DataError
from fastcross.data.parallel import WORKERS
from fastcross.data.spool import CodedFiles, Spool
from fastcross.data.vocabulary import MERGE_AT, Hashing, Vocabulary, count_values

Array = npt.NDArray[Any]


def fit_standardisation(spool: Spool, part: Array) -> Standardisation:
    """Over the training part, merging the moments of the blocks (Chan et al.)."""
    standard = np.array([t == "standard" for t in spool.columns.transforms], bool)
    count, mean, squares = np.zeros(len(standard)), np.zeros(len(standard)), np.zeros(len(standard))
    for i, rows in spool.blocks() if standard.any() else ():
        x = spool.dense(i)[part[rows] == 0]
        n = (~np.isnan(x)).sum(axis=0)
        m = np.nansum(x, axis=0) / np.maximum(n, 1)
        delta, total = m - mean, np.maximum(count + n, 1)
        squares += np.nansum((x - m) ** 2, axis=0) + delta**2 * count * n / total
        mean += delta * n / total
        count += n
    deviation = np.sqrt(squares / np.maximum(count, 1))
    scale = np.divide(1.0, deviation, out=np.zeros_like(deviation), where=deviation > 0)
    return Standardisation(np.where(standard, mean, 0.0), np.where(standard, scale, 1.0))


def fit_ids(
    spool: Spool, part: Array, min_frequency: int, hash_buckets: int | None, known: Encoder | None = None
) -> tuple[tuple[Ids, ...], tuple[Ids, ...]]:
    """The ids of the categorical columns and of the bags; those of the dictionary entries go to the spool.

    Of a `known` encoder all ids stay, and the frequent values that it has not get the next ones."""
    train = [part[rows] == 0 for _, rows in spool.blocks()]

    def counted(files: CodedFiles, training_codes: Callable[[int], Array]) -> Iterator[tuple[pa.Array, Array]]:
        for i, dictionary in enumerate(files.dictionaries()):
            yield dictionary, np.bincount(training_codes(i), minlength=len(dictionary))

    def fit(files: CodedFiles, training_codes: Callable[[int], Array], old: Ids | None) -> Ids:
        counts = counted(files, training_codes)
        ids: Ids = Hashing(hash_buckets) if hash_buckets else count_values(counts, min_frequency)
        if isinstance(old, Vocabulary) and isinstance(ids, Vocabulary):
            ids = old.grown(ids)
        files.save_ids(_ids_of_all(files, ids))
        return ids

    def fit_categorical(column: int) -> Ids:
        old = known.categorical[column] if known else None
        return fit(spool.categorical[column], lambda i: spool.column_codes(column, i)[train[i]], old)

    def fit_bag(column: int) -> Ids:
        return fit(
            spool.bags[column],
            lambda i: spool.bag(column, i, "codes")[np.repeat(train[i], spool.bag(column, i, "counts"))],
            known.bags[column] if known else None,
        )

    with ThreadPoolExecutor(WORKERS) as pool:
        categorical = pool.map(fit_categorical, range(len(spool.categorical)))
        bags = pool.map(fit_bag, range(len(spool.bags)))
        return tuple(categorical), tuple(bags)


def load_to_grow(folder: str | PathLike[str]) -> Encoder:
    """The encoder in a folder; DataError where it has no vocabularies to grow."""
    encoder = Encoder.load(folder)
    for ids in (*encoder.categorical, *encoder.bags):
        if isinstance(ids, Hashing):
            raise DataError(
                f"{folder}: there is nothing to extend: values are hashed into {ids.buckets:,} buckets, "
                "which hold those that are new, too"
            )
    return encoder


def _ids_of_all(files: CodedFiles, known: Ids) -> Iterator[Array]:
    """The ids of all dictionaries in the order of the blocks, looked up many blocks at a time."""
    waiting: list[pa.Array] = []
    for dictionary in files.dictionaries():
        waiting.append(dictionary)
        if sum(map(len, waiting)) > MERGE_AT:
            yield known.ids(pa.concat_arrays(waiting))
            waiting = []
    if waiting:
        yield known.ids(pa.concat_arrays(waiting))
