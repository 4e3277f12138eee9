"""What a prediction is worth: logloss, AUC, accuracy and calibration, from logits and labels.

All of them work on whole columns (no per-row Python) and in float64, so that a difference of 0.0001 in logloss, which
matters for click-through rates, is not lost in the sum over millions of rows.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy


def summarise(logits: Tensor, label: Tensor) -> dict[str, float]:
    """Every metric that applies: (B,) logits are a binary problem, (B, C) logits one of C classes.

    Returns:
        logloss, accuracy and ece (see :func:`expected_calibration_error`); for a binary problem also auc and
        calibration (mean prediction / mean label: 1 is perfect, above 1 predicts too many clicks).
    """
    if len(logits) != len(label):
        raise ValueError(f"logits and label must have as many rows; got {len(logits)} and {len(label)}")
    if not len(logits):
        raise ValueError("metrics need at least one row; got 0")
    probability = probabilities(logits)
    if logits.dim() == 1:
        positive = label.double()
        return {
            "logloss": logloss(logits, label),
            "auc": auc(logits, label),
            "accuracy": float(((logits > 0) == (label > 0.5)).double().mean()),
            "calibration": _ratio(float(probability.mean()), float(positive.mean())),
            "ece": expected_calibration_error(probability, positive),
        }
    confidence, choice = probability.max(dim=1)
    right = (choice == label).double()
    return {
        "logloss": logloss(logits, label),
        "accuracy": float(right.mean()),
        "ece": expected_calibration_error(confidence, right),
    }


def probabilities(logits: Tensor) -> Tensor:
    """Sigmoid of (B,) logits, softmax of (B, C) logits, in float64."""
    logits = logits.double()
    return torch.sigmoid(logits) if logits.dim() == 1 else torch.softmax(logits, dim=1)


def logloss(logits: Tensor, label: Tensor) -> float:
    """``-mean(y log p + (1 - y) log(1 - p))``, or ``-mean(log p_y)`` for classes; from logits, so no p is clipped."""
    if logits.dim() == 1:
        return float(binary_cross_entropy_with_logits(logits.double(), label.double()))
    return float(cross_entropy(logits.double(), label.long()))


def auc(score: Tensor, label: Tensor) -> float:
    """The exact area under the ROC curve: ``P(score₊ > score₋) + ½ P(score₊ = score₋)``.

    By the Mann–Whitney rank sum, where tied scores share the mean of their ranks. NaN if only one class is present.
    """
    values, is_positive = score.detach().cpu().numpy(), label.cpu().numpy() > 0.5
    if np.isnan(values).any():
        raise ValueError(f"auc needs scores that are numbers; got {int(np.isnan(values).sum())} NaN of {values.size}")
    positives = int(is_positive.sum())
    negatives = is_positive.size - positives
    if not positives or not negatives:
        return float("nan")
    order = np.argsort(values)
    ordered = values[order]
    # Each run of equal scores takes ranks last_before + 1 … last; `run` numbers the runs.
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    ends = np.append(starts[1:], values.size)
    mean_rank = (starts + 1 + ends) / 2
    positives_in_run = np.add.reduceat(is_positive[order].astype(np.int64), starts)
    rank_sum = float(mean_rank @ positives_in_run)
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


def expected_calibration_error(probability: Tensor, outcome: Tensor, bins: int = 20) -> float:
    """``Σ_bins (rows in bin / rows) · |mean prediction − mean outcome|`` over bins of equal width in [0, 1].

    For classes, pass the largest probability and whether that class was right.
    """
    p, y = probability.double().cpu().numpy(), outcome.double().cpu().numpy()
    bin_of = np.minimum((p * bins).astype(np.int64), bins - 1)
    difference = np.bincount(bin_of, weights=p - y, minlength=bins)
    return float(np.abs(difference).sum() / p.size)


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else float("nan")
