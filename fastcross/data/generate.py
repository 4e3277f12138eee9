"""The embedded default: a seeded click log in Criteo's format with planted crosses and a known best logloss.

Every categorical value carries a hidden number ("latent") and three groups of fields add up theirs:
u (C1 … C4: who), v (C5 … C8: what), t (C9 … C12: where). A click has the probability sigmoid(logit) with

    logit = bias + linear(C13 … C16, log I1 … log I4)  +  degree_2 · u v  +  degree_3 · u v t

The latents of a field have mean zero under the field's own popularity, so a product averages to nothing over any of its
factors: logistic regression sees only the linear part, a factorisation machine also u v, and the cross network of the
paper, whose layers multiply linear forms of x0, can write down the whole logit with two layers. The remaining columns
are noise.

Labels are drawn from these probabilities, so no model can expect a lower logloss than the probabilities themselves
have: that is the Bayes optimum reported here, for all rows and for each part of the default split.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict, dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv

from fastcross.data.cache import PARTS, Split, assign_parts
from fastcross.files import atomic

CHUNK = 1 << 18  # rows drawn and written at a time
POPULARITY = 3  # value j of a field is floor(cardinality · uniform ** POPULARITY): few frequent values, a long tail
FIELDS_U, FIELDS_V, FIELDS_T, FIELDS_LINEAR = (0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)
SIGNAL_CARDINALITY = 12  # of the fields that matter: each value is seen often enough in a short log to be learned
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class ClickLogInfo:
    """What is known about a generated log."""

    rows: int
    seed: int
    click_rate: float
    bayes_logloss: float  # of all rows
    bayes_logloss_parts: dict[str, float]  # of "train", "validation", "test" under the split named below
    base_logloss: float  # of predicting the click rate for every row
    linear_logloss: float  # about that of the best model without crosses: the true linear part, flattened
    split: str
    split_seed: int


def write_click_log(
    path: str | PathLike[str],
    rows: int,
    seed: int = 0,
    *,
    degree_2: float = 1.0,
    degree_3: float = 2.0,
    largest_vocabulary: int = 1_000,
    split: str = "time",
    split_seed: int = 0,
) -> ClickLogInfo:
    """Write `rows` rows to `path` (gzip where it ends in .gz) and what is known about them to `path` + ".info.json".

    degree_2, degree_3: strength of the planted crosses in the logit (0 leaves one out); largest_vocabulary: distinct
    values of the largest noise column, the others spread geometrically below it; split, split_seed: what `prepare`
    will be given, so that the optimum of each part is that of its own rows.
    """
    if rows < 1:
        raise ValueError(f"rows must be at least 1; got {rows}")
    path = Path(path)
    world = _World(seed, degree_2, degree_3, largest_vocabulary)
    label = np.empty(rows, bool)
    truth = np.empty((rows, 2))  # probability with and without the crosses
    compress = partial(gzip.open, compresslevel=1) if path.suffix == ".gz" else open
    with atomic(path) as temporary, compress(temporary, "wb") as file:
        for chunk, first in enumerate(range(0, rows, CHUNK)):
            last = min(first + CHUNK, rows)
            table, label[first:last], truth[first:last] = world.draw(np.random.default_rng((seed, chunk)), last - first)
            file.write(_tab_separated(table))
    part = assign_parts(rows, Split.parse(split), split_seed)
    info = ClickLogInfo(
        rows=rows,
        seed=seed,
        click_rate=float(label.mean()),
        bayes_logloss=_logloss(label, truth[:, 0]),
        bayes_logloss_parts={n: _logloss(label[part == i], truth[part == i, 0]) for i, n in enumerate(PARTS)},
        base_logloss=_logloss(label, np.full(rows, np.clip(label.mean(), 1e-6, 1 - 1e-6))),
        linear_logloss=_logloss(label, truth[:, 1]),
        split=split,
        split_seed=split_seed,
    )
    with atomic(path.with_name(path.name + ".info.json")) as note:
        note.write_text(json.dumps(asdict(info), indent=2) + "\n")
    return info


def read_info(path: str | PathLike[str]) -> ClickLogInfo | None:
    """What write_click_log noted beside a log, or None for a log it did not write."""
    note = Path(path).with_name(Path(path).name + ".info.json")
    try:
        return ClickLogInfo(**json.loads(note.read_text())) if note.exists() else None
    except (ValueError, TypeError):
        return None  # damaged: as good as none


class _World:
    """The hidden truth of one seed: cardinalities, latents, weights, and how values are spelt."""

    def __init__(self, seed: int, degree_2: float, degree_3: float, largest_vocabulary: int) -> None:
        rng = np.random.default_rng(seed)
        signal = len(FIELDS_U + FIELDS_V + FIELDS_T + FIELDS_LINEAR)
        noise = np.geomspace(4, max(largest_vocabulary, 4), 26 - signal).round().astype(np.int64)
        self.cardinalities = np.concatenate([np.full(signal, SIGNAL_CARDINALITY), noise])
        self.degree_2, self.degree_3 = degree_2, degree_3
        self.latents = [_latent(rng, SIGNAL_CARDINALITY) for _ in range(signal)]
        self.linear = rng.choice([-0.3, 0.3], len(FIELDS_LINEAR))
        self.slopes = rng.choice([-0.2, 0.2], 4)  # of log(1 + I1) ... log(1 + I4)
        self.missing = rng.uniform(0.0, 0.3, 39) * (np.arange(39) % 3 == 0)  # a third of the columns have gaps
        self.missing[13 : 13 + signal] = 0.0  # a missing value would take its latent with it
        self.salt = rng.integers(0, 1 << 32, 26, dtype=np.uint32)

    def draw(self, rng: np.random.Generator, n: int) -> tuple[pa.Table, Array, Array]:
        """n rows: the table, the labels, and the probabilities with and without the crosses."""
        counts = np.floor(np.exp(rng.normal(1.0, 1.3, (13, n)))).astype(np.int64)
        counts[1] -= 2  # Criteo's second integer goes below zero
        absent = rng.random((39, n), dtype=np.float32) < self.missing[:, None]
        counts[absent[:13]] = 0  # missing reads as 0, so it has to mean 0
        values = [(c * rng.random(n) ** POPULARITY).astype(np.int64) for c in self.cardinalities]

        def total(fields: tuple[int, ...]) -> Array:
            return sum(self.latents[f][values[f]] for f in fields) / np.sqrt(len(fields))

        linear = sum(w * self.latents[f][values[f]] for w, f in zip(self.linear, FIELDS_LINEAR, strict=True)) - 0.8
        linear += sum(s * (_log(counts[i]) - 1.2) for i, s in enumerate(self.slopes))
        u, v, t = total(FIELDS_U), total(FIELDS_V), total(FIELDS_T)
        probability = 1 / (1 + np.exp(-(linear + self.degree_2 * u * v + self.degree_3 * u * v * t)))
        # A logit blurred by a spread s is flattened by about sqrt(1 + pi s² / 8) once s is averaged out.
        spread = self.degree_2**2 + self.degree_3**2
        without = 1 / (1 + np.exp(-linear / np.sqrt(1 + np.pi * spread / 8)))
        label = rng.random(n) < probability

        columns: list[pa.Array] = [pa.array(label.astype(np.int8))]
        columns += [pa.array(counts[i], mask=absent[i]) for i in range(13)]
        for field, value in enumerate(values):
            # Multiplying by an odd number permutes the 32-bit numbers: distinct values stay distinct.
            spelt = (np.arange(self.cardinalities[field], dtype=np.uint32) * np.uint32(2654435761)) ^ self.salt[field]
            columns.append(_hexadecimal(spelt).take(pa.array(value, mask=absent[13 + field])))
        table = pa.table(columns, names=[str(i) for i in range(40)])
        return table, label, np.stack([probability, without], axis=1)


def _log(x: Array) -> Array:
    return np.sign(x) * np.log1p(np.abs(x))


def _latent(rng: np.random.Generator, cardinality: int) -> Array:
    """Normal numbers, one per value, of mean 0 and variance 1 under the popularity of the values."""
    edge = (np.arange(cardinality + 1) / cardinality) ** (1 / POPULARITY)
    popularity = np.diff(edge)
    latent = rng.normal(size=cardinality)
    latent -= popularity @ latent
    return latent / np.sqrt(popularity @ latent**2)


def _hexadecimal(numbers: Array) -> pa.Array:
    """32-bit numbers as strings of eight hexadecimal digits."""
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)
    shifts = np.arange(28, -1, -4, dtype=np.uint32)
    data = digits[(numbers[:, None] >> shifts) & 15]
    offsets = np.arange(0, 8 * len(numbers) + 1, 8, dtype=np.int32)
    return pa.Array.from_buffers(pa.string(), len(numbers), [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def _tab_separated(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    options = pyarrow.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none", batch_size=1 << 16)
    pyarrow.csv.write_csv(table, sink, options)
    return sink.getvalue().to_pybytes()


def _logloss(label: Array, probability: Array) -> float:
    p = np.clip(np.asarray(probability, np.float64), 1e-12, 1 - 1e-12)
    return float(-np.mean(np.log(np.where(label, p, 1 - p)))) if len(p) else float("nan")
