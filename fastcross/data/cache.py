"""The columnar cache on disk: memory-mapped arrays, sliced into batches without per-row Python.

    manifest.json                what made the cache: inputs, configuration, schema, sizes, checksums, what was skipped
    train|validation|test/       dense.npy (N, num_dense) float32, categorical.npy (N, k) int32, label.npy (N,),
                                 weight.npy (N,) float32, group.npy (N,) int64, where these columns were named,
                                 bag<i>.values.npy, bag<i>.bounds.npy (N + 1,), bag<i>.weights.npy
    encoder/                     what turned rows into these arrays, and will do so with rows to predict: encoder.py

Rows are stored one after the other, so a batch in order is one contiguous read per array.

The checksum of an array is zlib's CRC-32: any change within four bytes changes it for certain, any other with all but
one chance in 2^32, and at 3.9 GB/s (one core; SHA-256: 1.8 GB/s) it is faster than most disks deliver. So the arrays of
a part are checked whole each time a process first uses them, 2.6 s for 10 GB, and no note of earlier checks has to be
trusted.

Up to WINDOW rows a shuffle is a uniform permutation. Beyond that a permutation of the whole file would turn training
into random reads of single rows, so the file is cut into blocks of BLOCK consecutive rows, the blocks are permuted,
and the rows of WINDOW / BLOCK blocks at a time are permuted together: a batch is a uniform sample of 4,096 blocks
from all over the file, every row is visited once per epoch, each block is read from disk once, and any position can
be computed without the ones before it.
"""

from __future__ import annotations

import io
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from fastcross.batch import Bag, Batch, Schema
from fastcross.data.columns import DataError
from fastcross.files import read_checked_json

if TYPE_CHECKING:
    from fastcross.data.encoder import Encoder

FORMAT_VERSION = 3
PARTS = ("train", "validation", "test")
OWN_FILES = ("manifest.json", "encoder", *PARTS)
BLOCK = 1 << 10
WINDOW = 1 << 22
SHOWN = 40  # columns that a report lists one by one; of wider tables only the names by kind
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
        return "\n".join(_report_lines(self.manifest))

    @property
    def warnings(self) -> list[str]:
        """What of the data says less to a model than it seems to; lines of the report, too."""
        return list(_warnings(self.manifest))

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

    def worst_loss(self, batch_size: int) -> float:
        """At most, the mean loss of a training batch where all rows are predicted alike, in units of an ordinary one's:
        1, but where a label or a weight is extreme."""
        regression = self.schema.task == "regression"
        if not regression and "weight" not in self.manifest:
            return 1.0
        arrays, (mean, deviation) = self._arrays("train"), self.label_scale
        losses: Array = ((arrays["label"] - mean) / deviation) ** 2 if regression else np.ones(self.sizes["train"])
        if "weight" in arrays:
            losses = losses * (arrays["weight"] / self.mean_weight)
        return max(1.0, min(float(losses.max()), float(losses.sum()) / batch_size))

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

        The order depends on (seed, epoch) alone. Several ranks share each
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
            with ThreadPoolExecutor(os.cpu_count()) as pool:
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


def _report_lines(manifest: dict[str, Any]) -> Iterator[str]:
    findings, schema, numbers = manifest["findings"], manifest["schema"], manifest["numbers"]
    if not findings:
        yield f"columns: those of the format {manifest['configuration']['format']}"
        if numbers and len(numbers) <= SHOWN:
            yield from (f"  {name}: {number}" for name, number in numbers.items())
    elif len(findings) <= SHOWN:
        sizes = dict(zip(schema["categorical_names"], schema["cardinalities"], strict=True))
        sizes |= dict(zip(schema["bag_names"], schema["bag_cardinalities"], strict=True))
        width = max(len(found["column"]) for found in findings)
        yield f"columns, by {manifest['looked_at']}:"
        for found in findings:
            name = found["column"]
            size = sizes.get(name, sizes.get(f"{name}.level"))
            ids = "" if size is None else f" ({size:,} ids)"
            number = f"; {numbers[name]}" if name in numbers else ""
            yield f"  {name:{width}}  {found['kind']:12} {found['why']}{ids}{number}"
    else:
        for kind in dict.fromkeys(found["kind"] for found in findings):
            names = [found["column"] for found in findings if found["kind"] == kind]
            yield f"{kind} columns ({len(names)}): {', '.join(names)}"
    label = manifest["label"]
    if schema["task"] == "regression":
        spread = f"mean {label['mean']:.6g}, standard deviation {label['deviation']:.6g} over the training rows"
        yield f"label {label['column']}: a quantity (regression), {spread}"
    else:
        yield _report_of_classes(label)
    if weight := manifest.get("weight"):
        yield f"weight {weight['column']}: mean {weight['mean']:.6g} over the training rows"
    sizes_of_parts = ", ".join(f"{part} {manifest['sizes'][part]:,}" for part in PARTS)
    yield f"split {manifest['split']}; rows: {sizes_of_parts}"
    yield from (f"warning: {message}" for message in _warnings(manifest))


