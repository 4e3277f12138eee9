"""Checkpoints of a sharded run: each rank writes its shards, through torch.distributed.checkpoint.

    best-00001200/   last-00001500/       a checkpoint of that step, whole or not there
        state.safetensors                 all that is not sharded, as in the single-machine format
        *.distcp, .metadata               the tables and their moments, in as many parts as there were ranks

A checkpoint is written under another name and renamed when all ranks have finished; the one before is then removed.
It can be read by any number of ranks.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import ShardedTensor

from fastcross.distributed.processes import Processes
from fastcross.training import checkpoint
from fastcross.training.checkpoint import CheckpointError
from fastcross.training.run_folder import History, Run


class ShardedRun(Run):
    """A run folder whose checkpoints all ranks write and read together; rank 0 alone writes the rest."""

    def __init__(self, path: Path | str, processes: Processes) -> None:
        super().__init__(path)
        self.processes = processes

    def save(self, name: str, state: dict[str, Any]) -> None:
        target = self.path / f"{name}-{state['step']:08d}"
        if self.processes.share(target.exists()):  # a step has but one state, wherever the run was resumed
            return
        temporary = target.with_name(f".{target.name}.tmp")
        if self.processes.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
        shards: dict[str, Any] = {}
        rest = take_shards(state, shards)
        if "rng" in state:
            rest["rng_of_ranks"] = self.processes.collect(state["rng"])
        self.processes.any(False)  # the folder is there
        if shards:
            with checkpoint_errors(f"cannot write {temporary}"):
                dcp.save(shards, checkpoint_id=temporary)
        if self.processes.rank == 0:
            checkpoint.save(temporary / "state.safetensors", rest)
            _put(temporary, target)
        self.processes.any(False)  # the checkpoint is there, before any rank goes on

    def load(self, name: str, like: dict[str, Any]) -> dict[str, Any]:
        # Rank 0's choice: on a shared file system the others may not yet see the newest.
        folder = self.processes.share(newest(self.path, name) if self.processes.rank == 0 else None)
        shards: dict[str, Any] = {}
        take_shards(like, shards)
        if shards:
            read_shards(shards, folder)
        state = put_shards(checkpoint.load(folder / "state.safetensors"), shards)
        if "rng_of_ranks" in state:
            generators = state.pop("rng_of_ranks")
            rank = self.processes.rank
            if len(generators) == self.processes.size:
                state["rng"] = generators[rank]
            elif rank:  # of another number of ranks: one that each of them has for itself
                state["rng"] = [torch.Generator().manual_seed(hash((state["step"], rank))).get_state()]
        return state

    def holds(self, name: str) -> bool:
        return bool(self.processes.share(bool(_checkpoints(self.path, name))))

    def write_history(self, history: History) -> None:
        if self.processes.rank == 0:
            super().write_history(history)

    def finish(self, result: Mapping[str, Any], history: History) -> None:
        if self.processes.rank == 0:
            super().finish(result, history)

    def remove_leftovers(self) -> None:
        if self.processes.rank == 0:
            super().remove_leftovers()
            for leftover in self.path.glob(".*-*.tmp"):
                shutil.rmtree(leftover)


def newest(run: Path, name: str) -> Path:
    found = _checkpoints(run, name)
    if not found:
        raise CheckpointError(f"{run} holds no sharded checkpoint {name!r}")
    return found[-1]


def read_shards(shards: dict[str, Any], folder: Path, *, alone: bool = False) -> None:
    """Read into the given tensors, sharded or whole, what is at their place in a checkpoint."""
    with checkpoint_errors(f"{folder} is not a whole checkpoint"):
        dcp.load(shards, checkpoint_id=folder, no_dist=alone)


@contextlib.contextmanager
def checkpoint_errors(failure: str) -> Iterator[None]:
    """What went wrong on some ranks, and is told to all, as one error that says the first of it."""
    try:
        yield
    except dcp.api.CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"{failure}: {first}") from error


def is_sharded(path: str, value: Any) -> bool:
    return isinstance(value, ShardedTensor)


def take_shards(
    value: Any, shards: dict[str, Any], choose: Callable[[str, Any], object] = is_sharded, path: str = ""
) -> Any:
    """A copy of ``value`` with the tensors that ``choose`` picks moved into ``shards``, under their path."""
    if choose(path, value):
        shards[path] = value
        return {"sharded": path}
    if isinstance(value, dict):
        return {
            key: take_shards(item, shards, choose, f"{path}.{key}" if path else str(key)) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(take_shards(item, shards, choose, f"{path}.{i}") for i, item in enumerate(value))
    return value


def put_shards(value: Any, shards: Mapping[str, Any]) -> Any:
    """The reverse: every {"sharded": name} replaced by the tensor of that name."""
    if isinstance(value, dict):
        if list(value) == ["sharded"]:
            return shards[value["sharded"]]
        return {key: put_shards(item, shards) for key, item in value.items()}
    return type(value)(put_shards(item, shards) for item in value) if isinstance(value, list | tuple) else value


def _checkpoints(run: Path, name: str) -> list[Path]:
    return sorted(run.glob(f"{name}-" + "[0-9]" * 8))


def _put(temporary: Path, target: Path) -> None:
    """Rename a checkpoint that is whole, and remove the others of its name."""
    os.replace(temporary, target)
    with contextlib.suppress(OSError):
        folder = os.open(target.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    for other in _checkpoints(target.parent, target.name.rpartition("-")[0]):
        if other != target:
            shutil.rmtree(other)
