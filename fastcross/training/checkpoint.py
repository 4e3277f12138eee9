"""State on disk: any nesting of dicts, lists, numbers and tensors in one safetensors file, written atomically.

Tensors become safetensors entries named by their path (``model.deep.0.weight``); everything else is one JSON text in
the file's metadata. Loading runs no code from the file, unlike pickle, and a file is either whole or not there.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fastcross.files import atomic

FORMAT = "fastcross-1"


class CheckpointError(ValueError):
    """A file that is not a checkpoint, or not a whole one."""


def save(path: Path | str, state: dict[str, Any]) -> None:
    """Write ``state`` to ``path``; a reader, or a crash at any moment, sees the old file or the new one."""
    tensors: dict[str, Tensor] = {}
    structure = json.dumps(_take_apart(state, "", tensors))
    with atomic(path) as temporary:
        save_file(tensors, temporary, metadata={"format": FORMAT, "state": structure})


def load(path: Path | str, device: torch.device | str = "cpu") -> dict[str, Any]:
    """What :func:`save` wrote, tensors on ``device``."""
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise CheckpointError(f"{path} has format {metadata.get('format')!r}; expected {FORMAT!r}")
            return _put_together(json.loads(metadata["state"]), file.get_tensor)
    except (SafetensorError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not a whole checkpoint: {error}") from error


def _take_apart(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """``value`` as JSON, its tensors moved into ``tensors`` under their path."""
    if isinstance(value, Tensor):
        tensors[name] = _own(value, tensors)
        return {"tensor": name}
    if isinstance(value, dict):
        # A list of pairs keeps keys that are not strings, such as an optimiser's parameter numbers.
        return {"dict": [[key, _take_apart(item, _join(name, key), tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_take_apart(item, _join(name, index), tensors) for index, item in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"a checkpoint holds tensors, numbers, strings, lists and dicts; got {type(value).__name__} at {name}"
    )


def _put_together(value: Any, tensor: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensor(content)
    if kind == "dict":
        return {key: _put_together(item, tensor) for key, item in content}
    items = [_put_together(item, tensor) for item in content]
    return items if kind == "list" else tuple(items)


def _own(value: Tensor, others: dict[str, Tensor]) -> Tensor:
    """A contiguous tensor that shares its storage with no other, as safetensors asks for."""
    value = value.detach().contiguous()
    is_view = value.untyped_storage().nbytes() != value.nbytes
    is_shared = any(other.data_ptr() == value.data_ptr() for other in others.values())
    return value.clone() if is_view or is_shared else value


def _join(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)
