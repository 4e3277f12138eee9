"""State on disk: any nesting of dicts, lists, numbers and tensors in one safetensors file, written atomically.

Tensors become safetensors entries named by their path (``model.deep.0.weight``). Everything else is one JSON text in
the file's metadata. Loading runs no code from the file, unlike pickle. A file is either complete or absent.

The file's checksum is in ``last.safetensors.checksum`` and detects every change. safetensors itself detects neither
changed values nor a changed name, dtype or space in the header.

With several processes, each writes its shards in the format of torch.distributed.checkpoint. One process can read all.

best-00001200/   last-00001500/       a checkpoint of that step, complete or absent
    state.safetensors                 everything that is not sharded, as in a single file, and checksums of:
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
    """A file is not a checkpoint, or is damaged or incomplete."""


def save(path: Path | str, state: dict[str, Any]) -> None:
    """Write ``state`` to ``path`` atomically: at any moment the old or the new file is there."""
    tensors: dict[str, Tensor] = {}
    memory: set[int] = set()
    try:
        structure = json.dumps(_take_apart(state, "", tensors, memory))
    except RecursionError:
        raise TypeError("a checkpoint cannot hold state that contains itself or is nested too deeply") from None
    with atomic_with_checksum(path) as temporary:
        try:
            save_file(tensors, temporary, metadata={"format": FORMAT, "state": structure})
        except SafetensorError as error:  # a full disk, mostly
            raise CheckpointError(f"{path} cannot be written: {_reason(error)}") from error


def load(path: Path | str, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Load what :func:`save` wrote, with tensors on ``device``. A CheckpointError names a damaged file.

    The file is read twice: to verify it and to load it.
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
    """Raise CheckpointError unless the file has exactly the bytes that :func:`save` wrote."""
    if reason := damage(path):
        raise CheckpointError(f"{path} is not a whole checkpoint: {reason}")


def checkpoints(run: Path, name: str) -> list[Path]:
    """The checkpoints of that name in a run folder, newest last."""
    return sorted(run.glob(f"{name}-" + "[0-9]" * 8))


def newest(run: Path, name: str) -> Path:
    found = checkpoints(run, name)
    if not found:
        raise CheckpointError(f"{run} holds no sharded checkpoint {name!r}")
    return found[-1]


def read_whole(folder: Path) -> dict[str, Any]:
    """The whole state of a sharded checkpoint, with complete tables in this process."""
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
    """The state that is not sharded. The ``size`` ranks first verify the files of the shards, a part each."""
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
    """Checksums of the files that torch.distributed.checkpoint wrote, or of a rank's share of them."""
    return {path.name: checksum(path) for path in sorted(folder.iterdir())[rank::size]}


def read_shards(shards: dict[str, Any], folder: Path, *, alone: bool = False) -> None:
    """Read the given tensors, sharded or whole, from a checkpoint, in place."""
    import torch.distributed.checkpoint as dcp

    with checkpoint_errors(f"{folder} is not a whole checkpoint"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"torch\.distributed is disabled", category=UserWarning)
        dcp.load(shards, checkpoint_id=folder, no_dist=alone)


@contextlib.contextmanager
def checkpoint_errors(failure: str) -> Iterator[None]:
    """Turn the errors of several ranks into one error with the first message."""
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
    """``value`` as JSON, with its tensors moved into ``tensors`` under their path; ``memory``: their addresses."""
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
    """A contiguous tensor that shares its storage with no other, as safetensors requires."""
    if value.layout != torch.strided or value.is_meta or value.is_quantized:
        raise TypeError(f"a checkpoint holds dense tensors with values; got {value.layout} on {value.device} at {name}")
    value = value.detach().resolve_conj().resolve_neg().contiguous()
    is_view = value.untyped_storage().nbytes() != value.nbytes
    owned = value.clone() if is_view or value.data_ptr() in memory else value
    memory.add(owned.data_ptr())
    return owned


def _unique(name: str, taken: dict[str, Tensor]) -> str:
    """The path, with a number appended if another tensor already has it ({"a": {"b": t}, "a.b": u})."""
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
