"""Which crosses a trained DCN uses: every pair of fields over a data set, the values behind it, one example's logit.

Everything is measured in the logit, of a regression in the label's own unit. Each field's mean over the training data
is taken out first, so that what a field does by itself is a main effect and not a cross with every other field (see
decomposition.py). The deep network's part is reported as what it is: unexplained.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastcross.batch import Batch
from fastcross.data.encoder import Encoder, Vocabulary
from fastcross.explain.decomposition import (
    CrossLogit,
    main_effects,
    matrix_degrees,
    pair_effects,
    pairs_of,
    set_effects,
)
from fastcross.layers.cross import CrossMatrix
from fastcross.models.dcn import DCN

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]
LEAST_SHARE = 1e-12  # of the variance, below which a part is rounding
BINS = 10  # a dense field's values are told apart by tenths of the rows
ROWS = 200_000  # at most so many are looked at for values: enough for shares of a tenth of a percent

# (field, key) -> the value as a person would write it; a key is an id, the number of a bin, or a bag's ids as a tuple.
Spell = Callable[[int, object], str]


class CrossStrength(NamedTuple):
    """A pair of fields, the standard deviation of what they do together, and its square as a share of the logit's."""

    fields: tuple[str, str]
    strength: float
    share: float


class Part(NamedTuple):
    """What some fields together add to one example's logit."""

    fields: tuple[str, ...]
    effect: float


class Driver(NamedTuple):
    """One combination of two values, what it adds to the logit as a cross, and the share of the rows that have it."""

    values: tuple[str, str]
    effect: float
    share: float


