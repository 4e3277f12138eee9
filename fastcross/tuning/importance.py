"""Which parameters of a search mattered, drawn: the share of the logloss's variance that each brings (PED-ANOVA)."""

import io
import warnings
from collections.abc import Mapping

from fastcross.tuning.study import Study

LEAST_TRIALS = 4  # complete ones, below which importances are noise


def importances(study: Study, model: str) -> dict[str, float] | None:
    """By parameter, largest first; they sum to 1. None where too few trials ran to their end."""
    import optuna

    complete = [trial for trial in study.trials(model) if trial.state == optuna.trial.TrialState.COMPLETE]
    varied = {
        name for trial in complete for name in trial.params if len({one.params.get(name) for one in complete}) > 1
    }
    if len(complete) < LEAST_TRIALS or not varied:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # experimental in Optuna 4
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        return optuna.importance.get_param_importances(study.search(model), evaluator=evaluator, params=sorted(varied))


def draw_importances(found: Mapping[str, Mapping[str, float]]) -> bytes:
    """A PNG with a panel for each model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(found) + 1, 3.2), layout="constrained")
    for axes, (model, shares) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
        bars = axes.barh(list(shares), list(shares.values()), color="tab:blue")
        axes.bar_label(bars, [f"{share:.0%}" for share in shares.values()], padding=3)
        axes.invert_yaxis()
        axes.margins(x=0.2)
        axes.set(title=model, xlabel="importance for the validation logloss")
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    return png.getvalue()