def _warnings(manifest: dict[str, Any]) -> Iterator[str]:
    for found in manifest["findings"]:
        if found["warning"]:
            yield f"column {found['column']} ({found['kind']}): {found['warning']}"
    yield from manifest.get("warnings", ())
    label = manifest["label"]
    for part, counts in zip(PARTS, label["rows"], strict=True):
        if len(counts) > 1 and sum(counts) and sum(count > 0 for count in counts) < 2:
            only = label["classes"][next(i for i, count in enumerate(counts) if count)]
            yield f"every row of the {part} part has the label {only}: no AUC can be had from it"
    yield from manifest["skipped"]["truncated"]


def _report_of_classes(label: dict[str, Any]) -> str:
    totals = [sum(counts) for counts in zip(*label["rows"], strict=True)]
    shown = [f"{name} is {i} ({n:,} rows)" for i, (name, n) in enumerate(zip(label["classes"], totals, strict=True))]
    more = f", … {len(shown) - 10} more" if len(shown) > 10 else ""
    return f"label {label['column']}: {', '.join(shown[:10])}{more}"


@dataclass(frozen=True)
class Split:
    """How rows are divided: `kind` "time", "random" or "files", and the fractions of the three parts.

    - time: the first rows train, in the order of the file or of a column with times; the rest, as in section 4.1, is
      dealt at random to validation and test.
    - random: every row is dealt at random.
    - files: the rows of the last file are the test part; `fractions` divide the others at random.
    - tables: of two tables in memory, the first trains and the second validates.
    """

    kind: str
    fractions: tuple[float, float, float]

    @classmethod
    def parse(cls, split: str | Sequence[float] | Split) -> Split:
        """From "time", "random", "files", one of them with fractions ("random:0.9,0,0.1"), or three fractions."""
        if isinstance(split, Split):
            return split
        defaults = {"time": (6 / 7, 1 / 14, 1 / 14), "random": (0.8, 0.1, 0.1), "files": (0.9, 0.1, 0.0)}
        kind, _, text = split.partition(":") if isinstance(split, str) else ("random", "", "")
        try:
            fractions = [float(f) for f in text.split(",")] if text else list(defaults[kind])
            if not isinstance(split, str):
                fractions = [float(f) for f in split]
            whole = len(fractions) == 3 and min(fractions) >= 0 and abs(sum(fractions) - 1) <= 1e-6
            if kind not in defaults or not whole:
                raise KeyError(kind)
        except (KeyError, ValueError, TypeError):
            raise ValueError(
                'split must be "time", "random" or "files", alone or with three fractions that add up to 1 as in '
                f'"random:0.8,0.1,0.1"; got {split!r}'
            ) from None
        return cls(kind, (fractions[0], fractions[1], fractions[2]))

    def __str__(self) -> str:
        return f"{self.kind}:" + ",".join(f"{fraction:.6g}" for fraction in self.fractions)

    def describe(self, time: str | None = None) -> str:
        shares = ", ".join(f"{fraction:.4g} {part}" for fraction, part in zip(self.fractions, PARTS, strict=True))
        order = f"by column {time}" if time else "in the order of the file, which should be that of time"
        how = {
            "time": f"by time: the first {self.fractions[0]:.4g} of the rows train ({order}), "
            f"{self.fractions[1]:.4g} validate and {self.fractions[2]:.4g} test, dealt at random",
            "random": f"at random: {shares}",
            "files": f"by files: the last file tests; of the others at random {shares}",
            "tables": "as given: the table trains, that of eval_set validates",
        }
        return how[self.kind]


def assign_parts(
    rows: int,
    split: Split,
    seed: int,
    rows_of_files: Sequence[int] = (),
    time: Array | None = None,
) -> Array:
    """The part of every row as an index into PARTS, one byte each; the counts are exact, not binomial.

    `time`, of dtype TIME, orders the rows for a split by time, those of equal times as they come; without, they are in
    order.
    """
    rng = np.random.default_rng(seed)
    train, validation, test = split.fractions
    if split.kind == "files":
        if len(rows_of_files) < 2:
            raise ValueError(f'split="files" needs at least two files; got {len(rows_of_files)}')
        others = rows - rows_of_files[-1]
        inner = Split("random", (train, validation, test))
        return np.concatenate([assign_parts(others, inner, seed), np.full(rows_of_files[-1], 2, np.uint8)])
    if split.kind == "tables":
        return np.repeat(np.arange(2, dtype=np.uint8), rows_of_files)
    first = round(rows * train)
    second = min(round(rows * validation), rows - first) if test > 0 else rows - first
    part = np.repeat(np.arange(3, dtype=np.uint8), [first, second, rows - first - second])
    rng.shuffle(part[first:] if split.kind == "time" else part)
    if time is None:
        return part
    ordered = np.empty_like(part)
    ordered[np.lexsort((time["rest"], time["rounded"]))] = part
    return ordered


