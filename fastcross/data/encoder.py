"""The encoder: everything that turns raw rows into a Batch, fitted on the training part and kept with every model.

    encoder.json                 format, columns, schema, classes of the label, numbers (see numbers.py), checksums
    categorical<i>.arrow         the texts behind the ids of a categorical column; none where values are hashed
    bag<i>.arrow                 the same for a multi-valued column

A cache has its encoder in the folder `encoder/`; a run keeps a copy, so that it predicts without the cache.

Id 0 is out of vocabulary: a value never seen in training, or seen fewer than `min_frequency` times. The frequent
values have the ids 1, 2, ... in the order of their frequency (equals in that of their text), which keeps the busy
rows of an embedding table close together. A missing value is counted and numbered like any other. With hashing, id 0
is the missing value and all others fall into 1 ... buckets.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from fastcross.batch import Bag, Batch, Schema
from fastcross.data.blocks import WORKERS, Block, Coded, CodedFiles, Spool, hash_strings
from fastcross.data.columns import Columns, DataError
from fastcross.data.numbers import Numbers
from fastcross.files import atomic, read_checked_json, sha256, write_checked_json

Array = npt.NDArray[Any]
ENCODER_VERSION = 2
MERGE_AT = 1 << 22  # (value, count) pairs collected before they are merged: bounds the memory of counting


@dataclass(frozen=True)
class Vocabulary:
    """values[i] has the id i + 1; ``rare`` is the share of the training values that have none, but id 0."""

    values: pa.Array
    rare: float = 0.0

    @property
    def cardinality(self) -> int:
        return len(self.values) + 1

    def ids(self, dictionary: pa.Array) -> Array:
        """(n,) int32, 0 for what is not in the vocabulary."""
        found = pc.index_in(dictionary, value_set=self.values)
        return pc.fill_null(found, -1).to_numpy(zero_copy_only=False) + np.int32(1)

    def grown(self, others: Vocabulary) -> Vocabulary:
        """With the values of another that it has not; all that were there keep their ids."""
        unknown = pc.is_null(pc.index_in(others.values, value_set=self.values))
        return Vocabulary(pa.concat_arrays([self.values, others.values.filter(unknown)]), others.rare)

    def digest(self) -> str:
        """A checksum of the values themselves, however Arrow lays them out in memory or in a file."""
        valid = self.values.is_valid().to_numpy(zero_copy_only=False)
        texts = pa.concat_arrays([pc.fill_null(self.values, "")])  # without the offset of a slice
        sizes = pc.binary_length(texts).to_numpy(zero_copy_only=False)
        data = texts.buffers()[2]
        first = int(np.frombuffer(texts.buffers()[1], np.int32)[0]) if len(texts) else 0
        digest = hashlib.sha256(valid.astype(np.uint8).tobytes() + sizes.astype("<i8").tobytes())
        digest.update(b"" if data is None else memoryview(data)[first : first + int(sizes.sum())])
        return digest.hexdigest()

    def save(self, path: Path) -> str:
        """Returns the checksum of the file, which load() wants to see again."""
        table = pa.table({"value": self.values})
        with atomic(path) as temporary:
            with pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)
            return sha256(temporary)

    @classmethod
    def load(cls, path: Path, checksums: Mapping[str, str], rare: float = 0.0) -> Vocabulary:
        """What save() wrote, if its checksum is the one under the file's name."""
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from None
        # The bytes that were checked are the ones that are used: the file is read once, not mapped.
        if hashlib.sha256(content).hexdigest() != checksums.get(path.name):
            raise DataError(f"{path}: the file is damaged; its checksum is not the one that was noted")
        return cls(pa.ipc.open_file(pa.py_buffer(content)).read_all()["value"].combine_chunks(), rare)


@dataclass(frozen=True)
class Hashing:
    """The hashing trick: no vocabulary, a fixed number of ids, collisions accepted."""

    buckets: int

    @property
    def cardinality(self) -> int:
        return self.buckets + 1

    def digest(self) -> str:
        return f"hashing:{self.buckets}"

    def ids(self, dictionary: pa.Array) -> Array:
        ids = (hash_strings(dictionary) % np.uint64(self.buckets)).astype(np.int32) + np.int32(1)
        ids[dictionary.is_null().to_numpy(zero_copy_only=False)] = 0
        return ids


Ids = Vocabulary | Hashing


