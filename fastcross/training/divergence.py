"""Training that diverges is stopped: values that are not finite, or a loss that explodes."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastcross.data import Batch
from fastcross.layers.embedding import EmbeddingStack


class TrainingError(RuntimeError):
    """Training cannot go on; the message says where it failed and why."""


class NotFiniteError(TrainingError, ValueError):
    """Predictions are not numbers: of a model that diverged, or that was given bad values."""


class Outcome(NamedTuple):
    """What a step tells of itself, on the model's device."""

    logits: Tensor
    loss: Tensor  # the mean over all rows of all processes
    norm: Tensor  # of all gradients together, before they are clipped


class DivergenceCheck:
    """Looks at the loss and the gradient norm of every step, and sums up the loss.

    Reading them makes the host wait for the device, so on a GPU they are read every 50 steps; the failing step is still
    named exactly. On a CPU every step is checked before it changes the parameters. Ids that a GPU found to be out of
    range are read with them: the loss of such a step is NaN.
    """

    def __init__(self, model: nn.Module, max_loss: float, device: torch.device) -> None:
        self.model, self.max_loss = model, max_loss
        self.interval = 1 if device.type == "cpu" else 50
        self.loss_sum, self.loss_count = 0.0, 0
        self._unread: list[tuple[str, Tensor, Tensor]] = []

    def add(self, where: str, batch: Batch, found: Outcome) -> None:
        self._unread.append((where, found.loss, found.norm))
        if len(self._unread) >= self.interval:
            self.read(batch, found.logits)

    def read(self, batch: Batch | None = None, logits: Tensor | None = None) -> None:
        """Check what has been added since the last time."""
        unread, self._unread = self._unread, []
        numbers = _as_numbers(unread)
        if numbers:
            try:
                raise_faults(self.model)
            except ValueError as error:
                # Of the steps from the first such one on, any may be the one whose row is told.
                first = next((i for i, (_, value, _) in enumerate(numbers) if not math.isfinite(value)), -1)
                later = len(numbers[first:]) - 1
                or_later = f", in this step or up to {later} later" if later else ""
                raise TrainingError(f"training stopped at {numbers[first][0]}: {error}{or_later}") from error
        for where, value, length in numbers:
            if not (math.isfinite(length) and abs(value) <= self.max_loss):
                raise TrainingError(f"training stopped at {where}: {self._explain(value, length, batch, logits)}")
            self.loss_sum += value
            self.loss_count += 1

    def mean_loss(self) -> float:
        """The mean since the last call."""
        self.read()
        mean = self.loss_sum / max(1, self.loss_count)
        self.loss_sum, self.loss_count = 0.0, 0
        return mean

    def _explain(self, loss: float, norm: float, batch: Batch | None, logits: Tensor | None) -> str:
        name, parameter = max(self.model.named_parameters(), key=lambda pair: _largest(pair[1]))
        scale = f"the largest parameter is {name} with {_largest(parameter):g}"
        if math.isfinite(loss) and math.isfinite(norm):
            return f"the loss exploded to {loss:g}, above the limit of {self.max_loss:g}; {scale}"
        culprit = self._first_not_finite(batch, logits)
        return f"the loss is {loss:g}, the gradient norm {norm:g}; not finite first: {culprit}; {scale}"

    def _first_not_finite(self, batch: Batch | None, logits: Tensor | None) -> str:
        """In the order of the computation: the input, the parameters, the logits, the gradients."""
        if batch is not None and not batch.dense.isfinite().all():
            return "the dense features of the batch"
        for name, parameter in self.model.named_parameters():
            if not parameter.isfinite().all():
                return f"the parameter {name}"
        if logits is not None and not logits.isfinite().all():
            return "the logits"
        for name, parameter in self.model.named_parameters():
            gradient = parameter.grad
            if gradient is not None and not (gradient._values() if gradient.is_sparse else gradient).isfinite().all():
                return f"the gradient of {name}"
        return "the loss"


def raise_faults(model: nn.Module) -> None:
    """Raises for the first id or offset that a GPU found to be wrong since the last call; waits for the GPU."""
    for module in model.modules():
        if isinstance(module, EmbeddingStack):
            module.raise_faults()


def _as_numbers(unread: list[tuple[str, Tensor, Tensor]]) -> list[tuple[str, float, float]]:
    """With one copy from the device for all of them."""
    if not unread:
        return []
    numbers = torch.stack([number.double() for _, loss, norm in unread for number in (loss, norm)]).tolist()
    return [(where, *numbers[2 * i : 2 * i + 2]) for i, (where, _, _) in enumerate(unread)]


def _largest(parameter: Tensor) -> float:
    return float(parameter.detach().abs().max()) if parameter.numel() else 0.0
