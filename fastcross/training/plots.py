"""The learning curves of one or several runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fastcross.files import atomic

History = list[dict[str, float]]  # one entry per evaluation


def draw_curves(path: Path, histories: Mapping[str, History], optimum: float | None = None) -> None:
    """Logloss (left) and AUC or accuracy (right) over the training steps, one colour per entry of ``histories``."""
    from matplotlib.figure import Figure  # slow to import; without pyplot, which would look for a display

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    first = next(iter(histories.values()))[0]
    score = next((name for name in ("validation_auc", "validation_accuracy") if name in first), None)
    for index, (name, history) in enumerate(histories.items()):
        colour = f"C{index}"
        steps = [row["step"] for row in history]
        left.plot(steps, _column(history, "train_loss"), color=colour, alpha=0.4, label=f"{name} training".strip())
        if "validation_logloss" in first:
            losses = _column(history, "validation_logloss")
            left.plot(steps, losses, color=colour, marker=".", label=f"{name} validation".strip())
        if score:
            right.plot(steps, _column(history, score), color=colour, marker=".", label=name)
    if optimum is not None:
        left.axhline(optimum, color="black", linestyle=":", label="Bayes optimum")
    left.set(xlabel="step", ylabel="logloss")
    left.legend()
    right.set(xlabel="step", ylabel=score.replace("_", " ") if score else "")
    if any(histories) and score:
        right.legend()
    with atomic(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)


def _column(history: Sequence[Mapping[str, float]], name: str) -> list[float]:
    return [row[name] for row in history]
