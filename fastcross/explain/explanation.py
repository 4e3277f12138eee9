"""Which crosses a trained DCN uses: the strength of every pair of fields over a data set, and one example's logit.

Everything is measured in the logit. Each field's mean over the training data is taken out first, so that what a field
does by itself is a main effect and not a cross with every other field (see decomposition.py). The deep network's part
is reported as what it is: unexplained.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fastcross.batch import Batch
from fastcross.explain.decomposition import (
    CrossLogit,
    field_names,
    main_effects,
    pair_effects,
    pairs_of,
    set_effects,
)
from fastcross.models.dcn import DCN

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEAST_SHARE = 1e-12  # of the variance, below which a part is rounding


class Cross(NamedTuple):
    """A pair of fields, the standard deviation of what they do together, and its square as a share of the logit's."""

    fields: tuple[str, str]
    strength: float
    share: float


class Part(NamedTuple):
    """What some fields together add to one example's logit."""

    fields: tuple[str, ...]
    effect: float


@dataclass(frozen=True)
class Explanation:
    """What :func:`explain` found.

    names: the fields in the order of x0; baseline: their mean t, (k, L + 1); rows: how many were seen; main: the
    standard deviation of each field's main effect, (k,); pairs: of each pair's interaction, (k, k), symmetric with a
    zero diagonal; degrees: the share of the logit's variance that the cross network's terms of degree 1, 2, … bring,
    and unexplained: that of the deep network; they sum to 1. deviation: of the logit itself.
    """

    names: list[str]
    baseline: Tensor
    rows: int
    main: Tensor
    pairs: Tensor
    degrees: list[float]
    unexplained: float
    deviation: float

    def strongest(self, top: int = 10) -> list[Cross]:
        """The strongest pairs, strongest first."""
        f, g = pairs_of(len(self.names)).T
        strength = self.pairs[f, g]
        order = strength.argsort(descending=True, stable=True)[:top].tolist()
        variance = max(self.deviation**2, LEAST_SHARE)
        return [
            Cross((self.names[f[i]], self.names[g[i]]), float(strength[i]), float(strength[i] ** 2) / variance)
            for i in order
        ]

    def plot_pairs(self) -> "Figure":
        """The heat map of the pairs."""
        from fastcross.explain.plots import heat_map  # with matplotlib, which is slow to import

        return heat_map(self.names, self.pairs)

    def plot_degrees(self) -> "Figure":
        """The share of the variance by degree."""
        from fastcross.explain.plots import degree_bars

        return degree_bars(self.degrees, self.unexplained)


