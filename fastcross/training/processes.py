"""The processes that train together, as an experiment and its training loop see them: here just one."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastcross.models.base import Model
from fastcross.optim import Optimizer, configure
from fastcross.training.config import CAPTURABLE, TrainingConfig
from fastcross.training.run_folder import Run


class Processes:
    """One process of ``size``, which calls each of these together with the others; the base class is alone."""

    rank, size = 0, 1

    def mean(self, value: Tensor) -> Tensor:
        """The mean of the ranks' values."""
        return value

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag, whether it is set on any rank."""
        return flags

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, one rank after the other."""
        return rows

    def share(self, value: Any) -> Any:
        """What rank 0 has."""
        return value

    def place(
        self, model: Model, config: TrainingConfig, *, device: str, sharding: str | None, embedding: str
    ) -> tuple[Any, Optimizer]:
        """The model where it is trained, and its optimiser."""
        if sharding is not None:
            raise ValueError(f"sharding {sharding!r} needs the processes of fastcross.distributed.sharding.join")
        model = model.to(choose_device(device))
        return model, make_optimizer(model, config)

    def open_run(self, path: Path | str) -> Run:
        """A run folder, to be written and read by all of them."""
        return Run(path)


ALONE = Processes()


def make_optimizer(model: Model, config: TrainingConfig) -> Optimizer:
    """The configuration's, for a model that is where it is trained: on a GPU one whose steps can be captured."""
    on_gpu = next(model.parameters()).device.type == "cuda"
    capturable = on_gpu and config.graph != "off" and config.optimizer in CAPTURABLE
    return configure(model, lr=config.lr, name=config.optimizer, capturable=capturable)


def choose_device(name: str) -> torch.device:
    """A device by its name; "auto" is the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"cannot use the device {name!r}: {str(error).splitlines()[0]}") from error
    return torch.device(name)
