"""The second half of `prepare`: spooled blocks to the arrays of the three parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fastcross.data.arrays import ArrayWriter
from fastcross.data.encoder import Ids, Standardisation
from fastcross.data.parallel import WORKERS, map_in_order
from fastcross.data.split import PARTS
from fastcross.data.spool import CodedFiles, Spool
from fastcross.data.vocabulary import MERGE_AT, Hashing, count_values

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
    spool: Spool, part: Array, min_frequency: int, hash_buckets: int | None
) -> tuple[tuple[Ids, ...], tuple[Ids, ...]]:
    """The ids of the categorical columns and of the bags; those of the dictionary entries go to the spool."""
    train = [part[rows] == 0 for _, rows in spool.blocks()]

    def counted(files: CodedFiles, training_codes: Callable[[int], Array]) -> Iterator[tuple[pa.Array, Array]]:
        for i, dictionary in enumerate(files.dictionaries()):
            yield dictionary, np.bincount(training_codes(i), minlength=len(dictionary))

    def fit(files: CodedFiles, training_codes: Callable[[int], Array]) -> Ids:
        counts = counted(files, training_codes)
        ids: Ids = Hashing(hash_buckets) if hash_buckets else count_values(counts, min_frequency)
        files.save_ids(_ids_of_all(files, ids))
        return ids

    def fit_categorical(column: int) -> Ids:
        return fit(spool.categorical[column], lambda i: spool.column_codes(column, i)[train[i]])

    def fit_bag(column: int) -> Ids:
        return fit(
            spool.bags[column],
            lambda i: spool.bag(column, i, "codes")[np.repeat(train[i], spool.bag(column, i, "counts"))],
        )

    with ThreadPoolExecutor(WORKERS) as pool:
        categorical = pool.map(fit_categorical, range(len(spool.categorical)))
        bags = pool.map(fit_bag, range(len(spool.bags)))
        return tuple(categorical), tuple(bags)


def write_parts(
    spool: Spool, part: Array, standardise: Standardisation, folder: Path, progress: Callable[[str, int, int], None]
) -> None:
    """Encode every block and append its rows to their parts."""

    def encode(block: tuple[int, slice]) -> list[dict[str, Array]]:
        i, rows = block
        categorical = np.empty((spool.rows[i], len(spool.categorical)), np.int32)
        for c, codes in enumerate(spool.codes(i)):
            categorical[:, c] = spool.categorical[c].ids(i)[codes]
        arrays = {"dense": standardise(spool.dense(i)), "categorical": categorical, "label": spool.label(i)}
        chosen = [part[rows] == p for p in range(len(PARTS))]
        encoded = [{name: a if mask.all() else a[mask] for name, a in arrays.items()} for mask in chosen]
        for c, files in enumerate(spool.bags):
            counts, values = spool.bag(c, i, "counts"), files.ids(i)[spool.bag(c, i, "codes")]
            for p, mask in enumerate(chosen):
                each = np.repeat(mask, counts)
                encoded[p][f"bag{c}.values"] = values[each]
                encoded[p][f"bag{c}.bounds"] = np.cumsum(counts[mask], dtype=np.int64)
                if "weights" in files.files:
                    encoded[p][f"bag{c}.weights"] = spool.bag(c, i, "weights")[each]
        return encoded

    with ExitStack() as stack:
        writers = [_writers(spool, part, p, folder / name, stack) for p, name in enumerate(PARTS)]
        totals = np.zeros((len(PARTS), len(spool.bags)), np.int64)
        done = 0
        for encoded in map_in_order(encode, spool.blocks()):
            for p, arrays in enumerate(encoded):
                for c in range(len(spool.bags)):
                    arrays[f"bag{c}.bounds"] += totals[p, c]
                    totals[p, c] += len(arrays[f"bag{c}.values"])
                for name, array in arrays.items():
                    writers[p][name].append(array)
                done += len(arrays["label"])
            progress("write", done, len(part))
        for writer in (writer for of_part in writers for writer in of_part.values()):
            assert writer.rows == writer.shape[0], (writer.rows, writer.shape)


def _writers(spool: Spool, part: Array, p: int, folder: Path, stack: ExitStack) -> dict[str, ArrayWriter]:
    """The files of one part."""
    folder.mkdir()
    columns, n = spool.columns, int((part == p).sum())
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {
        "dense": ((n, len(columns.dense or ())), np.float32),
        "categorical": ((n, len(spool.categorical)), np.int32),
        "label": ((n,), np.uint8 if len(columns.classes) <= 256 else np.int32),
    }
    for c, bag in enumerate(columns.bags or ()):
        values = sum(int(spool.bag(c, i, "counts")[part[rows] == p].sum()) for i, rows in spool.blocks())
        shapes[f"bag{c}.values"] = ((values,), np.int32)
        shapes[f"bag{c}.bounds"] = ((n + 1,), np.int64)
        if bag in columns.weights:
            shapes[f"bag{c}.weights"] = ((values,), np.float32)
    writers = {}
    for name, (shape, dtype) in shapes.items():
        writers[name] = ArrayWriter(folder / f"{name}.npy", shape, dtype)
        stack.callback(writers[name].close)
        if name.endswith(".bounds"):
            writers[name].append(np.zeros(1, dtype))
    return writers


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
