"""From a category's text to its id: a vocabulary counted on the training part, or a hash.

Id 0 is out of vocabulary: a value never seen in training, or seen fewer than `min_frequency` times. The frequent
values have the ids 1, 2, ... in the order of their frequency (equals in that of their text), which keeps the busy
rows of an embedding table close together. A missing value is counted and numbered like any other. With hashing, id 0
is the missing value and all others fall into 1 ... buckets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fastcross.data.errors import DataError
from fastcross.files import atomic, sha256

Array = npt.NDArray[Any]
MERGE_AT = 1 << 22  # (value, count) pairs collected before they are merged: bounds the memory of counting


@dataclass(frozen=True)
class Vocabulary:
    """values[i] has the id i + 1."""

    values: pa.Array

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
        return Vocabulary(pa.concat_arrays([self.values, others.values.filter(unknown)]))

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
    def load(cls, path: Path, checksums: Mapping[str, str]) -> Vocabulary:
        """What save() wrote, if its checksum is the one under the file's name."""
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from None
        # The bytes that were checked are the ones that are used: the file is read once, not mapped.
        if hashlib.sha256(content).hexdigest() != checksums.get(path.name):
            raise DataError(f"{path}: the file is damaged; its checksum is not the one that was noted")
        return cls(pa.ipc.open_file(pa.py_buffer(content)).read_all()["value"].combine_chunks())


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
    return Vocabulary(pa.concat_arrays([*frequent["value"].chunks, pa.array([], pa.string())]).take(order))


def _merge(merged: pa.Table | None, waiting: list[pa.Table]) -> pa.Table:
    empty = pa.table({"value": pa.array([], pa.string()), "count": pa.array([], pa.int64())})
    whole = pa.concat_tables([merged if merged is not None else empty, *waiting])
    grouped = whole.group_by("value").aggregate([("count", "sum")])
    return pa.table({"value": grouped["value"], "count": grouped["count_sum"]})


def hash_strings(strings: pa.Array) -> Array:
    """FNV-1a, 64 bits, of each string's UTF-8 bytes: the same on every machine and in every version."""
    strings = pc.fill_null(strings, "")
    offsets = np.frombuffer(strings.buffers()[1], np.int32)[strings.offset : strings.offset + len(strings) + 1]
    data = np.frombuffer(strings.buffers()[2] or b"", np.uint8)
    start, length = offsets[:-1].astype(np.int64), np.diff(offsets)
    h = np.full(len(strings), 0xCBF29CE484222325, np.uint64)
    left = np.arange(len(strings))  # strings that have a byte at this position
    for position in range(int(length.max(initial=0))):
        left = left[length[left] > position]
        h[left] = (h[left] ^ data[start[left] + position]) * np.uint64(0x100000001B3)
    return h ^ (h >> np.uint64(32))  # the low bits of FNV alone are poor; the modulo sees mostly those