@dataclass(frozen=True)
class Explanation:
    """What :func:`explain` found.

    names: the fields in the order of x0; baseline: their mean t, (k, L + 1); rows: how many were seen; main: the
    standard deviation of each field's main effect, (k,); pairs: of each pair's interaction, (k, k), symmetric with a
    zero diagonal; degrees: of the cross network's terms of degree 1, 2, …, and unexplained: of the deep network: the
    part's variance as a share of the sum of all parts' variances. deviation: of the logit itself; of: what all of this
    is measured in, the "logit" or a regression's "prediction", where unit is the deviation of the label.
    """

    names: list[str]
    baseline: Tensor
    rows: int
    main: Tensor
    pairs: Tensor
    degrees: list[float]
    unexplained: float
    deviation: float
    of: str = "logit"
    unit: float = 1.0

    def strongest(self, top: int = 10) -> list[CrossStrength]:
        """The strongest pairs, strongest first."""
        f, g = pairs_of(len(self.names)).T
        strength = self.pairs[f, g]
        order = strength.argsort(descending=True, stable=True)[:top].tolist()
        variance = max(self.deviation**2, LEAST_SHARE)
        return [
            CrossStrength((self.names[f[i]], self.names[g[i]]), float(strength[i]), float(strength[i] ** 2) / variance)
            for i in order
        ]

    def by_themselves(self) -> list[tuple[str, float]]:
        """The fields and the standard deviations of their main effects, strongest first."""
        return sorted(zip(self.names, self.main.tolist(), strict=True), key=lambda pair: -pair[1])

    def plot_pairs(self) -> "Figure":
        """The heat map of the pairs."""
        from matplotlib.figure import Figure  # which is slow to import; without pyplot, which looks for a display

        k = len(self.names)
        size = min(14.0, 4 + 0.2 * k)
        figure = Figure(figsize=(size + 1, size), layout="constrained")
        axes = figure.subplots()
        image = axes.imshow(self.pairs.numpy(), cmap="viridis")
        axes.set_xticks(range(k), self.names, rotation=90, fontsize=8)
        axes.set_yticks(range(k), self.names, fontsize=8)
        axes.set_title(f"Strength of the crosses of two fields (in the {self.of})")
        figure.colorbar(image, ax=axes, shrink=0.8, label="standard deviation of the interaction")
        return figure

    def plot_degrees(self) -> "Figure":
        """The share of the variance by degree, and the deep network's."""
        from matplotlib.figure import Figure

        parts = [(f"degree {n}", share, "tab:blue") for n, share in enumerate(self.degrees, start=1)]
        parts.append(("deep network\n(unexplained)", self.unexplained, "tab:gray"))
        shown = [part for part in parts if is_visible(part[1])] or parts
        labels, shares, colours = zip(*shown, strict=True)
        figure = Figure(figsize=(7, 0.5 * len(shares) + 1.2), layout="constrained")
        axes = figure.subplots()
        bars = axes.barh(labels, shares, color=colours)
        axes.bar_label(bars, [f"{share:.1%}" for share in shares], padding=3)
        axes.invert_yaxis()
        axes.axvline(0, color="black", linewidth=0.8)
        axes.margins(x=0.15)
        axes.set(xlabel="variance, as a share of the parts' sum", title=f"Where the {self.of} comes from")
        return figure

    def plot_fields(self, importances: Mapping[str, float], top: int = 20) -> "Figure":
        """Each field by itself in the cross network, and each column in the whole model."""
        from matplotlib.figure import Figure

        panels = [(f"by itself, in the cross network\n(standard deviation in the {self.of})", self.by_themselves())]
        if importances:
            moved = sorted(importances.items(), key=lambda pair: -pair[1])
            panels.append(("in the whole model\n(permuted: share of all changes)", moved))
        ranked = [values[:top] for _, values in panels]
        height = 0.25 * max(map(len, ranked)) + 1.2
        figure = Figure(figsize=(5 * len(panels), height), layout="constrained")
        for axes, (title, _), pairs in zip(
            figure.subplots(1, len(panels), squeeze=False)[0], panels, ranked, strict=True
        ):
            axes.barh([name for name, _ in pairs], [value for _, value in pairs])
            axes.set_ylim(max(map(len, ranked)) - 0.4, -0.6)
            axes.set_title(title, fontsize=10)
            axes.tick_params(labelsize=8)
        return figure


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
    k, layers = logit.fields, len(logit.c)
    labels = [str(i) for i in range(k)] if names is None else list(names)
    if len(labels) != k:
        raise ValueError(f"names must name {k} fields; got {len(labels)}")
    baseline = _mean_projections(logit, training or batches)
    rows, main_moments, pair_moments = 0, _Moments(k), _Moments(k * (k - 1) // 2)
    parts = _Shares(layers + 2)  # the degrees 1, …, L + 1, then the deep network
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
    unit, of = _unit(model), "prediction" if model.config.regression else "logit"
    main, pairs = main_moments.deviation() * unit, pairs * unit
    return Explanation(labels, baseline, rows, main, pairs, shares[:-1], shares[-1], deviation * unit, of, unit)


def explain_degrees(
    model: DCN,
    batches: Callable[[], Iterable[Batch]],
    *,
    training: Callable[[], Iterable[Batch]] | None = None,
    output: int = 0,
) -> tuple[list[float], float, int]:
    """Of a DCN with a matrix cross network: each degree's share of the variance, the deep network's, the rows.

    The arguments are those of :func:`explain`.
    """
    if not isinstance(model.cross, CrossMatrix) or not model.parallel:
        kind = type(model.cross).__name__
        raise ValueError(f"degrees are those of a CrossMatrix whose output the logits read; got {kind}")
    head = model.logits.weight.detach()[output, : model.cross.in_features].double()
    mean = mean_x0(model, (training or batches)())
    rows, parts = 0, _Shares(model.cross.num_layers + 2)
    with torch.no_grad():
        for batch in batches():
            degrees = matrix_degrees(model.cross, _x0(model, batch), mean, head)
            deep = _logits(model, batch, output) - degrees.sum(1)
            parts.add(torch.cat((degrees[:, 1:].T, deep[None])))
            rows += len(batch)
    shares, _ = parts.shares()
    return shares[:-1], shares[-1], rows


def _x0(model: DCN, batch: Batch) -> Tensor:
    return model.embedding(batch.dense, batch.categorical, batch.bags).double()


def _mean_projections(logit: CrossLogit, batches: Callable[[], Iterable[Batch]]) -> Tensor:
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
    logit = CrossLogit(model, output)
    return _parts(model, logit, batch, logit.projections(batch), explanation.baseline, explanation.names)


@torch.no_grad()
def example_parts(model: DCN, batch: Batch, mean: Tensor, names: Sequence[str], *, output: int = 0) -> list[Part]:
    """As :func:`explain_example`, from the mean of x0, (d,), in place of an explanation, and without a table of t."""
    logit = CrossLogit(model, output)
    return _parts(model, logit, batch, logit.of_x0(_x0(model, batch)), logit.of_x0(mean[None])[0], names)


def mean_x0(model: DCN, batches: Iterable[Batch]) -> Tensor:
    """(d,): the mean of x0 over the rows, in float64."""
    total, rows = torch.zeros(()).double(), 0
    with torch.no_grad():
        for batch in batches:
            total, rows = total + _x0(model, batch).sum(0), rows + len(batch)
    if not rows:
        raise ValueError("an explanation needs rows; got 0")
    return total / rows


def _parts(
    model: DCN, logit: CrossLogit, batch: Batch, t: Tensor, baseline: Tensor, names: Sequence[str]
) -> list[Part]:
    if len(batch) != 1:
        raise ValueError(f"an example is a batch of 1 row; got {len(batch)}")
    k = logit.fields
    constant, main = main_effects(logit, t, baseline)
    unit, zero = _unit(model), model.config.label_mean if model.config.regression else 0.0
    parts = [Part((), float(constant)), *_sorted(((names[f],), float(main[0, f])) for f in range(k))]
    for size in (2, 3):
        sets = torch.combinations(torch.arange(k), size)
        effects = set_effects(logit, t, baseline, sets)[0].tolist()
        parts += _sorted(
            (tuple(names[f] for f in chosen), effect) for chosen, effect in zip(sets.tolist(), effects, strict=True)
        )
    whole = float(logit(t.sum(1)))
    parts.append(Part(("…",), whole - sum(part.effect for part in parts)))
    parts.append(Part(("deep",), float(_deep_part(model, logit, batch, t, logit.output))))
    return [Part(fields, effect * unit + (0.0 if fields else zero)) for fields, effect in parts]


def _unit(model: DCN) -> float:
    """What 1 of the last layer's output is: a regression's predicts the standardised label."""
    return model.config.label_deviation if model.config.regression else 1.0


def is_visible(share: float) -> bool:
    """Whether it is more than 0.0 %."""
    return share >= 0.0005


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


class _Shares:
    """Of n parts: their variances as shares of these variances' sum; and the deviation of the parts' sum."""

    def __init__(self, n: int) -> None:
        self.moments = _Moments(n + 1)

    def add(self, parts: Tensor) -> None:
        """(n, B)."""
        self.moments.add(torch.cat((parts, parts.sum(0, keepdim=True))))

    def shares(self) -> tuple[list[float], float]:
        *parts, whole = self.moments.deviation().tolist()
        total = sum(part**2 for part in parts)
        return [part**2 / max(total, LEAST_SHARE) for part in parts], whole


def _deep_part(model: DCN, logit: CrossLogit, batch: Batch, t: Tensor, output: int) -> Tensor:
    """(B,): the model's logit less that of its cross network."""
    return _logits(model, batch, output) - logit(t.sum(1))


def _logits(model: DCN, batch: Batch, output: int) -> Tensor:
    """(B,): the model's logit in evaluation, in float64."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            z = model.unscaled(model(batch.dense, batch.categorical, batch.bags).double())
    finally:
        model.train(was_training)
    return z if z.dim() == 1 else z[:, output]


def _sorted(parts: Iterable[tuple[tuple[str, ...], float]]) -> list[Part]:
    return [Part(*part) for part in sorted(parts, key=lambda part: -abs(part[1]))]


def dense_edges(batches: Iterable[Batch], bins: int = BINS) -> Floats:
    """(num_dense, bins - 1): where each dense field's bins meet, with about as many rows in each."""
    seen: list[Floats] = []
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
    edges: Floats,
    spell: Spell,
    *,
    top: int = 3,
) -> list[list[Driver]]:
    """For each pair the combinations of values with the most of its variance: effect² · share, largest first."""
    keys = _Keys(logit, edges)
    seen: list[npt.NDArray[np.int64]] = []  # (pairs, rows): both keys in one number
    effects: list[Floats] = []
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
            both = (spell(pair[0], first), spell(pair[1], second))
            some.append(Driver(both, explanation.unit * float(total[i] / counts[i]), float(counts[i] / rows)))
        told.append(some)
    return told