@dataclass(frozen=True)
class Encoder:
    """Format and columns of the input, and what the training part said about them.

    schema: the columns of the batches; classes: the label's values in the order of their ids; fingerprint: of the
    content alone, the same wherever and whenever it was saved.
    """

    format: str
    columns: Columns
    numbers: Numbers
    categorical: tuple[Ids, ...]  # one per column
    bags: tuple[Ids, ...]
    label_scale: tuple[float, float] | None = None  # mean and deviation of a label that is a quantity

    @property
    def schema(self) -> Schema:
        return Schema(
            dense_names=self.numbers.names(self.columns.quantities),
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
            torch.from_numpy(self.numbers(block.dense)),
            torch.stack(categorical, dim=1) if categorical else torch.empty((block.rows, 0), dtype=torch.int64),
            tuple(bags),
            None if block.label is None else torch.from_numpy(block.label).to(kind),
            None if block.weight is None else torch.from_numpy(block.weight),
            None if block.group is None else torch.from_numpy(block.group),
        ), unknown

    def only(self, names: Collection[str]) -> Encoder:
        """The encoder of some of the input's columns, without the label."""
        columns = self.columns

        def kept(given: tuple[str, ...] | None) -> tuple[str, ...]:
            return tuple(name for name in given or () if name in names)

        numbers = [columns.source_of(name) in names for name in columns.quantities]
        dense = numbers[: len(columns.dense or ())]
        features = {name for name in columns.categories if columns.source_of(name) in names}
        return Encoder(
            self.format,
            Columns(
                dense=kept(columns.dense),
                categorical=kept(columns.categorical),
                bags=kept(columns.bags),
                datetimes=kept(columns.datetimes),
                parts=None
                if columns.parts is None
                else tuple(p for p in columns.parts if columns.source_of(p) in names),
                weights={bag: weight for bag, weight in columns.weights.items() if bag in names},
                transform=tuple(itertools.compress(columns.transforms, dense)),
                separator=columns.separator,
                separators=columns.separators,
                levels=tuple(name for name in columns.levels if name in names),
                integers=columns.integers,
                classes=columns.classes,
                task=columns.task,
            ),
            self.numbers.only(numbers),
            tuple(ids for ids, name in zip(self.categorical, columns.categories, strict=True) if name in features),
            tuple(ids for ids, name in zip(self.bags, columns.bags or (), strict=True) if name in names),
        )

    def without_constants(self) -> Encoder:
        """Without the parts of date-times that have one value in the training part, or one with an id.

        A weekday stays: it says which dates are missing. Hashed hours and months stay: nobody has counted them."""
        columns = self.columns
        numbers = dict(zip(columns.quantities, self.numbers.records, strict=True))
        categorical = dict(zip(columns.categories, self.categorical, strict=True))

        def varies(part: str) -> bool:
            if part in numbers:
                return numbers[part].scale > 0
            ids = categorical[part]
            return part.endswith(".weekday") or isinstance(ids, Hashing) or len(ids.values.drop_null()) > 1

        columns = replace(columns, parts=tuple(filter(varies, columns.parts or ())) if columns.datetimes else None)
        return replace(
            self,
            columns=columns,
            numbers=Numbers(tuple(numbers[name] for name in columns.quantities)),
            categorical=tuple(categorical[name] for name in columns.categories),
        )

    def save(self, folder: str | PathLike[str]) -> None:
        """Write the encoder to a folder, which is made if it is not there."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        files = {}
        for name, ids in self._named():
            if isinstance(ids, Vocabulary):
                files[f"{name}.arrow"] = ids.save(folder / f"{name}.arrow")
        rare = {name: round(ids.rare, 6) for name, ids in self._named() if isinstance(ids, Vocabulary)}
        content = self._description() | {"files": files, "rare": rare}
        write_checked_json(folder / "encoder.json", content)

    @classmethod
    def load(cls, folder: str | PathLike[str]) -> Encoder:
        """The encoder in a folder; DataError names the file that is absent, damaged or of another version."""
        folder = Path(folder)
        saved = _read_description(folder / "encoder.json")
        hashing = saved["hash_buckets"]

        def ids(name: str) -> Ids:
            if hashing:
                return Hashing(hashing)
            return Vocabulary.load(folder / f"{name}.arrow", saved["files"], saved.get("rare", {}).get(name, 0.0))

        columns = Columns.make(saved["columns"])
        return cls(
            saved["format"],
            columns,
            Numbers.from_list(saved["numbers"]),
            tuple(ids(f"categorical{i}") for i in range(len(columns.categories))),
            tuple(ids(f"bag{i}") for i in range(len(columns.bags or ()))),
            tuple(saved["label_scale"]) if "label_scale" in saved else None,
        )

    @property
    def rare(self) -> dict[str, float]:
        """Of the columns that have vocabularies, the share of the training values that these do not know."""
        names = (*self.columns.categories, *(self.columns.bags or ()))
        known = zip(names, (*self.categorical, *self.bags), strict=True)
        return {name: ids.rare for name, ids in known if isinstance(ids, Vocabulary)}

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
            "numbers": self.numbers.to_list(),
            "hash_buckets": max(buckets, default=None),
            **({} if self.label_scale is None else {"label_scale": list(self.label_scale)}),
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


def count_values(pairs: Iterable[tuple[pa.Array, Array]], min_frequency: int) -> Vocabulary:
    """The vocabulary of (dictionary, counts) pairs; memory grows with the distinct values, not with the pairs."""
    merged: pa.Table | None = None
    waiting: list[pa.Table] = []
    size = 0
    for values, counts in pairs:
        seen = counts > 0
        values = values if seen.all() else values.filter(pa.array(seen))
        waiting.append(pa.table({"value": values, "count": counts[seen]}))
        size += len(values)
        if size > max(MERGE_AT, len(merged) if merged is not None else 0):
            merged, waiting, size = _merge(merged, waiting), [], 0
    merged = _merge(merged, waiting)
    frequent = merged.filter(pc.greater_equal(merged["count"], max(min_frequency, 1)))
    # Ties are broken by the value, so that the ids depend on the data alone and not on how it was cut into blocks.
    order = pc.sort_indices(frequent, sort_keys=[("count", "descending"), ("value", "ascending")])
    total, kept = (pc.sum(counted["count"], min_count=0).as_py() for counted in (merged, frequent))
    values = pa.concat_arrays([*frequent["value"].chunks, pa.array([], pa.string())]).take(order)
    return Vocabulary(values, 1 - kept / total if total else 0.0)


def _merge(merged: pa.Table | None, waiting: list[pa.Table]) -> pa.Table:
    empty = pa.table({"value": pa.array([], pa.string()), "count": pa.array([], pa.int64())})
    whole = pa.concat_tables([merged if merged is not None else empty, *waiting])
    grouped = whole.group_by("value").aggregate([("count", "sum")])
    return pa.table({"value": grouped["value"], "count": grouped["count_sum"]})
