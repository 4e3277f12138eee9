"""What becomes of a number before a model sees it: one record per numeric feature, fitted on the training part.

    x  ->  (f(clip(x, low, high)) - mean) · scale  ->  float32        f(x) = x   or   sign(x) · log(1 + |x| / unit)

low and high are the least and the largest training value: a network says nothing sensible of what lies beyond. mean and
scale make mean 0 and standard deviation 1 of f's training values. "standard" is f(x) = x, "log" the paper's logarithm
(unit = 1, section 4.2). "auto" takes the logarithm of a column with heavy tails, in a unit of its own, and low and high
are at most ``WIDEST`` standard deviations from the mean. "none" leaves a number as it is.

A missing number becomes 0, the mean; where the training part has gaps, a second feature ``NAME.missing`` says so by 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from fastcross.data.blocks import Spool, map_in_order

Array = npt.NDArray[Any]
SAMPLE = 1 << 17  # rows that "auto" looks at
HEAVY = 10.0  # kurtosis: 1.8 of a uniform column, 3 of a normal, 6 of a Laplace, 9 of an exponential one
SMALL = 0.1  # the quantile of |x| that is the unit of a logarithm: 1 of most counts
WIDEST = 8.0  # standard deviations
LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Number:
    """One feature's record; the defaults leave a number as it is."""

    log: bool = False
    unit: float = 1.0
    mean: float = 0.0
    scale: float = 1.0
    low: float = -LARGEST
    high: float = LARGEST
    missing: bool = False  # whether a feature says that the number is

    @property
    def description(self) -> str:
        unit = "" if self.unit == 1 else f" / {self.unit:.3g}"
        words = [f"sign(x) · log(1 + |x|{unit})"] if self.log else []
        if self.low > -LARGEST:
            words += [f"standardised, {self.low:.4g} … {self.high:.4g}" if self.scale else "constant"]
        return ", ".join([*words, *(["missing values flagged"] if self.missing else [])]) or "as it is"

    def undone(self, value: float) -> float:
        x = value / (self.scale or 1) + self.mean
        return float(np.copysign(np.expm1(min(abs(x), 700)) * self.unit, x)) if self.log else x


@dataclass(frozen=True)
class Numbers:
    """Of the numeric features in order."""

    records: tuple[Number, ...]

    def __call__(self, dense: Array) -> Array:
        """(rows, columns) float64, NaN where missing -> (rows, columns + flags) float32."""
        missing = np.isnan(dense)
        scaled = (self.logged(np.clip(dense, self.low, self.high)) - self.mean) * self.scale
        scaled = np.where(missing, 0.0, scaled).astype(np.float32)
        return np.concatenate([scaled, missing[:, self.flagged]], axis=1) if len(self.flagged) else scaled

    def logged(self, dense: Array) -> Array:
        if not self.log.any():
            return dense
        x = dense[:, self.log]
        found = np.array(dense, np.float64)
        found[:, self.log] = np.copysign(np.log1p(np.abs(x) / self.unit[self.log]), x)
        return found

    def undone(self, feature: int, value: float) -> float:
        """What stood in the table where the model sees this value of a dense feature."""
        if feature >= len(self.records):
            return value
        return self.records[feature].undone(value)

    def names(self, columns: Sequence[str]) -> tuple[str, ...]:
        """The dense features: the columns, then the flags."""
        return (*columns, *(f"{columns[i]}.missing" for i in self.flagged))

    def only(self, kept: Iterable[bool]) -> Numbers:
        return Numbers(tuple(itertools.compress(self.records, kept)))

    @cached_property
    def flagged(self) -> Array:
        """The columns that have a flag."""
        return np.flatnonzero([record.missing for record in self.records])

    @cached_property
    def log(self) -> Array:
        return np.array([record.log for record in self.records], bool)

    @cached_property
    def unit(self) -> Array:
        return self._array("unit")

    @cached_property
    def mean(self) -> Array:
        return self._array("mean")

    @cached_property
    def scale(self) -> Array:
        return self._array("scale")

    @cached_property
    def low(self) -> Array:
        return self._array("low")

    @cached_property
    def high(self) -> Array:
        return self._array("high")

    def _array(self, name: str) -> Array:
        return np.array([getattr(record, name) for record in self.records], np.float64)

    def to_list(self) -> list[dict[str, Any]]:
        return [asdict(record) for record in self.records]

    @classmethod
    def from_list(cls, saved: Sequence[dict[str, Any]]) -> Numbers:
        return cls(tuple(Number(**record) for record in saved))