_HALF = 32  # bits of a key: ids, numbers of bins and of bags are below 2³¹


class _Keys:
    """What tells the rows' values of a field apart, as numbers; a bag's ids are numbered as they come."""

    def __init__(self, logit: CrossLogit, edges: Floats) -> None:
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
        """Both keys, as ``spell`` knows them."""
        first, second = int(code) >> _HALF, int(code) & ((1 << _HALF) - 1)
        return self._named(pair[0], first), self._named(pair[1], second)

    def _named(self, field: int, key: int) -> object:
        return list(self.bags[field])[key] if field in self.bags else key


class Speller:
    """A :data:`Spell` by the encoder that made the ids, for the fields in the order of x0."""

    def __init__(self, encoder: Encoder, edges: Floats) -> None:
        self.schema, self.ids, self.edges = encoder.schema, (*encoder.categorical, *encoder.bags), edges
        self.numbers = encoder.numbers
        self.dates = [f"{name}.days" for name in encoder.columns.datetimes or ()]

    def __call__(self, field: int, key: object) -> str:
        single = len(self.schema.cardinalities)
        if field < single:
            return self._value(field, int(key))  # type: ignore[call-overload]
        if field < len(self.ids):
            assert isinstance(key, tuple)
            return "{" + ", ".join(self._value(field, each) for each in key) + "}"
        return self._range(field - len(self.ids), int(key))  # type: ignore[call-overload]

    def row(self, batch: Batch) -> dict[str, str]:
        """The values of a batch's only row, by field."""
        single = [self._value(f, int(i)) for f, i in enumerate(batch.categorical[0].tolist())]
        bags = [self(len(single) + i, tuple(bag.values.tolist())) for i, bag in enumerate(batch.bags)]
        dense = [self._number(i, value) for i, value in enumerate(batch.dense[0].tolist())]
        return dict(zip(self.schema.names, (*single, *bags, *dense), strict=True))

    def _value(self, field: int, key: int) -> str:
        ids = self.ids[field]
        if not isinstance(ids, Vocabulary):
            return f"#{key}" if key else "(missing)"
        if key == 0:
            return "(rare)"
        text = ids.values[key - 1].as_py()
        return "(missing)" if text is None else str(text)

    def _range(self, column: int, key: int) -> str:
        """A dense field's bin between two edges; several edges may meet in one value."""
        low = self._number(column, self.edges[column, key - 1]) if key else None
        high = self._number(column, self.edges[column, key]) if key < self.edges.shape[1] else None
        if low is None:
            return f"below {high}"
        return f"{low} and above" if high is None else f"{low} to {high}"

    def _number(self, column: int, value: float) -> str:
        """As it stood in the table; days since 1970 as the date that they are."""
        number = self.numbers.undone(column, value)
        if self.schema.dense_names[column] in self.dates:
            return str(np.datetime64(round(number), "D"))
        return f"{number:.4g}"
