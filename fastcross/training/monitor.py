"""What counts: which metric says that an evaluation was the best so far, and how much each row weighs in the loss."""

import math
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from fastcross.data import Batch, Cache
from fastcross.training.config import BETTER, MONITORED, TrainingConfig
from fastcross.training.evaluate import Predicted


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
    """What the configuration asks for, if the validation rows have it; a ValueError says what they have."""
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


def row_weights(batch: Batch, cache: Cache, config: TrainingConfig) -> Tensor | None:
    """(B,): each row's weight in proportion to the training rows' mean, and positive_weight times that of positives."""
    weights = None if batch.weight is None else batch.weight / cache.mean_weight
    if config.positive_weight == 1:
        return weights
    assert batch.label is not None
    of_positives = 1 + (config.positive_weight - 1) * batch.label
    return of_positives if weights is None else weights * of_positives


def _grouped(cache: Cache) -> list[str]:
    return ["gauc"] if cache.schema.task == "binary" and cache.encoder.columns.group else []


def _refuse(name: str, what: str, names: list[str]) -> NoReturn:
    reason = "; gauc takes a column of groups (--group)" if name == "gauc" and "gauc" not in names else ""
    raise ValueError(f"there is no {name} to monitor: {what} {', '.join(names)}{reason}")


def _defined(cache: Cache) -> set[str]:
    """The metrics that the labels of the validation rows admit: rows of one class alone have no AUC."""
    beside = zip(*(batch.beside for batch in cache.batches("validation", 1 << 16)), strict=True)
    label, weight, group = (None if column[0] is None else torch.cat(column) for column in beside)
    assert label is not None
    outputs = torch.zeros(len(label) if cache.schema.num_outputs == 1 else (len(label), cache.schema.num_outputs))
    found = Predicted(outputs, label, weight, group).summarise(regression=cache.schema.task == "regression")
    return {name for name, value in found.items() if math.isfinite(value)}