class RowOrder:
    """order.rows(lo, hi) are the rows at positions lo ... hi - 1 of the shuffled epoch."""

    def __init__(self, size: int, seed: int, epoch: int, *, window: int = WINDOW, block: int = BLOCK) -> None:
        self.size, self.key, self.block = size, (seed, epoch), block
        self.blocks = np.random.default_rng((*self.key, 0)).permutation(-(-size // block))
        # Lengths differ only for the file's last block, wherever the permutation put it.
        ends = np.cumsum(np.minimum((self.blocks + 1) * block, size) - self.blocks * block)
        self.per_window = max(window // block, 1)
        self.bounds = np.concatenate([[0], ends[self.per_window - 1 :: self.per_window], ends[-1:]]).astype(np.int64)
        self.bounds = np.unique(self.bounds)
        self.current: tuple[int, Array] = (-1, np.empty(0, np.int64))

    def rows(self, lo: int, hi: int) -> Array:
        pieces = []
        while lo < hi:
            window = int(np.searchsorted(self.bounds, lo, side="right")) - 1
            start, end = self.bounds[window], min(self.bounds[window + 1], hi)
            pieces.append(self._window(window)[lo - start : end - start])
            lo = int(end)
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, np.int64), *pieces])

    def _window(self, window: int) -> Array:
        if self.current[0] != window:
            blocks = self.blocks[window * self.per_window : (window + 1) * self.per_window]
            rows = (blocks[:, None] * self.block + np.arange(self.block)).ravel()
            rows = rows[rows < self.size]
            np.random.default_rng((*self.key, 1 + window)).shuffle(rows)
            self.current = (window, rows)
        return self.current[1]


class ArrayWriter:
    """Appends rows to a .npy file of known shape: no more memory than one append, no dirty pages of a memory map."""

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self.dtype, self.shape, self.rows = np.dtype(dtype), shape, 0
        self.crc32 = self.bytes = 0
        self.file = open(path, "wb")  # noqa: SIM115 - closed by close()
        header = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": shape}
        buffer = io.BytesIO()
        np.lib.format.write_array_header_1_0(buffer, header)
        self._write(buffer.getbuffer())

    def append(self, values: Array) -> None:
        assert values.shape[1:] == self.shape[1:], (values.shape, self.shape)
        self.rows += len(values)
        if values.size:
            self._write(np.ascontiguousarray(values, self.dtype).data.cast("B"))

    def close(self) -> None:
        self.file.close()

    def _write(self, data: memoryview) -> None:
        self.crc32 = zlib.crc32(data, self.crc32)
        self.bytes += len(data)
        self.file.write(data)


def check_size(path: Path, written: Mapping[str, int]) -> None:
    """Raise DataError where a file is absent or has not the size with which it was written."""
    found = path.stat().st_size if path.exists() else "no such file"
    if found != written["bytes"]:
        raise DataError(f"{path}: the cache is damaged; expected {written['bytes']} bytes, got {found}")


def check_content(path: Path, written: Mapping[str, int]) -> None:
    """Raise DataError where a file is not the one that was written."""
    crc32 = 0
    try:
        with open(path, "rb", buffering=0) as file:
            while data := file.read(1 << 24):
                crc32 = zlib.crc32(data, crc32)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    if crc32 != written["crc32"]:
        raise DataError(
            f"{path}: the cache is damaged; expected checksum {written['crc32']:08x}, got {crc32:08x}; prepare it again"
        )


def open_array(path: Path) -> Array:
    """A memory map; an array without elements, which cannot be mapped, is read."""
    array = np.load(path, mmap_mode=None if _is_empty(path) else "r", allow_pickle=False)
    return np.asarray(array)  # the plain view indexes faster than np.memmap


def _is_empty(path: Path) -> bool:
    with open(path, "rb") as file:
        np.lib.format.read_magic(file)
        shape, _, _ = np.lib.format.read_array_header_1_0(file)
    return 0 in shape


def gather_ragged(bounds: Array, rows: Array) -> tuple[Array, Array]:
    """Rows of a ragged array whose row i is [bounds[i], bounds[i + 1]): the positions of their elements in order, and
    where each row starts among them."""
    first = bounds[rows]
    counts = bounds[rows + 1] - first
    offsets = np.cumsum(counts) - counts
    positions = np.arange(counts.sum()) + np.repeat(first - offsets, counts)
    return positions, offsets
