"""Checkpoints in shards, as torch.distributed.checkpoint writes them, put together by one process.

best-00001200/   last-00001500/       a checkpoint of that step, whole or not there
    state.safetensors                 all that is not sharded, as in the single-machine format, and checksums of:
    *.distcp, .metadata               the tables and their moments, in as many parts as there were ranks
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fastcross.files import checksum
from fastcross.training import checkpoint
from fastcross.training.checkpoint import CheckpointError


def checkpoints(run: Path, name: str) -> list[Path]:
    """Those of a run folder, the newest last."""
    return sorted(run.glob(f"{name}-" + "[0-9]" * 8))


def newest(run: Path, name: str) -> Path:
    found = checkpoints(run, name)
    if not found:
        raise CheckpointError(f"{run} holds no sharded checkpoint {name!r}")
    return found[-1]


def read_whole(folder: Path) -> dict[str, Any]:
    """The state in a sharded checkpoint, its tables put together in this process."""
    state = read_state(folder)
    state.pop("rng_of_ranks", None)
    shards: dict[str, Any] = {}
    if (folder / ".metadata").exists():
        for name, entry in dcp.FileSystemReader(folder).read_metadata().state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            shards[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    if shards:
        read_shards(shards, folder, alone=True)
    return put_shards(state, shards)


def read_state(folder: Path, rank: int = 0, size: int = 1) -> dict[str, Any]:
    """What is not sharded, after the files of the shards have been verified; ``size`` ranks share that work."""
    state = checkpoint.load(folder / "state.safetensors")
    files = state.pop("files", {})  # fastcross 0.1 kept no checksums
    for name in sorted(files)[rank::size]:
        path = folder / name
        found = checksum(path) if path.is_file() else "not there"
        if found != files[name]:
            raise CheckpointError(
                f"{folder} is not a whole checkpoint: {name} is damaged, its checksum {found[:12]} instead of "
                f"{files[name][:12]}"
            )
    return state


def file_checksums(folder: Path, rank: int = 0, size: int = 1) -> dict[str, str]:
    """Of the files that torch.distributed.checkpoint wrote, or of a rank's share of them."""
    return {path.name: checksum(path) for path in sorted(folder.iterdir())[rank::size]}


def read_shards(shards: dict[str, Any], folder: Path, *, alone: bool = False) -> None:
    """Read into the given tensors, sharded or whole, what is at their place in a checkpoint."""
    with checkpoint_errors(f"{folder} is not a whole checkpoint"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"torch\.distributed is disabled", category=UserWarning)
        dcp.load(shards, checkpoint_id=folder, no_dist=alone)


@contextlib.contextmanager
def checkpoint_errors(failure: str) -> Iterator[None]:
    """What went wrong on some ranks, and is told to all, as one error that says the first of it."""
    try:
        yield
    except dcp.api.CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"{failure}: {first}") from error


def take_shards(value: Any, shards: dict[str, Any], choose: Callable[[str, Any], object], path: str = "") -> Any:
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
