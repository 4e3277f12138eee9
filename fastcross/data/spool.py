"""Blocks on disk between the two halves of `prepare`: read once, kept as codes until the vocabularies are known.

Each block's codes are stored column by column, so that a vocabulary reads its own column only, in long runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fastcross.data.blocks import Block, Coded
from fastcross.data.columns import Columns
from fastcross.data.split import TIME

Array = npt.NDArray[Any]


@dataclass
class CodedFiles:
    """The codes of one column, and the dictionary of each block."""

    folder: Path
    sizes: list[int] = field(default_factory=list)  # codes per block
    dictionary_sizes: list[int] = field(default_factory=list)
    files: dict[str, IO[bytes]] = field(default_factory=dict)
    writer: pa.ipc.RecordBatchStreamWriter | None = None

    def append(self, coded: Coded, codes_elsewhere: bool) -> None:
        if not codes_elsewhere:
            self._file("codes").write(coded.codes.data)
            assert coded.counts is not None
            self._file("counts").write(coded.counts.data)
            if coded.weights is not None:
                self._file("weights").write(np.ascontiguousarray(coded.weights).data)
        self.sizes.append(len(coded.codes))
        self.dictionary_sizes.append(len(coded.dictionary))
        batch = pa.record_batch({"value": coded.dictionary})
        if self.writer is None:
            self.writer = pa.ipc.new_stream(self._file("dictionaries"), batch.schema)
        self.writer.write_batch(batch)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        for file in self.files.values():
            file.close()
        self.starts = np.cumsum([0, *self.sizes])
        self.dictionary_starts = np.cumsum([0, *self.dictionary_sizes])

    def save_ids(self, ids: Iterable[Array]) -> None:
        """Keep the ids of all dictionary entries, block after block."""
        with open(self.folder / "ids", "wb") as file:
            for array in ids:
                file.write(np.ascontiguousarray(array, np.int32).data)

    def ids(self, block: int) -> Array:
        """The ids of a block's dictionary entries."""
        first, count = self.dictionary_starts[block], self.dictionary_sizes[block]
        return np.fromfile(self.folder / "ids", np.int32, count, offset=4 * int(first))

    def dictionaries(self) -> Iterator[pa.Array]:
        with pa.OSFile(str(self.folder / "dictionaries")) as file:
            for batch in pa.ipc.open_stream(file):
                yield batch["value"]

    def _file(self, name: str) -> IO[bytes]:
        if name not in self.files:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.files[name] = open(self.folder / name, "wb")  # noqa: SIM115 - closed by close()
        return self.files[name]


class Spool:
    def __init__(self, folder: Path, columns: Columns) -> None:
        folder.mkdir()
        self.folder, self.columns = folder, columns
        self.rows: list[int] = []  # per block
        # What is standardised later keeps its precision until the mean is subtracted.
        self.dense_dtype = np.float64 if "standard" in columns.transforms else np.float32
        self.categorical = [CodedFiles(folder / f"categorical{i}") for i in range(len(columns.categories))]
        self.bags = [CodedFiles(folder / f"bag{i}") for i in range(len(columns.bags or ()))]
        self.label_dtype = np.float64 if columns.is_regression else np.int32
        optional = {"time": columns.time, "weight": columns.sample_weight, "group": columns.group}
        names = ("dense", "label", "codes", *(name for name, column in optional.items() if column))
        self.files = {name: open(folder / name, "wb") for name in names}  # noqa: SIM115 - closed by close()

    def append(self, block: Block) -> None:
        assert block.label is not None
        self.rows.append(block.rows)
        self.files["dense"].write(np.ascontiguousarray(block.dense, self.dense_dtype).data)
        self.files["label"].write(np.ascontiguousarray(block.label, self.label_dtype).data)
        for name in ("time", "weight", "group"):
            if (values := getattr(block, name)) is not None:
                self.files[name].write(np.ascontiguousarray(values).data)
        for coded, files in zip(block.categorical, self.categorical, strict=True):
            self.files["codes"].write(np.ascontiguousarray(coded.codes).data)
            files.append(coded, codes_elsewhere=True)
        for coded, files in zip(block.bags, self.bags, strict=True):
            files.append(coded, codes_elsewhere=False)

    def close(self) -> None:
        for file in self.files.values():
            file.close()
        for files in (*self.categorical, *self.bags):
            files.close()
        self.starts = np.concatenate([[0], np.cumsum(self.rows)]).astype(np.int64)

    def blocks(self) -> Iterator[tuple[int, slice]]:
        """Index and rows of each block."""
        for i, rows in enumerate(self.rows):
            yield i, slice(int(self.starts[i]), int(self.starts[i]) + rows)

    def dense(self, block: int) -> Array:
        width = len(self.columns.dense or ())
        flat = self._read("dense", self.dense_dtype, self.starts[block] * width, self.rows[block] * width)
        return flat.reshape(self.rows[block], width)

    def label(self, block: int) -> Array:
        return self._read("label", self.label_dtype, self.starts[block], self.rows[block])

    def beside(self, block: int) -> dict[str, Array]:
        """The weights and groups, as far as there are any."""
        kinds = {"weight": np.float32, "group": np.int64}
        found = {name: kind for name, kind in kinds.items() if name in self.files}
        return {name: self._read(name, kind, self.starts[block], self.rows[block]) for name, kind in found.items()}

    def time(self) -> Array:
        """Of all rows."""
        return np.fromfile(self.folder / "time", TIME)

    def codes(self, block: int) -> Array:
        """(k, rows): the codes of all categorical columns."""
        k = len(self.categorical)
        return self._read("codes", np.int32, self.starts[block] * k, self.rows[block] * k).reshape(k, self.rows[block])

    def column_codes(self, column: int, block: int) -> Array:
        first = self.starts[block] * len(self.categorical) + column * self.rows[block]
        return self._read("codes", np.int32, first, self.rows[block])

    def bag(self, column: int, block: int, name: str) -> Array:
        """The "codes", "counts" or "weights" of a bag."""
        files = self.bags[column]
        of_values = (files.starts[block], files.sizes[block])
        first, count = (self.starts[block], self.rows[block]) if name == "counts" else of_values
        dtype = np.float32 if name == "weights" else np.int32
        return self._read(f"bag{column}/{name}", dtype, first, count)

    def _read(self, name: str, dtype: npt.DTypeLike, first: int, count: int) -> Array:
        offset = int(first) * np.dtype(dtype).itemsize
        return np.fromfile(self.folder / name, dtype, int(count), offset=offset)
