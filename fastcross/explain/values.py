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
    pair: tuple[int, int],
    edges: npt.NDArray[np.float64],
    describe: Describe,
    *,
    top: int = 3,
) -> list[Driver]:
    """The combinations of a pair's values with the most of its variance: effect² · share, largest first."""
    counts: dict[tuple[object, object], int] = {}
    effects: dict[tuple[object, object], float] = {}
    rows = 0
    for batch in batches:
        both = zip(*(_keys(logit, batch, field, edges) for field in pair), strict=True)
        found = set_effects(logit, logit.projections(batch), explanation.baseline, torch.tensor([pair]))[:, 0].tolist()
        for key, effect in zip(both, found, strict=True):
            counts[key] = counts.get(key, 0) + 1
            effects[key] = effects.get(key, 0.0) + effect
        rows += len(batch)
        if rows >= ROWS:
            break
    best = sorted(counts, key=lambda key: effects[key] ** 2 / counts[key], reverse=True)[:top]
    return [
        Driver((describe(pair[0], key[0]), describe(pair[1], key[1])), effects[key] / counts[key], counts[key] / rows)
        for key in best
    ]


def _keys(logit: CrossLogit, batch: Batch, field: int, edges: npt.NDArray[np.float64]) -> Sequence[object]:
    """What tells the rows' values of a field apart."""
    single, tables = logit.embedding.num_single, len(logit.tables)
    if field < single:
        return batch.categorical[:, field].tolist()
    if field >= tables:
        column = field - tables
        return np.searchsorted(edges[column], batch.dense[:, column].double().numpy(), side="right").tolist()
    bag = batch.bags[field - single]
    values, starts = bag.values.tolist(), [*bag.offsets.tolist(), len(bag.values)]
    return [tuple(values[low:high]) for low, high in itertools.pairwise(starts)]