def fit_numbers(spool: Spool, part: Array) -> Numbers:
    """Over the training part."""
    transforms, dense = spool.columns.transforms, len(spool.columns.dense or ())
    if not transforms:
        return Numbers(())
    logged: list[tuple[bool, float]] = [(transform == "log", 1.0) for transform in transforms]
    if "auto" in transforms:
        sample = _sample(spool, part)
        logged = [_choose(sample[:, i]) if transform == "auto" else logged[i] for i, transform in enumerate(transforms)]
    plain = Numbers(tuple(Number(log=log, unit=unit) for log, unit in logged))
    count, mean, squares, low, high, rows = _moments(spool, part, plain)
    deviation = np.sqrt(squares / np.maximum(count, 1))
    # What rounding leaves of a constant's deviation is no deviation.
    varies = deviation > 1e-12 * np.maximum(np.abs(mean), np.finfo(np.float64).tiny)
    scale = np.divide(1.0, deviation, out=np.zeros_like(deviation), where=varies)
    records = []
    for i, transform in enumerate(transforms):
        flag = bool(0 < count[i] < rows) and i < dense  # of a missing date the weekday says so
        if transform == "none":
            records.append(Number(missing=flag))
            continue
        ends = (float(low[i]), float(high[i])) if count[i] else (0.0, 0.0)
        record = Number(*logged[i], float(mean[i]), float(scale[i]), *ends, flag)
        if transform == "auto" and record.scale:
            ends = max(ends[0], record.undone(-WIDEST)), min(ends[1], record.undone(WIDEST))
            record = replace(record, low=ends[0], high=ends[1])
        records.append(record)
    return Numbers(tuple(records))


def _training_blocks(spool: Spool, part: Array) -> Iterator[tuple[int, Array]]:
    for i, rows in spool.blocks():
        yield i, part[rows] == 0


def _sample(spool: Spool, part: Array) -> Array:
    """Every so many rows of the training part, which depends on the data alone and not on how it was cut."""
    every = -(-int((part == 0).sum()) // SAMPLE)
    found, before = [], 0
    for i, train in _training_blocks(spool, part):
        count = int(train.sum())
        found.append(spool.dense(i)[train][-before % every :: every])
        before += count
    return np.concatenate(found).astype(np.float64)


def _choose(x: Array) -> tuple[bool, float]:
    """Whether to take the logarithm, and in which unit: where that makes heavy tails less heavy by half."""
    x = x[~np.isnan(x)]
    sizes = np.abs(x[x != 0])
    if not len(sizes) or _kurtosis(x) <= HEAVY:
        return False, 1.0
    unit = float(np.quantile(sizes, SMALL))
    logged = np.copysign(np.log1p(np.abs(x) / unit), x)
    return (True, unit) if _kurtosis(logged) < _kurtosis(x) / 2 else (False, 1.0)


def _kurtosis(x: Array) -> float:
    largest = np.abs(x).max()
    z = x / largest - np.mean(x / largest)
    squares = float(np.mean(z**2))
    return float(np.mean(z**4)) / squares**2 if squares > 0 else 0.0


def _moments(spool: Spool, part: Array, plain: Numbers) -> tuple[Array, Array, Array, Array, Array, int]:
    """Count, mean and squares of f(x) (merged as Chan et al. do), the least and largest x, and the rows."""

    def of_block(block: tuple[int, Array]) -> tuple[Any, ...]:
        i, train = block
        raw = spool.dense(i)[train].astype(np.float64, copy=False)
        x, there = plain.logged(raw), ~np.isnan(raw)
        n = there.sum(axis=0)
        m = np.where(there, x, 0).sum(axis=0) / np.maximum(n, 1)
        squares = np.where(there, (x - m) ** 2, 0).sum(axis=0)
        low, high = (np.where(there, raw, end) for end in (np.inf, -np.inf))
        return n, m, squares, low.min(axis=0, initial=np.inf), high.max(axis=0, initial=-np.inf), len(x)

    d = len(plain.records)
    count, mean, squares, rows = np.zeros(d), np.zeros(d), np.zeros(d), 0
    low, high = np.full(d, np.inf), np.full(d, -np.inf)
    for n, m, s, least, largest, size in map_in_order(of_block, _training_blocks(spool, part)):
        delta, total = m - mean, np.maximum(count + n, 1)
        squares += s + delta**2 * count * n / total
        mean += delta * n / total
        count += n
        rows += size
        low, high = np.minimum(low, least), np.maximum(high, largest)
    return count, mean, squares, low, high, rows
