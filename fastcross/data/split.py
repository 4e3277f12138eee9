"""Which row belongs to which part: train, validation, test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

PARTS = ("train", "validation", "test")
# A point in time, or any number: nanoseconds and ids of 64 bits are not all float64s.
TIME = np.dtype([("rounded", np.float64), ("rest", np.int64)])


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
    time: npt.NDArray[Any] | None = None,
) -> npt.NDArray[Any]:
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
