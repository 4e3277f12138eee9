"""The second half of `prepare`: spooled blocks to the arrays of the three parts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fastcross.data.arrays import ArrayWriter
from fastcross.data.split import PARTS
from fastcross.data.spool import CodedFiles, Spool
from fastcross.data.vocabulary import MERGE_AT, Hashing, Vocabulary, count_values

Array = npt.NDArray[Any]
Encoder = Vocabulary | Hashing


@dataclass(frozen=True)
class Standardisation:
    """x -> (x - mean) · scale, per dense column; mean 0 and scale 1 for columns that are not standardised."""

    mean: Array
    scale: Array

    def __call__(self, dense: Array) -> Array:
        return np.nan_to_num((dense - self.mean) * self.scale, nan=0.0).astype(np.float32)

    @classmethod
    def fit(cls, spool: Spool, part: Array) -> Standardisation:
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
        return cls(np.where(standard, mean, 0.0), np.where(standard, scale, 1.0))


def fit_encoders(
    spool: Spool, part: Array, min_frequency: int, hash_buckets: int | None
) -> tuple[list[Encoder], list[Encoder]]:
    """The vocabularies of the categorical columns and of the bags; leaves each block's code -> id map in the spool."""

    train = [part[rows] == 0 for _, rows in spool.blocks()]

    def counted(files: CodedFiles, training_codes: Callable[[int], Array]) -> Iterator[tuple[pa.Array, Array]]:
        for i, dictionary in enumerate(files.dictionaries()):
            yield dictionary, np.bincount(training_codes(i), minlength=len(dictionary))

    def fit(files: CodedFiles, training_codes: Callable[[int], Array]) -> Encoder:
        encoder: Encoder = (
            Hashing(hash_buckets) if hash_buckets else count_values(counted(files, training_codes), min_frequency)
        )
        _write_maps(files, encoder)
        return encoder

    def fit_categorical(column: int) -> Encoder:
        return fit(spool.categorical[column], lambda i: spool.column_codes(column, i)[train[i]])

    def fit_bag(column: int) -> Encoder:
        return fit(
            spool.bags[column],
            lambda i: spool.bag(column, i, "codes")[np.repeat(train[i], spool.bag(column, i, "counts"))],
        )

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        categorical = pool.map(fit_categorical, range(len(spool.categorical)))
        bags = pool.map(fit_bag, range(len(spool.bags)))
        return list(categorical), list(bags)


def write_parts(
    spool: Spool, part: Array, standardise: Standardisation, folder: Path, progress: Callable[[str, int, int], None]
) -> None:
    """Encode every block and append its rows to their parts."""
    columns, sizes = spool.columns, np.bincount(part, minlength=len(PARTS))
    values = [_values_per_part(spool, part, c) for c in range(len(spool.bags))]
    with ExitStack() as stack:
        writers: list[dict[str, ArrayWriter]] = []
        for p, name in enumerate(PARTS):
            (folder / name).mkdir()
            n = int(sizes[p])
            shapes: dict[str, tuple[tuple[int, ...], Any]] = {
                "dense": ((n, len(columns.dense or ())), np.float32),
                "categorical": ((n, len(spool.categorical)), np.int32),
                "label": ((n,), np.uint8 if len(columns.classes) <= 256 else np.int32),
            }
            for c, bag in enumerate(columns.bags or ()):
                shapes[f"bag{c}.values"] = ((int(values[c][p]),), np.int32)
                shapes[f"bag{c}.bounds"] = ((n + 1,), np.int64)
                if bag in columns.weights:
                    shapes[f"bag{c}.weights"] = ((int(values[c][p]),), np.float32)
            writers.append({f: ArrayWriter(folder / name / f"{f}.npy", s, d) for f, (s, d) in shapes.items()})
        for writer in (w for part_writers in writers for w in part_writers.values()):
            stack.callback(writer.close)
        totals = np.zeros((len(spool.bags), len(PARTS)), np.int64)
        for part_writers in writers:
            for c in range(len(spool.bags)):
                part_writers[f"bag{c}.bounds"].append(np.zeros(1, np.int64))
        maps = [stack.enter_context(open(files.folder / "map", "rb")) for files in (*spool.categorical, *spool.bags)]
        for i, rows in spool.blocks():
            categorical = np.empty((spool.rows[i], len(spool.categorical)), np.int32)
            for c, codes in enumerate(spool.codes(i)):
                categorical[:, c] = _read_map(maps[c], spool.categorical[c].dictionary_sizes[i])[codes]
            block = {"dense": standardise(spool.dense(i)), "categorical": categorical, "label": spool.label(i)}
            for p in range(len(PARTS)):
                chosen = part[rows] == p
                for name, array in block.items():
                    writers[p][name].append(array if chosen.all() else array[chosen])
            for c in range(len(spool.bags)):
                ids = _read_map(maps[len(spool.categorical) + c], spool.bags[c].dictionary_sizes[i])
                counts, values_of = spool.bag(c, i, "counts"), ids[spool.bag(c, i, "codes")]
                weights = spool.bag(c, i, "weights") if "weights" in spool.bags[c].files else None
                for p in range(len(PARTS)):
                    chosen = part[rows] == p
                    each = np.repeat(chosen, counts)
                    writers[p][f"bag{c}.values"].append(values_of[each])
                    if weights is not None:
                        writers[p][f"bag{c}.weights"].append(weights[each])
                    bounds = totals[c, p] + np.cumsum(counts[chosen], dtype=np.int64)
                    writers[p][f"bag{c}.bounds"].append(bounds)
                    totals[c, p] += int(each.sum())
            progress("write", rows.stop, len(part))
        for writer in (w for part_writers in writers for w in part_writers.values()):
            assert writer.rows == writer.shape[0], (writer.rows, writer.shape)


def _write_maps(files: CodedFiles, encoder: Encoder) -> None:
    """The ids of all dictionaries in the order of the blocks, looked up many blocks at a time."""
    with open(files.folder / "map", "wb") as file:
        waiting: list[pa.Array] = []

        def flush() -> None:
            if waiting:
                file.write(encoder.ids(pa.concat_arrays(waiting)).data)
                waiting.clear()

        for dictionary in files.dictionaries():
            waiting.append(dictionary)
            if sum(map(len, waiting)) > MERGE_AT:
                flush()
        flush()


def _read_map(file: IO[bytes], size: int) -> Array:
    return np.frombuffer(file.read(4 * size), np.int32)


def _values_per_part(spool: Spool, part: Array, column: int) -> Array:
    totals = np.zeros(len(PARTS), np.int64)
    for i, rows in spool.blocks():
        totals += np.bincount(part[rows], spool.bag(column, i, "counts"), len(PARTS)).astype(np.int64)
    return totals
