"""The columnar cache on disk: memory-mapped arrays, sliced into batches without per-row Python.

    manifest.json                what made the cache: inputs, configuration, schema, sizes, checksums, what was skipped
    train|validation|test/       dense.npy (N, num_dense) float32, categorical.npy (N, k) int32, label.npy (N,),
                                 weight.npy (N,) float32, group.npy (N,) int64, where these columns were named,
                                 bag<i>.values.npy, bag<i>.bounds.npy (N + 1,), bag<i>.weights.npy
    encoder/                     what turned rows into these arrays, and will do so with rows to predict: encoder.py

Rows are stored one after the other, so a batch in order is one contiguous read per array.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from fastcross.batch import Bag, Batch, Schema
from fastcross.data.arrays import check_content, check_size, gather_ragged, open_array
from fastcross.data.errors import DataError
from fastcross.data.order import RowOrder
from fastcross.data.parallel import WORKERS
from fastcross.data.report import describe
from fastcross.data.split import PARTS
from fastcross.files import read_checked_json

if TYPE_CHECKING:
    from fastcross.data.encoder import Encoder

FORMAT_VERSION = 2
OWN_FILES = ("manifest.json", "encoder", *PARTS)
Array = npt.NDArray[Any]


class Cache:
    """A prepared data set: `Cache.open(path)`, or the result of `prepare`.

    schema: its columns; sizes: the rows of "train", "validation", "test"; manifest: what made it; fingerprint: of
    inputs and configuration, for a run to store and to pass to open() when it resumes; encoder: what turned rows into
    batches, and encoder_fingerprint, by which a run knows whether a cache speaks its language.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path, self.manifest = path, manifest
        self.schema = Schema.from_dict(manifest["schema"])
        self.sizes: dict[str, int] = {part: manifest["sizes"][part] for part in PARTS}
        self.fingerprint: str = manifest["fingerprint"]
        self.encoder_fingerprint: str = manifest["encoder"]
        self._parts: dict[str, dict[str, Array]] = {}

    def __repr__(self) -> str:
        return f"Cache({str(self.path)!r}, sizes={self.sizes}, fingerprint={self.fingerprint[:12]!r})"

    @classmethod
    def open(cls, path: str | PathLike[str], *, fingerprint: str | None = None) -> Cache:
        """Open a cache; with `fingerprint`, raise DataError unless it is the one the cache was made with."""
        path = Path(path)
        manifest = read_manifest(path)
        if fingerprint is not None and fingerprint != manifest["fingerprint"]:
            made_with = json.dumps(manifest.get("configuration", {}))
            raise DataError(
                f"{path}: the cache was made from other data or with another configuration; "
                f"expected fingerprint {fingerprint[:12]}, got {manifest['fingerprint'][:12]} ({made_with})"
            )
        for name, written in manifest["files"].items():
            check_size(path / name, written)
        return cls(path, manifest)

    def verify(self) -> None:
        """Read every file and raise DataError, which names it, at the first that is damaged. (What is used is always
        checked before; this is for those who want to know now.)"""
        for part in PARTS:
            self._arrays(part)
        _ = self.encoder

    @property
    def report(self) -> str:
        """What the columns were taken for and why, the label's classes, the split, and warnings."""
        return describe(self.manifest)

    @cached_property
    def encoder(self) -> Encoder:
        from fastcross.data.encoder import Encoder  # needs pyarrow, which batches do not

        encoder = Encoder.load(self.path / "encoder")
        self.check_encoder(encoder.fingerprint)
        return encoder

    def check_encoder(self, fingerprint: str) -> None:
        """Raise DataError unless the cache was made with the encoder of this fingerprint: ids and numbers of another
        one mean other things to a model, even where names and cardinalities agree."""
        if fingerprint != self.encoder_fingerprint:
            raise DataError(
                f"{self.path}: the cache was made with another encoder (columns, vocabularies, statistics) than the "
                f"model; expected encoder {fingerprint[:12]}, got {self.encoder_fingerprint[:12]}"
            )

    @property
    def mean_weight(self) -> float:
        """Of the training rows: weights count in proportion to it."""
        return self.manifest.get("weight", {}).get("mean", 1.0)

    @property
    def label_scale(self) -> tuple[float, float]:
        """Mean and standard deviation of the training rows' label, where it is a quantity."""
        label = self.manifest["label"]
        return label.get("mean", 0.0), label.get("deviation", 1.0)

    def num_batches(self, part: str, batch_size: int, *, drop_last: bool = False) -> int:
        """Batches in one epoch of a part."""
        return self._size(part) // batch_size if drop_last else -(-self._size(part) // batch_size)

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
        """Batches of a part from batch index `start` on, which costs no more than starting at 0.

        The order depends on (seed, epoch) alone; order.py says how good a shuffle it is. Several ranks share each
        batch of batch_size rows, one after the other: every row is seen by exactly one rank, all ranks see the same
        number of batches, and their shares of one differ by at most a row (in a short last batch one may be empty).
        """
        if batch_size < 1 or not 0 <= rank < world_size:
            raise ValueError(f"need batch_size >= 1 and rank < world_size; got {batch_size}, {rank}, {world_size}")
        size = self._size(part)
        order = RowOrder(size, seed, epoch) if shuffle else None
        for i in range(start, self.num_batches(part, batch_size, drop_last=drop_last)):
            first, count = i * batch_size, min(batch_size, size - i * batch_size)
            lo, hi = first + count * rank // world_size, first + count * (rank + 1) // world_size
            yield self._batch(part, slice(lo, hi) if order is None else order.rows(lo, hi))

    def _size(self, part: str) -> int:
        if part not in self.sizes:
            raise ValueError(f"part must be one of {', '.join(PARTS)}; got {part!r}")
        return self.sizes[part]

    def _arrays(self, part: str) -> dict[str, Array]:
        if part not in self._parts:
            files = {self.path / name: written for name, written in self.manifest["files"].items()}
            of_part = {file: written for file, written in files.items() if file.parent.name == part}
            with ThreadPoolExecutor(WORKERS) as pool:
                list(pool.map(check_content, of_part, of_part.values()))
            self._parts[part] = {file.stem: open_array(file) for file in of_part}
        return self._parts[part]

    def _batch(self, part: str, rows: slice | Array) -> Batch:
        arrays = self._arrays(part)

        def take(name: str, dtype: npt.DTypeLike) -> torch.Tensor:
            chosen = arrays[name][rows] if isinstance(rows, slice) else arrays[name].take(rows, axis=0)
            return torch.from_numpy(chosen.astype(dtype))  # a copy: the map is read-only

        bags = []
        for i in range(len(self.schema.bag_names)):
            bounds = arrays[f"bag{i}.bounds"]
            if isinstance(rows, slice):
                positions: slice | Array = slice(bounds[rows.start], bounds[rows.stop])
                offsets = bounds[rows] - bounds[rows.start]
            else:
                positions, offsets = gather_ragged(bounds, rows)
            values = torch.from_numpy(arrays[f"bag{i}.values"][positions].astype(np.int64))
            weights = arrays.get(f"bag{i}.weights")
            weighted = None if weights is None else torch.from_numpy(np.array(weights[positions]))
            bags.append(Bag(values, torch.from_numpy(np.array(offsets)), weighted))
        label = take("label", {"binary": np.float32, "regression": np.float64}.get(self.schema.task, np.int64))
        weight = take("weight", np.float32) if "weight" in arrays else None
        group = take("group", np.int64) if "group" in arrays else None
        return Batch(take("dense", np.float32), take("categorical", np.int64), tuple(bags), label, weight, group)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a complete cache; raises DataError for anything else."""
    file = path / "manifest.json"
    try:
        manifest = read_checked_json(file)
    except FileNotFoundError:
        raise DataError(f"{path}: no cache here (no manifest.json); make one with fastcross prepare") from None
    except OSError as error:
        raise DataError(f"{file}: {error.strerror or error}") from None
    except ValueError as error:
        if (version := _version(file)) not in (None, FORMAT_VERSION):  # older ones had no checksum
            raise DataError(
                f"{path}: cache format {version}, but this version reads {FORMAT_VERSION}; prepare it again"
            ) from None
        raise DataError(f"{error}; prepare the cache again") from None
    return manifest


def _version(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes()).get("format_version")
    except (ValueError, AttributeError, RecursionError):
        return None
