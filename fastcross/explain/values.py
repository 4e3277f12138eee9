"""Which values drive a cross: the combinations of two fields' values that bring most of its variance."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fastcross.batch import Batch
from fastcross.explain.decomposition import CrossLogit, set_effects
from fastcross.explain.explanation import Explanation

BINS = 10  # a dense field's values are told apart by tenths of the rows
ROWS = 200_000  # at most so many are looked at: enough for shares of a tenth of a percent

# (field, key) -> how a person would write the value; the keys are ids, numbers of bins, or a bag's ids as a tuple.
Describe = Callable[[int, object], str]


class Driver(NamedTuple):
    """One combination of values, what it adds to the logit as a cross, and the share of the rows that have it."""

    values: tuple[str, str]
    effect: float
    share: float


def dense_edges(batches: Iterable[Batch], bins: int = BINS) -> npt.NDArray[np.float64]:
    """(num_dense, bins - 1): where each dense field's bins meet, with about as many rows in each."""
    seen: list[npt.NDArray[np.float64]] = []
    rows = 0
    for batch in batches:
        seen.append(batch.dense.double().numpy())
        rows += len(batch)
        if rows >= ROWS:
            break
    return np.quantile(np.concatenate(seen), np.arange(1, bins) / bins, axis=0).T


def drivers(
    logit: CrossLogit,
    batches: Iterable[Batch],
    explanation: Explanation,
    pairs: Sequence[tuple[int, int]],
    edges: npt.NDArray[np.float64],
    describe: Describe,
    *,
    top: int = 3,
) -> list[list[Driver]]:
    """For each pair the combinations of values with the most of its variance: effect² · share, largest first."""
    keys = _Keys(logit, edges)
    seen: list[npt.NDArray[np.int64]] = []  # (pairs, rows): both keys in one number
    effects: list[npt.NDArray[np.float64]] = []
    rows = 0
    for batch in batches:
        of_field = {field: keys.of(batch, field) for field in sorted({field for pair in pairs for field in pair})}
        seen.append(np.stack([of_field[f] << _HALF | of_field[g] for f, g in pairs]))
        found = set_effects(logit, logit.projections(batch), explanation.baseline, torch.tensor(pairs))
        effects.append(found.numpy().T)
        rows += len(batch)
        if rows >= ROWS:
            break
    told = []
    for pair, codes, values in zip(pairs, np.concatenate(seen, 1), np.concatenate(effects, 1), strict=True):
        combinations, place, counts = np.unique(codes, return_inverse=True, return_counts=True)
        total = np.bincount(place, weights=values)
        best = np.argsort(-(total**2) / counts, kind="stable")[:top]
        some = []
        for i in best:
            first, second = keys.split(combinations[i], pair)
            both = (describe(pair[0], first), describe(pair[1], second))
            some.append(Driver(both, float(total[i] / counts[i]), float(counts[i] / rows)))
        told.append(some)
    return told


_HALF = 32  # bits of a key: ids, numbers of bins and of bags are below 2³¹


class _Keys:
    """What tells the rows' values of a field apart, as numbers; a bag's ids are numbered as they come."""

    def __init__(self, logit: CrossLogit, edges: npt.NDArray[np.float64]) -> None:
        self.single, self.tables, self.edges = logit.embedding.num_single, len(logit.tables), edges
        self.bags: dict[int, dict[tuple[int, ...], int]] = {}

    def of(self, batch: Batch, field: int) -> npt.NDArray[np.int64]:
        if field < self.single:
            return batch.categorical[:, field].long().numpy()
        if field >= self.tables:
            column = field - self.tables
            return np.searchsorted(self.edges[column], batch.dense[:, column].double().numpy(), side="right")
        bag, numbers = batch.bags[field - self.single], self.bags.setdefault(field, {})
        values, starts = bag.values.tolist(), [*bag.offsets.tolist(), len(bag.values)]
        rows = (tuple(values[low:high]) for low, high in itertools.pairwise(starts))
        return np.array([numbers.setdefault(ids, len(numbers)) for ids in rows], np.int64)

    def split(self, code: np.int64, pair: tuple[int, int]) -> tuple[object, object]:
        """Both keys, as ``describe`` knows them."""
        first, second = int(code) >> _HALF, int(code) & ((1 << _HALF) - 1)
        return self._named(pair[0], first), self._named(pair[1], second)

    def _named(self, field: int, key: int) -> object:
        return list(self.bags[field])[key] if field in self.bags else key
