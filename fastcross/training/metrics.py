"""Metrics of predictions: logloss, AUC, accuracy, calibration; RMSE, MAE and R² for regression.

They work on whole columns, without Python per row, and in float64: a difference of 0.0001 in logloss matters for
click-through rates and must not get lost in the sum over millions of rows.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from fastcross.batch import Batch
from fastcross.data.cache import Cache
from fastcross.training.config import BETTER, MONITORED, TrainingConfig
from fastcross.training.step import ALONE, NotFiniteError, Processes, raise_faults

BATCH_SIZE = 4096  # nothing is kept for a backward pass, so batches may be larger than in training


class Predicted(NamedTuple):
    """The model's outputs for rows, with label, weight and group if known, all on the CPU."""

    logits: Tensor  # or, for regression, predictions
    label: Tensor | None
    weight: Tensor | None = None
    group: Tensor | None = None

    def summarise(self, *, regression: bool) -> dict[str, float]:
        """The metrics of these rows."""
        assert self.label is not None, "rows without labels have no metrics"
        others = {"weight": self.weight, "group": self.group, "regression": regression or None}
        given: dict[str, Any] = {name: value for name, value in others.items() if value is not None}
        return summarise(self.logits, self.label, **given)


def predict_batches(model: nn.Module, batches: Iterable[Batch], *, bf16: bool = False) -> Iterator[Predicted]:
    """The outputs for each batch. The model's training mode is restored."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        for batch in batches:
            batch = batch.to(device, non_blocking=True)
            with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                logits = model(batch.dense, batch.categorical, batch.bags).float().cpu()
            raise_faults(model)
            yield Predicted(logits, *(None if column is None else column.cpu() for column in batch.beside))
    finally:
        model.train(was_training)


def predict_logits(
    model: nn.Module, batches: Iterable[Batch], *, bf16: bool = False, progress: Callable[[int], object] | None = None
) -> tuple[Tensor, Tensor | None]:
    """Logits of all rows, and their labels if the batches have them; progress is called with each batch's rows."""
    found = predict_rows(model, batches, bf16=bf16, progress=progress)
    return found.logits, found.label


def predict_rows(
    model: nn.Module, batches: Iterable[Batch], *, bf16: bool = False, progress: Callable[[int], object] | None = None
) -> Predicted:
    """The outputs for all rows, with label, weight and group if known."""
    found = []
    for predicted in predict_batches(model, batches, bf16=bf16):
        found.append(predicted)
        if progress:
            progress(len(predicted.logits))
    if not found:
        raise ValueError("nothing to predict: the data has 0 rows")
    columns = zip(*found, strict=True)
    return Predicted(*(None if column[0] is None else torch.cat(column) for column in columns))  # type: ignore[arg-type]


def evaluate(
    model: nn.Module,
    cache: Cache,
    part: str,
    *,
    bf16: bool = False,
    processes: Processes = ALONE,
    progress: Callable[[int], object] | None = None,
) -> dict[str, float]:
    """The metrics of :func:`~summarise` on one part of a cache, over all processes' rows.

    Undefined metrics, such as the AUC of rows of one class, are left out.
    """
    if not cache.sizes.get(part):
        raise ValueError(f"the cache {cache.path} has no rows in part {part!r}; its sizes are {cache.sizes}")
    batches = cache.batches(part, BATCH_SIZE, rank=processes.rank, world_size=processes.size)
    rows = predict_rows(model, batches, bf16=bf16, progress=progress)
    rows = Predicted(*(None if column is None else processes.gather(column) for column in rows))  # type: ignore[arg-type]
    logits = rows.logits
    if not logits.isfinite().all():
        raise NotFiniteError(
            f"{int((~logits.isfinite()).sum())} of {logits.numel()} predictions on {part} are not finite"
        )
    found = rows.summarise(regression=cache.schema.task == "regression") if processes.rank == 0 else {}
    return processes.share({name: value for name, value in found.items() if math.isfinite(value)})


def summarise(
    outputs: Tensor,
    label: Tensor,
    *,
    weight: Tensor | None = None,
    group: Tensor | None = None,
    regression: bool = False,
) -> dict[str, float]:
    """All metrics that apply: (B,) logits are a binary problem, (B, C) logits one of C classes.

    Args:
        weight: weight of each row; None for equal weights.
        group: group of each row, for the AUC within groups.
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
    """The mean of the groups' AUCs, weighted by their rows (or by the sum of their rows' weights).

    Groups of one class have no AUC and are skipped. NaN if no group has both classes.
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


@dataclass(frozen=True)
class Monitor:
    """A metric and its direction."""

    name: str
    larger_is_better: bool

    def is_better(self, value: float, than: float | None) -> bool:
        if than is None:
            return True
        return value > than if self.larger_is_better else value < than


def choose_monitor(cache: Cache, config: TrainingConfig) -> Monitor:
    """The configuration's metric. A ValueError lists the possible ones if the validation rows do not have it."""
    task = cache.schema.task
    if config.positive_weight != 1 and task != "binary":
        raise ValueError(f"positive_weight is for a label of two classes; the task of {cache.path} is {task}")
    name = config.monitor or MONITORED[task]
    known = BETTER[task]
    if name not in known:
        _refuse(name, f"a {task} label has", [metric for metric in known if metric != "gauc"] + _grouped(cache))
    if config.monitor and not cache.sizes.get("validation"):
        raise ValueError(f"monitor {name} needs validation rows; the sizes of {cache.path} are {cache.sizes}")
    if config.monitor and name not in (defined := _defined(cache)):
        _refuse(name, "the validation rows have", [metric for metric in known if metric in defined])
    return Monitor(name, known[name] is max)


def _grouped(cache: Cache) -> list[str]:
    return ["gauc"] if cache.schema.task == "binary" and cache.encoder.columns.group else []


def _refuse(name: str, what: str, names: list[str]) -> NoReturn:
    reason = "; gauc takes a column of groups (--group)" if name == "gauc" and "gauc" not in names else ""
    raise ValueError(f"there is no {name} to monitor: {what} {', '.join(names)}{reason}")


def _defined(cache: Cache) -> set[str]:
    """The metrics that are defined for the labels of the validation rows: rows of one class have no AUC."""
    beside = zip(*(batch.beside for batch in cache.batches("validation", 1 << 16)), strict=True)
    label, weight, group = (None if column[0] is None else torch.cat(column) for column in beside)
    assert label is not None
    outputs = torch.zeros(len(label) if cache.schema.num_outputs == 1 else (len(label), cache.schema.num_outputs))
    found = Predicted(outputs, label, weight, group).summarise(regression=cache.schema.task == "regression")
    return {name for name, value in found.items() if math.isfinite(value)}
