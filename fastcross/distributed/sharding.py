"""The processes of a sharded experiment: where its model, its optimiser and its run folder come from."""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastcross.distributed.process_group import ProcessGroup, local_device, start
from fastcross.models.base import Model
from fastcross.optim import Optimizer
from fastcross.training.config import TrainingConfig
from fastcross.training.run_folder import Run


class ShardedProcesses(ProcessGroup):
    """Processes that divide the embedding tables of a model between them."""

    def place(
        self, model: Model, config: TrainingConfig, *, device: str, sharding: str | None, embedding: str
    ) -> tuple[Any, Optimizer]:
        from fastcross.distributed.model import shard  # TorchRec takes seconds to import

        if sharding is None:
            raise ValueError(f"an experiment without sharding trains in one process; got {self.size}")
        return shard(model, self, config, sharding, embedding)

    def open_run(self, path: Path | str) -> Run:
        from fastcross.distributed.storage import ShardedRun

        return ShardedRun(path, self)


@contextlib.contextmanager
def join(device: str = "auto") -> Iterator[ShardedProcesses]:
    """Join the processes that torchrun started, or be the only one; for :meth:`Experiment.run` and :func:`resume`."""
    with _without_advice(), start(local_device(device), ShardedProcesses) as processes:
        yield processes


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Silences TorchRec's advice to those who build on it, while it is in use; what concerns the user is raised."""
    loggers = [logging.getLogger(name) for name in ("torchrec", "torch.fx._symbolic_trace")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torchrec|torch\.distributed)\b")
        warnings.filterwarnings("ignore", message=r".*(ShardedTensor|broadcast_buffers).*", category=FutureWarning)
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
