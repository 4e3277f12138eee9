"""The figures of an explanation, as matplotlib figures that need no display."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from torch import Tensor

BARS = 12  # of a waterfall, before the rest is drawn as one


def heat_map(names: Sequence[str], pairs: Tensor) -> Figure:
    """The strength of every pair of fields: the standard deviation of its interaction in the logit."""
    k = len(names)
    size = min(14.0, 4 + 0.2 * k)
    figure = Figure(figsize=(size + 1, size), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(pairs.numpy(), cmap="viridis")
    axes.set_xticks(range(k), names, rotation=90, fontsize=8)
    axes.set_yticks(range(k), names, fontsize=8)
    axes.set_title("Strength of the crosses of two fields (in the logit)")
    figure.colorbar(image, ax=axes, shrink=0.8, label="standard deviation of the interaction")
    return figure


def degree_bars(degrees: Sequence[float], unexplained: float) -> Figure:
    """The share of the logit's variance by degree, and the deep network's."""
    labels = [*(f"degree {n + 1}" for n in range(len(degrees))), "deep network\n(unexplained)"]
    shares = [*degrees, unexplained]
    figure = Figure(figsize=(7, 0.5 * len(shares) + 1.2), layout="constrained")
    axes = figure.subplots()
    colours = [*["tab:blue"] * len(degrees), "tab:gray"]
    bars = axes.barh(labels, shares, color=colours)
    axes.bar_label(bars, [f"{share:.1%}" for share in shares], padding=3)
    axes.invert_yaxis()
    axes.axvline(0, color="black", linewidth=0.8)
    axes.margins(x=0.15)
    axes.set(xlabel="share of the logit's variance (covariance with the logit)", title="Where the logit comes from")
    return figure


def waterfall(parts: Sequence[tuple[tuple[str, ...], float]], values: dict[str, str]) -> Figure:
    """One example's logit, part by part (fields, effect); ``values`` are the fields', as a person would write them."""
    (_, constant), *rest = parts
    ranked = sorted(rest, key=lambda part: -abs(part[1]))
    shown, others = ranked[:BARS], sum(effect for _, effect in ranked[BARS:])
    steps = [("constant", constant), *((_label(fields, values), effect) for fields, effect in shown)]
    steps.append((f"{len(ranked) - len(shown)} smaller parts", others))
    figure = Figure(figsize=(9, 0.4 * len(steps) + 1.5), layout="constrained")
    axes = figure.subplots()
    at = 0.0
    for row, (_, effect) in enumerate(steps):
        axes.barh(row, effect, left=at, color="tab:gray" if row == 0 else "tab:red" if effect > 0 else "tab:blue")
        axes.text(max(at, at + effect), row, f" {effect:+.3f}", va="center", fontsize=8)
        at += effect
    axes.axvline(at, color="black", linestyle=":", label=f"logit {at:+.3f}")
    axes.set_yticks(range(len(steps)), [label for label, _ in steps], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    axes.set(xlabel="logit", title="One example's logit")
    return figure


def _label(fields: tuple[str, ...], values: dict[str, str]) -> str:
    if fields == ("…",):
        return "crosses of four fields and more"
    if fields == ("deep",):
        return "deep network (unexplained)"
    return " × ".join(f"{field} = {values[field]}" if field in values else field for field in fields)
