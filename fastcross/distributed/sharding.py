"""A sharded experiment: its processes, and the run folder that all of them write, with torch.distributed.checkpoint.

A checkpoint is written under a temporary name and renamed when all ranks have finished. Then the previous one is
removed. Any number of ranks can read it. It converts to the single-machine format and back without changing a bit.
training/checkpoint.py describes its files.
"""

import contextlib
import logging
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from fastcross.distributed.internals import ShardedTensor
from fastcross.distributed.process_group import ProcessGroup, local_device, start
from fastcross.models.base import Model
from fastcross.optim import Optimizer
from fastcross.training import checkpoint
from fastcross.training.checkpoint import (
    CheckpointError,
    checkpoint_errors,
    checkpoints,
    file_checksums,
    newest,
    put_shards,
    read_shards,
    read_state,
    read_whole,
    take_shards,
)
from fastcross.training.config import TrainingConfig
from fastcross.training.run_folder import History, Run, working_in

# The sharded part of a checkpoint: the tables and, in the second part of the optimiser, the moments of their rows.
SHARDED = re.compile(r"model\.embedding\.tables\.\d+|optimizer\.parts\.1\.state\.\d+\.\w+")
OTHERS = ("result.json", "metrics.csv", "metrics.csv.checksum", "curves.png", "curves.png.checksum")


class ShardedProcesses(ProcessGroup):
    """Processes among which a model's embedding tables are divided."""

    def place(
        self, model: Model, config: TrainingConfig, *, device: str, sharding: str | None, embedding: str
    ) -> tuple[Any, Optimizer]:
        from fastcross.distributed.model import shard  # TorchRec takes seconds to import

        if sharding is None:
            raise ValueError(f"an experiment without sharding trains in one process; got {self.size}")
        return shard(model, self, config, sharding, embedding)

    def open_run(self, path: Path | str) -> Run:
        return ShardedRun(path, self)


@contextlib.contextmanager
def join(device: str = "auto") -> Iterator[ShardedProcesses]:
    """Join the processes that torchrun started, or be the only one; for :meth:`Experiment.run` and :func:`resume`."""
    with _without_advice(), start(local_device(device), ShardedProcesses) as processes:
        yield processes


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Silences TorchRec's warnings to developers. Problems of the user are raised as errors."""
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


class ShardedRun(Run):
    """A run folder whose checkpoints all ranks write and read together. Rank 0 writes all other files."""

    def __init__(self, path: Path | str, processes: ProcessGroup) -> None:
        super().__init__(path)
        self.processes = processes

    def save(self, name: str, state: dict[str, Any]) -> None:
        target = self.path / f"{name}-{state['step']:08d}"
        if self.processes.share(target.exists()):  # a step has only one state, wherever the run was resumed
            return
        temporary = target.with_name(f".{target.name}.tmp")
        if self.processes.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
        shards: dict[str, Any] = {}
        rest = take_shards(state, shards, _is_sharded)
        if "rng" in state:
            rest["rng_of_ranks"] = self.processes.collect(state["rng"])
        self.processes.any(False)  # the folder is there
        try:
            if shards:
                with checkpoint_errors(f"cannot write {temporary}"):
                    dcp.save(shards, checkpoint_id=temporary)
            share = file_checksums(temporary, self.processes.rank, self.processes.size)
            rest["files"] = {name: found for part in self.processes.collect(share) for name, found in part.items()}
            if self.processes.rank == 0:
                checkpoint.save(temporary / "state.safetensors", rest)
                _put(temporary, target)
        except BaseException:
            if self.processes.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        self.processes.any(False)  # the checkpoint is there, before any rank goes on

    def load(self, name: str, like: dict[str, Any]) -> dict[str, Any]:
        # Rank 0's choice: on a shared file system the others may not yet see the newest.
        folder = self.processes.share(newest(self.path, name) if self.processes.rank == 0 else None)
        shards: dict[str, Any] = {}
        take_shards(like, shards, _is_sharded)
        state = read_state(folder, self.processes.rank, self.processes.size)
        self.processes.any(False)  # all files are whole
        if shards:
            read_shards(shards, folder)
        state = put_shards(state, shards)
        if "rng_of_ranks" in state:
            generators = state.pop("rng_of_ranks")
            rank = self.processes.rank
            if len(generators) == self.processes.size:
                state["rng"] = generators[rank]
            elif rank:  # written by another number of ranks: a new generator for this rank
                state["rng"] = [torch.Generator().manual_seed(hash((state["step"], rank))).get_state()]
        return state

    def verify(self, name: str) -> None:
        folder = self.processes.share(newest(self.path, name) if self.processes.rank == 0 else None)
        read_state(folder, self.processes.rank, self.processes.size)
        self.processes.any(False)

    def holds(self, name: str) -> bool:
        return bool(self.processes.share(bool(checkpoints(self.path, name))))

    def write_history(self, history: History) -> None:
        if self.processes.rank == 0:
            super().write_history(history)

    def finish(self, result: Mapping[str, Any], history: History) -> None:
        if self.processes.rank == 0:
            super().finish(result, history)

    def remove_leftovers(self) -> None:
        if self.processes.rank == 0:
            super().remove_leftovers()


def _is_sharded(path: str, value: Any) -> bool:
    return isinstance(value, ShardedTensor)


def _put(temporary: Path, target: Path) -> None:
    """Rename a complete checkpoint, and remove the older ones of its name."""
    os.replace(temporary, target)
    with contextlib.suppress(OSError):
        folder = os.open(target.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    for other in checkpoints(target.parent, target.name.rpartition("-")[0]):
        if other != target:
            shutil.rmtree(other)


def convert_run(run: Run, to: str, output: Path, sharding: str = "auto") -> list[str]:
    """Write a copy of ``run`` whose checkpoints are "single" or "sharded"; returns their names."""
    plan = run.config
    if bool(plan.get("sharding")) == (to == "sharded"):
        raise CheckpointError(f"the checkpoints of {run.path} are {to} already")
    names = [name for name in ("best", "last") if _present(run, name, to)]
    if not names:
        raise CheckpointError(f"{run.path} holds no checkpoint yet")
    with working_in(output):
        copy = Run.create(output, plan | {"sharding": sharding if to == "sharded" else None}, run.encoder)
        for name in names:
            if to == "single":
                copy.save(name, read_whole(newest(run.path, name)))
            else:
                write_sharded(copy.path, name, run.load(name, {}))
        for name in OTHERS:
            if (run.path / name).exists():
                shutil.copy2(run.path / name, copy.path / name)
    return names


def write_sharded(run: Path, name: str, state: dict[str, Any]) -> None:
    """A sharded checkpoint in one part, which any number of ranks can read."""
    folder = run / f"{name}-{state['step']:08d}"
    shards: dict[str, Any] = {}
    rest = take_shards(state, shards, choose=lambda path, value: isinstance(value, Tensor) and SHARDED.fullmatch(path))
    folder.mkdir()
    if shards:
        dcp.save(shards, checkpoint_id=folder, no_dist=True)
    checkpoint.save(folder / "state.safetensors", rest | {"files": file_checksums(folder)})


def _present(run: Run, name: str, to: str) -> bool:
    return run.holds(name) if to == "sharded" else bool(checkpoints(run.path, name))
