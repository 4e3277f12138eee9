"""Tiles that a GPU was timed with, by ``fastcross doctor --tune``: there they overrule the model of ``launch.py``.

One JSON file per device holds its name, Triton's version and, for each kernel and class of shapes, the fastest tile
with its time and that of the model's choice. The file of another device or another Triton, or a damaged one, is refused
with a warning, and the model's choice stands.
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton

from fastcross.files import read_checked_json, user_folder, write_checked_json

Tile = tuple[int, ...]  # BLOCK_M, BLOCK_N, ROWS, ALIGN, num_warps
Key = tuple[tuple[str, Any], ...]  # a class of shapes: all that a plan depends on, but for the device


@dataclass(frozen=True, eq=False)  # by identity, so that plans are cached by it
class Measured:
    """The fastest tile of each class of shapes."""

    tiles: Mapping[Key, Tile]

    def get(self, key: Key) -> Tile | None:
        return self.tiles.get(key)


@dataclass(frozen=True)
class Entry:
    """What was timed: an operator's pass, its class of shapes, its number of rows; seconds of the fastest tile, and of
    the one that the model had chosen."""

    kernel: str
    shape: Mapping[str, Any]
    rows: int
    tile: Tile
    seconds: float
    model_tile: Tile
    model_seconds: float

    @property
    def key(self) -> Key:
        return tuple(sorted(self.shape.items()))


def path_of(device: str) -> Path:
    return user_folder() / "plans" / f"{re.sub(r'[^A-Za-z0-9]+', '-', device).strip('-')}.json"


def write(device: str, entries: Sequence[Entry], path: Path | None = None) -> Path:
    """Keeps the entries beside those that the device's file has of other shapes."""
    path = path or path_of(device)
    try:
        kept = {entry.key: entry for entry in read(device, path)}
    except (ValueError, FileNotFoundError):
        kept = {}  # what is refused is replaced
    kept |= {entry.key: entry for entry in entries}
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"device": device, "triton": triton.__version__, "plans": [asdict(entry) for entry in kept.values()]}
    write_checked_json(path, content)
    return path


def read(device: str, path: Path | None = None) -> list[Entry]:
    """ValueError if the file is damaged, or made on another device or with another Triton."""
    path = path or path_of(device)
    content = read_checked_json(path)
    for name, here in (("device", device), ("triton", triton.__version__)):
        if content.get(name) != here:
            raise ValueError(f"{path}: {name} is {here} here; the tiles were timed with {content.get(name)}")
    try:
        return [
            Entry(**entry | {name: tuple(entry[name]) for name in ("tile", "model_tile")}) for entry in content["plans"]
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: written by another version of fastcross ({type(error).__name__}: {error})"
        ) from error


def tiles_of(device: str) -> Measured | None:
    """What the device was timed with, if it was."""
    try:
        return Measured({entry.key: entry.tile for entry in read(device)})
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        warnings.warn(f"{error}; fastcross doctor --tune times them anew", stacklevel=2)
        return None