def explain(
    model: DCN,
    batches: Callable[[], Iterable[Batch]],
    *,
    training: Callable[[], Iterable[Batch]] | None = None,
    names: Sequence[str] | None = None,
    output: int = 0,
) -> Explanation:
    """Measure every main effect and every pair of fields over the rows of ``batches()``.

    Args:
        model: a DCN with a cross network beside the deep one; it is left in the mode it was in.
        batches: called for the rows to explain; twice, unless ``training`` is given. Batches of about 1,024 rows, whose
            pairs stay within a few megabytes, are the fastest.
        training: called for the rows whose means are the baseline; the same rows if None.
        names: of the categorical fields, the bags, then the dense ones.
        output: which of the model's outputs.
    """
    logit = CrossLogit(model, output)
    labels = field_names(names, logit.fields)
    baseline = mean_projections(logit, training or batches)
    k, layers = logit.fields, len(logit.c)
    rows, main_moments, pair_moments = 0, _Moments(k), _Moments(k * (k - 1) // 2)
    parts = _Covariance(layers + 2)  # the degrees 1, …, L + 1, then the deep network
    for batch in batches():
        t = logit.projections(batch)
        constant, main = main_effects(logit, t, baseline)
        main_moments.add(main.T)
        pair_moments.add(pair_effects(logit, t, baseline, main, constant))
        deep = _deep_part(model, logit, batch, t, output)
        parts.add(torch.cat((logit.degrees(t, baseline)[:, 1:].T, deep[None])))
        rows += len(batch)
    pairs = torch.zeros((k, k), dtype=torch.float64)
    f, g = pairs_of(k).T
    pairs[f, g] = pairs[g, f] = pair_moments.deviation()
    shares, deviation = parts.shares()
    return Explanation(labels, baseline, rows, main_moments.deviation(), pairs, shares[:-1], shares[-1], deviation)


def mean_projections(logit: CrossLogit, batches: Callable[[], Iterable[Batch]]) -> Tensor:
    """(k, L + 1): the fields' mean t."""
    total, rows = torch.zeros(()), 0
    for batch in batches():
        total, rows = total + logit.projections(batch).sum(0), rows + len(batch)
    if not rows:
        raise ValueError("an explanation needs rows; got 0")
    return total / rows


def explain_example(model: DCN, batch: Batch, explanation: Explanation, *, output: int = 0) -> list[Part]:
    """One example's logit as a sum: constant (), main effects, pairs, triples, all higher crosses, the deep network.

    Each group but the first is sorted by size. The parts of ("…",), crosses of four fields and more, and ("deep",) are
    single numbers.
    """
    if len(batch) != 1:
        raise ValueError(f"an example is a batch of 1 row; got {len(batch)}")
    logit = CrossLogit(model, output)
    t, names, k = logit.projections(batch), explanation.names, logit.fields
    constant, main = main_effects(logit, t, explanation.baseline)
    parts = [Part((), float(constant)), *_sorted(((names[f],), float(main[0, f])) for f in range(k))]
    for size in (2, 3):
        sets = torch.combinations(torch.arange(k), size)
        effects = set_effects(logit, t, explanation.baseline, sets)[0].tolist()
        parts += _sorted(
            (tuple(names[f] for f in chosen), effect) for chosen, effect in zip(sets.tolist(), effects, strict=True)
        )
    whole = float(logit(t.sum(1)))
    parts.append(Part(("…",), whole - sum(part.effect for part in parts)))
    parts.append(Part(("deep",), float(_deep_part(model, logit, batch, t, output))))
    return parts


def matrix_crosses(weight: Tensor, columns: Sequence[slice]) -> Tensor:
    """The strength of each pair of fields in a matrix cross layer of DCN-V2, (k, k): ‖W_fg + W_gfᵀ‖ of its blocks.

    x_fᵀ W_fg x_g and x_gᵀ W_gf x_f are the same cross, so that only their sum means anything. The diagonal is zero.
    """
    if weight.dim() != 2 or weight.shape[0] != weight.shape[1]:
        raise ValueError(f"weight must be (d, d); got {tuple(weight.shape)}")
    both = weight.detach().double() + weight.detach().double().T
    k = len(columns)
    strength = torch.zeros((k, k), dtype=torch.float64)
    for f, g in pairs_of(k).tolist():
        strength[f, g] = strength[g, f] = both[columns[f], columns[g]].norm()
    return strength


class _Moments:
    """Sums of n quantities and of their squares."""

    def __init__(self, n: int) -> None:
        self.count, self.total, self.squares = 0, torch.zeros(n).double(), torch.zeros(n).double()

    def add(self, values: Tensor) -> None:
        """(n, B)."""
        self.count += values.shape[1]
        self.total += values.sum(1)
        self.squares += values.square().sum(1)

    def deviation(self) -> Tensor:
        mean = self.total / max(self.count, 1)
        return (self.squares / max(self.count, 1) - mean.square()).clamp(min=0).sqrt()


class _Covariance:
    """Of n parts with their sum: which share of the sum's variance each part brings."""

    def __init__(self, n: int) -> None:
        self.count, self.total = 0, torch.zeros(n + 1).double()
        self.products = torch.zeros(n + 1).double()

    def add(self, parts: Tensor) -> None:
        """(n, B)."""
        whole = parts.sum(0)
        both = torch.cat((parts, whole[None]))
        self.count += both.shape[1]
        self.total += both.sum(1)
        self.products += (both * whole).sum(1)

    def shares(self) -> tuple[list[float], float]:
        mean = self.total / max(self.count, 1)
        covariance = self.products / max(self.count, 1) - mean * mean[-1]
        variance = float(covariance[-1].clamp(min=0))
        return [float(value) / max(variance, LEAST_SHARE) for value in covariance[:-1]], variance**0.5


def _deep_part(model: DCN, logit: CrossLogit, batch: Batch, t: Tensor, output: int) -> Tensor:
    """(B,): the model's logit less that of its cross network."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            z = model.unscaled(model(batch.dense, batch.categorical, batch.bags).double())
    finally:
        model.train(was_training)
    z = z if z.dim() == 1 else z[:, output]
    return z - logit(t.sum(1))


def _sorted(parts: Iterable[tuple[tuple[str, ...], float]]) -> list[Part]:
    return [Part(*part) for part in sorted(parts, key=lambda part: -abs(part[1]))]
