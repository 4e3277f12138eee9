"""State on disk: any nesting of dicts, lists, numbers and tensors in one safetensors file, written atomically.

Tensors become safetensors entries named by their path (``model.deep.0.weight``); everything else is one JSON text in
the file's metadata. Loading runs no code from the file, unlike pickle, and a file is either whole or not there.

A checksum of the file stands beside it (``last.safetensors.checksum``), so that no change goes unnoticed: safetensors
itself sees neither changed values nor a changed name, dtype or space in the header.

Where processes share a model, each writes its shards, as torch.distributed.checkpoint does; one can put them together.

best-00001200/   last-00001500/       a checkpoint of that step, whole or not there
    state.safetensors                 all that is not sharded, as in a single file, and checksums of:
    *.distcp, .metadata               the tables and their moments, in as many parts as there were ranks
"""

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fastcross.files import atomic_with_checksum, checksum, damage, undisturbed

FORMAT = "fastcross-3"


class CheckpointError(ValueError):
    """A file that is not a checkpoint, or not a whole one."""


def save(path: Path | str, state: dict[str, Any]) -> None:
    """Write ``state`` to ``path``; a reader, or a crash at any moment, sees the old file or the new one."""
    tensors: dict[str, Tensor] = {}
    memory: set[int] = set()
    try:
        structure = json.dumps(_take_apart(state, "", tensors, memory))
    except RecursionError:
        raise TypeError("a checkpoint holds no state that contains itself, or that is nested so deeply") from None
    with atomic_with_checksum(path) as temporary:
        try:
            save_file(tensors, temporary, metadata={"format": FORMAT, "state": structure})
        except SafetensorError as error:  # a full disk, mostly
            raise CheckpointError(f"{path} cannot be written: {_reason(error)}") from error


def load(path: Path | str, device: torch.device | str = "cpu") -> dict[str, Any]:
    """What :func:`save` wrote, tensors on ``device``; a CheckpointError names a file that is damaged.

    It is read twice, to verify it and to load it.
    """
    return undisturbed(path, lambda: _load(path, device))


def _load(path: Path | str, device: torch.device | str) -> dict[str, Any]:
    verify(path)
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"it has format {metadata.get('format')!r}; expected {FORMAT!r}")
            state = _put_together(json.loads(metadata["state"]), file.get_tensor)
        if not isinstance(state, dict):
            raise ValueError(f"it holds a {type(state).__name__} instead of a dict")
    except OSError:  # it cannot be read at all, and the message says why
        raise
    except Exception as error:  # whatever a reader of damaged text and numbers can raise
        raise CheckpointError(f"{path} is not a whole checkpoint: {_reason(error)}") from error
    return state


def verify(path: Path | str) -> None:
    """Raise CheckpointError unless the file is, to the last byte, what :func:`save` wrote."""
    if reason := damage(path):
        raise CheckpointError(f"{path} is not a whole checkpoint: {reason}")


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
    import torch.distributed.checkpoint as dcp  # takes a while to import
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

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
    state = load(folder / "state.safetensors")
    files = state.pop("files")
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
    import torch.distributed.checkpoint as dcp

    with checkpoint_errors(f"{folder} is not a whole checkpoint"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"torch\.distributed is disabled", category=UserWarning)
        dcp.load(shards, checkpoint_id=folder, no_dist=alone)


@contextlib.contextmanager
def checkpoint_errors(failure: str) -> Iterator[None]:
    """What went wrong on some ranks, and is told to all, as one error that says the first of it."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
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


def _take_apart(value: Any, name: str, tensors: dict[str, Tensor], memory: set[int]) -> Any:
    """``value`` as JSON, its tensors moved into ``tensors`` under their path; ``memory``: addresses of those so far."""
    if isinstance(value, Tensor):
        name = _unique(name, tensors)
        tensors[name] = _own(value, name, memory)
        return {"tensor": name}
    if isinstance(value, dict):
        for key in value:
            if type(key) not in (str, int):
                raise TypeError(f"a checkpoint's keys are strings and integers; got {key!r} at {name or 'the top'}")
        # A list of pairs keeps keys that are not strings, such as an optimiser's parameter numbers.
        return {"dict": [[key, _take_apart(item, _join(name, key), tensors, memory)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_take_apart(item, _join(name, index), tensors, memory) for index, item in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"a checkpoint holds tensors, numbers, strings, lists and dicts; got {type(value).__name__} at {name}"
    )


def _put_together(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensor(content)
    if kind == "dict":
        return {key: _put_together(item, tensor) for key, item in content}
    if kind not in ("list", "tuple"):
        raise ValueError(f"there is no kind of value {kind!r}")
    items = [_put_together(item, tensor) for item in content]
    return items if kind == "list" else tuple(items)


def _own(value: Tensor, name: str, memory: set[int]) -> Tensor:
    """A contiguous tensor that shares its storage with no other, as safetensors asks for."""
    if value.layout != torch.strided or value.is_meta or value.is_quantized:
        raise TypeError(f"a checkpoint holds dense tensors with values; got {value.layout} on {value.device} at {name}")
    value = value.detach().resolve_conj().resolve_neg().contiguous()
    is_view = value.untyped_storage().nbytes() != value.nbytes
    owned = value.clone() if is_view or value.data_ptr() in memory else value
    memory.add(owned.data_ptr())
    return owned


def _unique(name: str, taken: dict[str, Tensor]) -> str:
    """The path, or where that is another tensor's already ({"a": {"b": t}, "a.b": u}), the path with a number."""
    name = name.encode("utf-8", "backslashreplace").decode()
    candidate, number = name, 1
    while candidate in taken or candidate == "__metadata__":  # which is safetensors' own
        candidate, number = f"{name}~{number}", number + 1
    return candidate


def _join(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def _reason(error: Exception) -> str:
    text = str(error) if isinstance(error, SafetensorError | ValueError) else f"{type(error).__name__}: {error}"
    return text.splitlines()[0] if text else type(error).__name__
