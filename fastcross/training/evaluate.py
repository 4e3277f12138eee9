"""Predictions and metrics of a model on batches, without gradients."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastcross.data import Batch, Cache
from fastcross.training import metrics
from fastcross.training.divergence import NotFiniteError, raise_faults
from fastcross.training.processes import ALONE, Processes

Progress = Callable[[int], object]
BATCH_SIZE = 4096  # nothing is kept for a backward pass, so batches may be larger than in training


def gains_from_bf16(device: torch.device) -> bool:
    """GPUs with bfloat16 units gain; CPUs mostly emulate it, so there it is off unless asked for."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


class Predicted(NamedTuple):
    """The model's outputs for rows, and what stands beside them as far as it is known, all on the CPU."""

    logits: Tensor  # or, for regression, predictions
    label: Tensor | None
    weight: Tensor | None = None
    group: Tensor | None = None

    def summarise(self, *, regression: bool) -> dict[str, float]:
        """The metrics of these rows."""
        assert self.label is not None, "rows without labels have no metrics"
        others = {"weight": self.weight, "group": self.group, "regression": regression or None}
        given: dict[str, Any] = {name: value for name, value in others.items() if value is not None}
        return metrics.summarise(self.logits, self.label, **given)


def predict_batches(model: nn.Module, batches: Iterable[Batch], *, bf16: bool = False) -> Iterator[Predicted]:
    """The outputs for each batch; leaves the model's mode as it was."""
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
    model: nn.Module, batches: Iterable[Batch], *, bf16: bool = False, progress: Progress | None = None
) -> tuple[Tensor, Tensor | None]:
    """Logits of all rows, and their labels if the batches have them; progress is told the rows of each batch."""
    found = predict_rows(model, batches, bf16=bf16, progress=progress)
    return found.logits, found.label


def predict_rows(
    model: nn.Module, batches: Iterable[Batch], *, bf16: bool = False, progress: Progress | None = None
) -> Predicted:
    """The outputs for all rows, and what stands beside them."""
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
    progress: Progress | None = None,
) -> dict[str, float]:
    """The metrics of :func:`~fastcross.training.metrics.summarise` on one part of a cache, over all processes' rows.

    What is not defined, as the AUC of rows that are all of one class, is left out.
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
