"""The run folder: what a training leaves behind, each file written atomically.

config.json      what was asked for; enough to rebuild the model and to resume
metrics.csv      one line per evaluation
result.json      the final metrics, once the run has finished
curves.png       training loss and validation metrics over the steps
best.safetensors the model with the lowest validation logloss, with its configuration and schema
last.safetensors everything that a resumed run needs
"""

import csv
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastcross.files import atomic
from fastcross.training import checkpoint
from fastcross.training.checkpoint import CheckpointError
from fastcross.training.plots import History, draw_curves


class Run:
    """A run folder that exists; make one with :meth:`create`."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not (self.path / "config.json").is_file():
            raise CheckpointError(f"{self.path} is not a run folder: it has no config.json")
        self.best, self.last = self.path / "best.safetensors", self.path / "last.safetensors"

    @classmethod
    def create(cls, path: Path | str, config: Mapping[str, Any]) -> "Run":
        """A new run folder; one that already holds a run is left alone."""
        path = Path(path)
        if (path / "config.json").exists():
            raise CheckpointError(f"{path} already holds a run; resume it or choose another folder")
        path.mkdir(parents=True, exist_ok=True)
        write_json(path / "config.json", config)
        return cls(path)

    def save(self, name: str, state: dict[str, Any]) -> None:
        """Keep ``state`` as the checkpoint "best" or "last"."""
        checkpoint.save(self.path / f"{name}.safetensors", state)

    def load(self, name: str, like: dict[str, Any]) -> dict[str, Any]:
        """What was saved. A sharded run reads its shards into the tensors of ``like``, the present state."""
        return checkpoint.load(self.path / f"{name}.safetensors")

    def holds(self, name: str) -> bool:
        return (self.path / f"{name}.safetensors").exists()

    @property
    def config(self) -> dict[str, Any]:
        return read_json(self.path / "config.json")

    @property
    def result(self) -> dict[str, Any] | None:
        """The final metrics, None while the run is unfinished."""
        path = self.path / "result.json"
        return read_json(path) if path.exists() else None

    @property
    def history(self) -> History:
        """metrics.csv as far as the run has come."""
        path = self.path / "metrics.csv"
        if not path.exists():
            return []
        with open(path, newline="") as file:
            return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]

    def write_history(self, history: History) -> None:
        with atomic(self.path / "metrics.csv") as temporary, open(temporary, "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(history[0]))
            writer.writeheader()
            writer.writerows(history)

    def finish(self, result: Mapping[str, Any], history: History) -> None:
        """Write the curves, then result.json: a run that has one is finished."""
        if history:
            draw_curves(self.path / "curves.png", {"": history}, result.get("optimum", {}).get("validation"))
        write_json(self.path / "result.json", result)

    def remove_leftovers(self) -> None:
        """Temporary files of a process that was killed while it wrote."""
        for leftover in self.path.glob(".*.tmp"):
            leftover.unlink()


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(_strict(content), indent=2) + "\n")


def _strict(value: Any) -> Any:
    """NaN, which JSON does not have, as null."""
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
