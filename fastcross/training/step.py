"""One step of training: a batch on the model's device turns into gradients, and these into other parameters.

Nothing in it waits for the device, so that a step on a GPU can be recorded once and replayed (captured.py).
"""

import math

import torch

from fastcross.data import Batch, Cache
from fastcross.models.base import Model
from fastcross.optim import Optimizer
from fastcross.training.config import TrainingConfig
from fastcross.training.divergence import Outcome
from fastcross.training.evaluate import gains_from_bf16
from fastcross.training.monitor import row_weights
from fastcross.training.processes import Processes


class Step:
    """Forward pass, loss, backward pass, clipping; then the optimiser. A whole batch has ``rows`` rows."""

    def __init__(
        self, model: Model, optimizer: Optimizer, cache: Cache, config: TrainingConfig, rows: int, processes: Processes
    ) -> None:
        self.model, self.optimizer, self.cache, self.config = model, optimizer, cache, config
        self.rows, self.processes = rows, processes
        self.device = next(model.parameters()).device
        self.bf16 = gains_from_bf16(self.device) if config.bf16 is None else config.bf16

    def __call__(self, batch: Batch) -> Outcome:
        found = self.gradients(batch)
        self.optimizer.step()
        return found

    def gradients(self, batch: Batch) -> Outcome:
        """All but the optimiser's part: the parameters stay as they are."""
        self.model.train()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            logits = self.model(batch.dense, batch.categorical, batch.bags)
        assert batch.label is not None
        # The mean over the ranks of their losses, so weighted, is the mean over the rows of the whole batch.
        weight = len(batch) * self.processes.size / self.rows
        loss = weight * self.model.loss(logits.float(), batch.label, row_weights(batch, self.cache, self.config))
        self.optimizer.zero_grad()
        loss.backward()
        norm = self.optimizer.clip_grad_norm(self.config.clip_norm or math.inf)
        return Outcome(logits.detach(), self.processes.mean(loss.detach()), norm)
