"""The learning curves of one or several runs."""

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

History = list[dict[str, float]]  # one entry per evaluation


def draw_curves(histories: Mapping[str, History], optimum: float | None = None) -> bytes:
    """A PNG of :func:`curves`."""
    png = io.BytesIO()
    curves(histories, optimum).savefig(png, format="png", dpi=120)
    return png.getvalue()


def curves(histories: Mapping[str, History], optimum: float | None = None) -> "Figure":
    """Logloss (left) and AUC or accuracy (right) over the steps, one colour per entry of ``histories``; of a regression
    the training loss, in variances of the label, and the RMSE.

    The legend stands below both, where no curve can run behind it.
    """
    from matplotlib.figure import Figure  # slow to import; without pyplot, which would look for a display
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(10, 4.4), layout="constrained")
    first = next(iter(histories.values()))[0]
    score = next((name for name in ("validation_auc", "validation_accuracy", "validation_rmse") if name in first), "")
    left, *others = figure.subplots(1, 2 if score else 1, squeeze=False)[0]
    training: dict[str, Any] = {"alpha": 0.4}
    validation: dict[str, Any] = {"marker": "."}
    best: dict[str, Any] = {"color": "black", "linestyle": ":"}
    entries = []
    for index, (name, history) in enumerate(histories.items()):
        colour = f"C{index}"
        steps = [row["step"] for row in history]
        left.plot(steps, [row["train_loss"] for row in history], color=colour, **training)
        if "validation_logloss" in first:
            left.plot(steps, [row["validation_logloss"] for row in history], color=colour, **validation)
        for right in others:
            right.plot(steps, [row[score] for row in history], color=colour, **validation)
        if name:
            entries.append(Line2D([], [], color=colour, label=name))
    colour = "grey" if entries else "C0"
    entries.append(Line2D([], [], color=colour, label="training", **training))
    if score:
        entries.append(Line2D([], [], color=colour, label="validation", **validation))
    if optimum is not None:
        left.axhline(optimum, **best)
        entries.append(Line2D([], [], label="Bayes optimum", **best))
    left.set(xlabel="step", ylabel="squared error" if score == "validation_rmse" else "logloss")
    for right in others:
        right.set(xlabel="step", ylabel=score.replace("_", " "))
    figure.legend(handles=entries, loc="outside lower center", ncols=5, frameon=False)
    return figure
