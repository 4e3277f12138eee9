"""The encoder: everything that turns raw rows into a Batch, fitted on the training part and kept with every model.

    encoder.json                 format, columns, schema, classes of the label, standardisation, checksums of all files
    categorical<i>.arrow         the texts behind the ids of a categorical column; none where values are hashed
    bag<i>.arrow                 the same for a multi-valued column

A cache has its encoder in the folder `encoder/`; a run keeps a copy, so that it predicts without the cache.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fastcross.batch import Bag, Batch, Schema
from fastcross.data.blocks import Block, Coded
from fastcross.data.columns import Columns
from fastcross.data.errors import DataError
from fastcross.data.vocabulary import Hashing, Vocabulary
from fastcross.files import read_checked_json, write_checked_json

Array = npt.NDArray[Any]
Ids = Vocabulary | Hashing
ENCODER_VERSION = 1


@dataclass(frozen=True)
class Standardisation:
    """x -> (x - mean) · scale, per dense column; mean 0 and scale 1 for columns that are not standardised."""

    mean: Array
    scale: Array

    def __call__(self, dense: Array) -> Array:
        scaled = (dense - self.mean) * self.scale if self.needed else dense
        return np.nan_to_num(scaled.astype(np.float32), nan=0.0)

    @property
    def needed(self) -> bool:
        return bool(self.mean.any() or (self.scale != 1).any())


@dataclass(frozen=True)
class Encoder:
    """Format and columns of the input, and what the training part said about them.

    schema: the columns of the batches; classes: the label's values in the order of their ids; fingerprint: of the
    content alone, the same wherever and whenever it was saved.
    """

    format: str
    columns: Columns
    standardise: Standardisation
    categorical: tuple[Ids, ...]  # one per column
    bags: tuple[Ids, ...]

    @property
    def schema(self) -> Schema:
        return Schema(
            dense_names=self.columns.dense or (),
            categorical_names=self.columns.categories,
            cardinalities=tuple(ids.cardinality for ids in self.categorical),
            bag_names=self.columns.bags or (),
            bag_cardinalities=tuple(ids.cardinality for ids in self.bags),
            num_outputs=self.columns.num_outputs,
            task=self.columns.kind_of_label,
        )

    @property
    def classes(self) -> tuple[str, ...]:
        """None of them for a quantity."""
        return self.columns.classes or ()

    @cached_property
    def fingerprint(self) -> str:
        content = self._description() | {"values": {name: ids.digest() for name, ids in self._named()}}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def encode(self, block: Block) -> tuple[Batch, dict[str, int]]:
        """The block as one batch, and per column how many of its values the vocabulary does not know."""
        unknown: dict[str, int] = {}

        def ids(name: str, known: Ids, coded: Coded) -> torch.Tensor:
            found = known.ids(coded.dictionary)
            if isinstance(known, Vocabulary):
                strange = (found == 0) & coded.dictionary.is_valid().to_numpy(zero_copy_only=False)
                unknown[name] = int(strange[coded.codes].sum())
            return torch.from_numpy(found[coded.codes].astype(np.int64))

        columns = zip(self.columns.categories, self.categorical, block.categorical, strict=True)
        categorical = [ids(*column) for column in columns]
        bags = []
        for name, known, coded in zip(self.columns.bags or (), self.bags, block.bags, strict=True):
            assert coded.counts is not None
            offsets = np.cumsum(coded.counts, dtype=np.int64) - coded.counts
            weights = None if coded.weights is None else torch.from_numpy(np.array(coded.weights))
            bags.append(Bag(ids(name, known, coded), torch.from_numpy(offsets), weights))
        kind = {"binary": torch.float32, "multiclass": torch.int64, "regression": torch.float64}[self.schema.task]
        return Batch(
            torch.from_numpy(self.standardise(block.dense)),
            torch.stack(categorical, dim=1) if categorical else torch.empty((block.rows, 0), dtype=torch.int64),
            tuple(bags),
            None if block.label is None else torch.from_numpy(block.label).to(kind),
            None if block.weight is None else torch.from_numpy(block.weight),
            None if block.group is None else torch.from_numpy(block.group),
        ), unknown

    def save(self, folder: str | PathLike[str]) -> None:
        """Write the encoder to a folder, which is made if it is not there."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        files = {}
        for name, ids in self._named():
            if isinstance(ids, Vocabulary):
                files[f"{name}.arrow"] = ids.save(folder / f"{name}.arrow")
        content = self._description() | {"files": files}
        write_checked_json(folder / "encoder.json", content)

    @classmethod
    def load(cls, folder: str | PathLike[str]) -> Encoder:
        """The encoder in a folder; DataError names the file that is absent, damaged or of another version."""
        folder = Path(folder)
        saved = _read_description(folder / "encoder.json")
        hashing = saved["hash_buckets"]

        def ids(name: str) -> Ids:
            return Hashing(hashing) if hashing else Vocabulary.load(folder / f"{name}.arrow", saved["files"])

        columns = Columns.make(saved["columns"])
        mean, scale = (np.array(saved["standardisation"][key], np.float64) for key in ("mean", "scale"))
        return cls(
            saved["format"],
            columns,
            Standardisation(mean, scale),
            tuple(ids(f"categorical{i}") for i in range(len(columns.categories))),
            tuple(ids(f"bag{i}") for i in range(len(columns.bags or ()))),
        )

    def _named(self) -> Iterator[tuple[str, Ids]]:
        for kind, columns in (("categorical", self.categorical), ("bag", self.bags)):
            for i, ids in enumerate(columns):
                yield f"{kind}{i}", ids

    def _description(self) -> dict[str, Any]:
        """All but the vocabularies, as JSON."""
        buckets = {ids.buckets for _, ids in self._named() if isinstance(ids, Hashing)}
        return {
            "encoder_version": ENCODER_VERSION,
            "format": self.format,
            "columns": self.columns.to_dict(),
            "schema": self.schema.to_dict(),
            "standardisation": {"mean": self.standardise.mean.tolist(), "scale": self.standardise.scale.tolist()},
            "hash_buckets": max(buckets, default=None),
        }


def _read_description(path: Path) -> dict[str, Any]:
    try:
        saved = read_checked_json(path)
    except FileNotFoundError:
        raise DataError(f"{path.parent}: no encoder here (no {path.name})") from None
    except (OSError, ValueError) as error:
        raise DataError(str(error) if isinstance(error, ValueError) else f"{path}: {error.strerror}") from None
    if saved.get("encoder_version") != ENCODER_VERSION:
        found = saved.get("encoder_version")
        raise DataError(f"{path}: encoder version {found}, but this version of fastcross reads {ENCODER_VERSION}")
    return saved
