"""Checkpoints from the sharded format to the single-machine one and back; both hold the same state, bit for bit."""

import re
import shutil
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor

from fastcross.training import checkpoint
from fastcross.training.checkpoint import CheckpointError, checkpoints, file_checksums, newest, read_whole, take_shards
from fastcross.training.run_folder import Run, working_in

# What a sharded checkpoint divides: the tables and, in the second part of the optimiser, the moments of their rows.
SHARDED = re.compile(r"model\.embedding\.tables\.\d+|optimizer\.parts\.1\.state\.\d+\.\w+")
OTHERS = ("result.json", "metrics.csv", "metrics.csv.checksum", "curves.png", "curves.png.checksum")


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
