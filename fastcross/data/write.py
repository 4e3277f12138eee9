"""The second half of `prepare`: spooled blocks to the arrays of the three parts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastcross.data.arrays import ArrayWriter
from fastcross.data.columns import Columns
from fastcross.data.encoder import Standardisation
from fastcross.data.parallel import map_in_order
from fastcross.data.split import PARTS
from fastcross.data.spool import Spool

Array = npt.NDArray[Any]


def write_parts(
    spool: Spool, part: Array, standardise: Standardisation, folder: Path, progress: Callable[[str, int, int], None]
) -> dict[str, dict[str, int]]:
    """Encode every block and append its rows to their parts; returns size and checksum of each file."""

    def encode(block: tuple[int, slice]) -> list[dict[str, Array]]:
        i, rows = block
        categorical = np.empty((spool.rows[i], len(spool.categorical)), np.int32)
        for c, codes in enumerate(spool.codes(i)):
            categorical[:, c] = spool.categorical[c].ids(i)[codes]
        arrays = {"dense": standardise(spool.dense(i)), "categorical": categorical, "label": spool.label(i)}
        arrays |= spool.beside(i)
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
        return {
            f"{part_name}/{name}.npy": {"bytes": writer.bytes, "crc32": writer.crc32}
            for part_name, of_part in zip(PARTS, writers, strict=True)
            for name, writer in of_part.items()
        }


def _writers(spool: Spool, part: Array, p: int, folder: Path, stack: ExitStack) -> dict[str, ArrayWriter]:
    """The files of one part."""
    folder.mkdir()
    columns, n = spool.columns, int((part == p).sum())
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {
        "dense": ((n, len(columns.dense or ())), np.float32),
        "categorical": ((n, len(spool.categorical)), np.int32),
        "label": ((n,), _label_dtype(columns)),
    }
    shapes |= {"weight": ((n,), np.float32)} if columns.sample_weight else {}
    shapes |= {"group": ((n,), np.int64)} if columns.group else {}
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


def _label_dtype(columns: Columns) -> type:
    if columns.is_regression:
        return np.float64
    return np.uint8 if len(columns.classes or ()) <= 256 else np.int32
