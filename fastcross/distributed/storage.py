"""A run folder that several processes share: each writes its shards, through torch.distributed.checkpoint.

A checkpoint is written under another name and renamed when all ranks have finished; the one before is then removed.
It can be read by any number of ranks. training/checkpoint.py says what is in it.
"""

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from fastcross.distributed.internals import ShardedTensor
from fastcross.distributed.process_group import ProcessGroup
from fastcross.training import checkpoint
from fastcross.training.checkpoint import (
    checkpoint_errors,
    checkpoints,
    file_checksums,
    newest,
    put_shards,
    read_shards,
    read_state,
    take_shards,
)
from fastcross.training.run_folder import History, Run


class ShardedRun(Run):
    """A run folder whose checkpoints all ranks write and read together; rank 0 alone writes the rest."""

    def __init__(self, path: Path | str, processes: ProcessGroup) -> None:
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
            elif rank:  # of another number of ranks: one that each of them has for itself
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
    """Rename a checkpoint that is whole, and remove the others of its name."""
    os.replace(temporary, target)
    with contextlib.suppress(OSError):
        folder = os.open(target.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    for other in checkpoints(target.parent, target.name.rpartition("-")[0]):
        if other != target:
            shutil.rmtree(other)
