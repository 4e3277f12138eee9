"""What a prediction is worth: logloss, AUC, accuracy, calibration, from logits and labels; RMSE, MAE, R² of quantities.

All of them work on whole columns (no per-row Python) and in float64, so that a difference of 0.0001 in logloss, which
matters for click-through rates, is not lost in the sum over millions of rows.
"""

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy


def summarise(
    outputs: Tensor,
    label: Tensor,
    *,
    weight: Tensor | None = None,
    group: Tensor | None = None,
    regression: bool = False,
) -> dict[str, float]:
    """Every metric that applies: (B,) logits are a binary problem, (B, C) logits one of C classes.

    Args:
        weight: how much each row counts in every one of them; None for all the same.
        group: of each row, for the AUC within groups.
        regression: the outputs are predictions of a quantity, not logits.

    Returns:
        logloss, accuracy and ece (see :func:`expected_calibration_error`); for a binary problem also auc, gauc where
        there are groups (see :func:`grouped_auc`), and calibration (mean prediction / mean label: 1 is perfect, above 1
        predicts too many clicks). For regression rmse, mae and r2.
    """
    if len(outputs) != len(label):
        raise ValueError(f"logits and label must have as many rows; got {len(outputs)} and {len(label)}")
    if not len(outputs):
        raise ValueError("metrics need at least one row; got 0")
    if regression:
        return _of_quantities(outputs, label, weight)
    probability = probabilities(outputs)
    if outputs.dim() == 1:
        positive = label.double()
        found = {
            "logloss": logloss(outputs, label, weight),
            "auc": auc(outputs, label, weight),
            "accuracy": _mean((outputs > 0) == (label > 0.5), weight),
            "calibration": _ratio(_mean(probability, weight), _mean(positive, weight)),
            "ece": expected_calibration_error(probability, positive, weight=weight),
        }
        return found if group is None else {**found, "gauc": grouped_auc(outputs, label, group, weight)}
    confidence, choice = probability.max(dim=1)
    right = (choice == label).double()
    return {
        "logloss": logloss(outputs, label, weight),
        "accuracy": _mean(right, weight),
        "ece": expected_calibration_error(confidence, right, weight=weight),
    }


def _of_quantities(prediction: Tensor, label: Tensor, weight: Tensor | None) -> dict[str, float]:
    """``rmse = sqrt(mean (y - ŷ)²)``, ``mae = mean |y - ŷ|``, ``r2 = 1 - mean (y - ŷ)² / mean (y - mean y)²``."""
    error = prediction.double() - label.double()
    square = _mean(error.square(), weight)
    variance = _mean((label.double() - _mean(label, weight)).square(), weight)
    return {"rmse": math.sqrt(square), "mae": _mean(error.abs(), weight), "r2": 1 - _ratio(square, variance)}


def probabilities(logits: Tensor) -> Tensor:
    """Sigmoid of (B,) logits, softmax of (B, C) logits, in float64."""
    logits = logits.double()
    return torch.sigmoid(logits) if logits.dim() == 1 else torch.softmax(logits, dim=1)


def logloss(logits: Tensor, label: Tensor, weight: Tensor | None = None) -> float:
    """``-mean(y log p + (1 - y) log(1 - p))``, or ``-mean(log p_y)`` for classes; from logits, so no p is clipped."""
    reduction = "mean" if weight is None else "none"
    if logits.dim() == 1:
        loss = binary_cross_entropy_with_logits(logits.double(), label.double(), reduction=reduction)
    else:
        loss = cross_entropy(logits.double(), label.long(), reduction=reduction)
    return float(loss) if weight is None else _mean(loss, weight)


def auc(score: Tensor, label: Tensor, weight: Tensor | None = None) -> float:
    """The exact area under the ROC curve: ``P(score₊ > score₋) + ½ P(score₊ = score₋)``, rows drawn by their weight.

    NaN if only one class is present.
    """
    return float(_areas(score, label, weight, None)[0][0])


def grouped_auc(score: Tensor, label: Tensor, group: Tensor, weight: Tensor | None = None) -> float:
    """The mean of the groups' own AUCs, each counted by its rows (by the sum of their weights, where there are any).

    Groups of one class have no AUC and do not count. NaN if no group has both.
    """
    areas, sizes = _areas(score, label, weight, group)
    both = ~np.isnan(areas)
    total = float(sizes[both].sum())
    return float(areas[both] @ sizes[both]) / total if total else float("nan")


def _areas(
    score: Tensor, label: Tensor, weight: Tensor | None, group: Tensor | None
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """AUC and total weight of each group, or of all rows together.

    In the order of group and score, each positive row beats the negatives of its group before it, and half of those
    with the same score: ``Σ₊ w (below + ½ tied) / (Σ₊ w · Σ₋ w)``. Without weights these are sums of halves, exact.
    """
    values, is_positive = score.detach().cpu().numpy(), label.cpu().numpy() > 0.5
    if np.isnan(values).any():
        raise ValueError(f"auc needs scores that are numbers; got {int(np.isnan(values).sum())} NaN of {values.size}")
    groups = np.zeros(1, np.int64).repeat(values.size) if group is None else group.cpu().numpy()
    order = np.argsort(values) if group is None else np.lexsort((values, groups))
    values, groups, is_positive = values[order], groups[order], is_positive[order]
    w = np.ones(values.size) if weight is None else weight.double().cpu().numpy()[order]
    of_groups = np.flatnonzero(np.concatenate(([True], groups[1:] != groups[:-1])))
    new_value = np.concatenate(([True], values[1:] != values[:-1]))
    new_value[of_groups] = True
    of_runs = np.flatnonzero(new_value)  # of equal scores within a group
    positives, negatives = (np.add.reduceat(np.where(chosen, w, 0), of_runs) for chosen in (is_positive, ~is_positive))
    first_runs = np.searchsorted(of_runs, of_groups)
    before = np.cumsum(negatives) - negatives
    runs_per_group = np.diff(np.append(first_runs, len(of_runs)))
    below = before - np.repeat(before[first_runs], runs_per_group)
    wins = np.add.reduceat(positives * (below + negatives / 2), first_runs)
    plus, minus = np.add.reduceat(positives, first_runs), np.add.reduceat(negatives, first_runs)
    areas = np.divide(wins, plus * minus, out=np.full(len(plus), np.nan), where=plus * minus > 0)
    return areas, plus + minus


def expected_calibration_error(
    probability: Tensor, outcome: Tensor, bins: int = 20, *, weight: Tensor | None = None
) -> float:
    """``Σ_bins (rows in bin / rows) · |mean prediction − mean outcome|`` over bins of equal width in [0, 1].

    For classes, pass the largest probability and whether that class was right.
    """
    p, y = probability.double().cpu().numpy(), outcome.double().cpu().numpy()
    bin_of = np.minimum((p * bins).astype(np.int64), bins - 1)
    w = None if weight is None else weight.double().cpu().numpy()
    difference = np.bincount(bin_of, weights=p - y if w is None else w * (p - y), minlength=bins)
    return float(np.abs(difference).sum() / (p.size if w is None else w.sum()))


def _mean(values: Tensor, weight: Tensor | None) -> float:
    """``Σ w v / Σ w``."""
    values = values.double()
    if weight is None:
        return float(values.mean())
    return _ratio(float((values * weight.double()).sum()), float(weight.double().sum()))


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else float("nan")
