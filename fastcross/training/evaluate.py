"""Predictions and metrics of a model on batches, without gradients."""

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from fastcross.data import Batch, Cache
from fastcross.training import metrics
from fastcross.training.divergence import NotFiniteError
from fastcross.training.processes import ALONE, Processes

Progress = Callable[[int], object]
BATCH_SIZE = 4096  # nothing is kept for a backward pass, so batches may be larger than in training


def gains_from_bf16(device: torch.device) -> bool:
    """GPUs with bfloat16 units gain; CPUs mostly emulate it, so there it is off unless asked for."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def predict_batches(
    model: nn.Module, batches: Iterable[Batch], *, bf16: bool = False
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Logits of each batch, and its labels if it has them, on the CPU; leaves the model's mode as it was."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        for batch in batches:
            batch = batch.to(device, non_blocking=True)
            with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                logits = model(batch.dense, batch.categorical, batch.bags).float().cpu()
            yield logits, None if batch.label is None else batch.label.cpu()
    finally:
        model.train(was_training)


def predict_logits(
    model: nn.Module, batches: Iterable[Batch], *, bf16: bool = False, progress: Progress | None = None
) -> tuple[Tensor, Tensor | None]:
    """Logits of all rows, and their labels if the batches have them; progress is told the rows of each batch."""
    logits, labels = [], []
    for found, label in predict_batches(model, batches, bf16=bf16):
        logits.append(found)
        if label is not None:
            labels.append(label)
        if progress:
            progress(len(found))
    if not logits:
        raise ValueError("nothing to predict: the data has 0 rows")
    return torch.cat(logits), torch.cat(labels) if labels else None


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
    logits, label = predict_logits(model, batches, bf16=bf16, progress=progress)
    assert label is not None, "a cache holds labels"
    logits, label = processes.gather(logits), processes.gather(label)
    if not logits.isfinite().all():
        raise NotFiniteError(
            f"{int((~logits.isfinite()).sum())} of {logits.numel()} predictions on {part} are not finite"
        )
    found = metrics.summarise(logits, label) if processes.rank == 0 else {}
    return processes.share({name: value for name, value in found.items() if math.isfinite(value)})
