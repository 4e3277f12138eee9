"""The run folder: what a training leaves behind, each file written atomically and verified when it is read.

config.json      what was asked for; enough to rebuild the model and to resume
encoder/         what turns rows into batches, a copy of the cache's, so that the run predicts without it
metrics.csv      one line per evaluation
result.json      the final metrics, once the run has finished
curves.png       training loss and validation metrics over the steps
best.safetensors the model with the lowest validation logloss, with its configuration and schema
last.safetensors everything that a resumed run needs
checksums.json   of metrics.csv and curves.png; the others hold their own
"""

import contextlib
import csv
import hashlib
import io
import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastcross.files import atomic, read_checked_json, write_checked_json
from fastcross.training import checkpoint
from fastcross.training.checkpoint import CheckpointError
from fastcross.training.lock import locked
from fastcross.training.plots import History, draw_curves

if TYPE_CHECKING:
    from fastcross.data.encoder import Encoder

RUN_FORMAT = 2  # 1, of fastcross 0.1, had neither checksums nor an encoder
FILES = ("config.json", "checksums.json", "metrics.csv", "result.json", "curves.png")
# What a process that was killed left half written: .config.json.4711.tmp, a folder of shards, safetensors' .tmpA1b2C3.
LEFTOVER = re.compile(
    rf"\.({'|'.join(map(re.escape, FILES))}|(best|last)(\.safetensors|-\d+))(\.\d+)?\.tmp|\.tmp[A-Za-z0-9]{{6}}"
)


class Run:
    """A run folder that exists; make one with :meth:`create`."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not (self.path / "config.json").is_file():
            raise CheckpointError(f"{self.path} is not a run folder: it has no config.json")
        self.best, self.last = self.path / "best.safetensors", self.path / "last.safetensors"

    @classmethod
    def create(cls, path: Path | str, config: Mapping[str, Any], encoder: "Encoder | None" = None) -> "Run":
        """A new run folder; one that already holds a run is left alone."""
        path = Path(path)
        if (path / "config.json").exists():
            raise CheckpointError(f"{path} already holds a run; resume it or choose another folder")
        path.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path)
        if encoder is not None:
            encoder.save(path / "encoder")
        _write(path / "config.json", config)
        return cls(path)

    def save(self, name: str, state: dict[str, Any]) -> None:
        """Keep ``state`` as the checkpoint "best" or "last"."""
        checkpoint.save(self.path / f"{name}.safetensors", state)

    def load(self, name: str, like: dict[str, Any]) -> dict[str, Any]:
        """What was saved. A sharded run reads its shards into the tensors of ``like``, the present state."""
        return checkpoint.load(self.path / f"{name}.safetensors")

    def holds(self, name: str) -> bool:
        return (self.path / f"{name}.safetensors").exists()

    def verify(self, name: str) -> None:
        """Raise CheckpointError if the checkpoint is damaged."""
        checkpoint.verify(self.path / f"{name}.safetensors")

    @property
    def config(self) -> dict[str, Any]:
        config = _read(self.path / "config.json")
        for name in ("model", "options", "training", "cache", "fingerprint", "device", "threads"):
            if name not in config:
                raise CheckpointError(f"{self.path / 'config.json'} does not describe a run: it has no {name!r}")
        return config

    @property
    def result(self) -> dict[str, Any] | None:
        """The final metrics, None while the run is unfinished."""
        path = self.path / "result.json"
        return _read(path, checked=self._is_checked()) if path.exists() else None

    @property
    def encoder(self) -> "Encoder":
        """What turns rows into the batches that the run's model knows."""
        return load_encoder(self.path, self.config.get("encoder"))

    @property
    def history(self) -> History:
        """metrics.csv as far as the run has come."""
        path = self.path / "metrics.csv"
        if not path.exists():
            return []
        content = path.read_bytes()
        if self._is_checked():
            checksums = _read(self.path / "checksums.json", checked=True)
            if hashlib.sha256(content).hexdigest() not in checksums.get(path.name, ()):
                raise CheckpointError(f"{path} is damaged; its checksum is not the one in checksums.json")
        rows = csv.DictReader(io.StringIO(content.decode(), newline=""))
        return [{name: float(value) for name, value in row.items()} for row in rows]

    def write_history(self, history: History) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(history[0]))
        writer.writeheader()
        writer.writerows(history)
        self._write_summed("metrics.csv", text.getvalue().encode())

    def finish(self, result: Mapping[str, Any], history: History) -> None:
        """Write the curves, then result.json: a run that has one is finished."""
        if history:
            self.draw(result, history)
        _write(self.path / "result.json", result)

    def draw(self, result: Mapping[str, Any], history: History) -> None:
        """Write the curves."""
        optimum = result.get("optimum", {}).get("validation")
        self._write_summed("curves.png", draw_curves({"": history}, optimum))

    def remove_leftovers(self) -> None:
        """Of a process that was killed while it wrote; for a process that holds the folder's lock."""
        remove_leftovers(self.path)

    def _is_checked(self) -> bool:
        """Whether the run's files have checksums: those of fastcross 0.1 have not."""
        return _is_marked(read_json(self.path / "config.json"))

    def _write_summed(self, name: str, content: bytes) -> None:
        """A file and, before it, its checksum beside that of the one it replaces: a kill in between loses neither."""
        path = self.path / "checksums.json"
        checksums = _read(path, checked=True) if path.exists() else {}
        checksums[name] = [hashlib.sha256(content).hexdigest(), *checksums.get(name, [])[:1]]
        _write(path, checksums)
        with atomic(self.path / name) as temporary:
            temporary.write_bytes(content)


@contextlib.contextmanager
def working_in(path: Path) -> Iterator[None]:
    """Hold the lock of a run folder, which is made if need be.

    If what is done inside fails before the run has a checkpoint, all that it wrote is removed again: a start that
    failed does not stand in the way of the next one.
    """
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    try:
        with locked(path):
            before = {item.name for item in path.iterdir()}
            try:
                yield
            except BaseException:
                if "config.json" not in before and not any(path.glob("best[.-]*")) and not any(path.glob("last[.-]*")):
                    remove_leftovers(path)
                    for name in {*FILES, "encoder"} - before:
                        _remove(path / name)
                raise
    finally:
        for folder in made:
            with contextlib.suppress(OSError):  # it has something in it
                folder.rmdir()


def remove_leftovers(path: Path) -> None:
    for leftover in path.iterdir():
        if LEFTOVER.fullmatch(leftover.name):
            _remove(leftover)


def load_encoder(path: Path, fingerprint: str | None) -> "Encoder":
    """The encoder of a run folder, which must be that of the model there."""
    from fastcross.data.encoder import Encoder  # needs pyarrow, which a model alone does not

    if fingerprint is None:
        raise CheckpointError(f"{path} keeps no encoder, as fastcross 0.1 did not yet: train it again to predict")
    encoder = Encoder.load(path / "encoder")
    if encoder.fingerprint != fingerprint:
        raise CheckpointError(
            f"{path / 'encoder'} is not the encoder of this run; "
            f"expected {fingerprint[:12]}, got {encoder.fingerprint[:12]}"
        )
    return encoder


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; anything else is a CheckpointError that names the file."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {str(error) or type(error).__name__}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object; got a {type(content).__name__}")
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """For the user to read; what fastcross itself will read has a checksum too."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(_strict(content), indent=2) + "\n")


def _write(path: Path, content: Mapping[str, Any]) -> None:
    write_checked_json(path, _strict({"run_format": RUN_FORMAT, **content}))


def _is_marked(content: Mapping[str, Any]) -> bool:
    """fastcross 0.1 marked its files neither with a format nor with a checksum; damage removes one of them at most."""
    return "run_format" in content or "sha256" in content


def _read(path: Path, *, checked: bool = False) -> dict[str, Any]:
    """What :func:`_write` wrote, or, unless ``checked``, fastcross 0.1."""
    content = read_json(path)
    if checked or _is_marked(content):
        try:
            content = read_checked_json(path)
        except ValueError as error:
            raise CheckpointError(str(error)) from None
    if content.pop("run_format", 1) > RUN_FORMAT:
        raise CheckpointError(f"{path} was written by a later version of fastcross; this one reads format {RUN_FORMAT}")
    return content


def _strict(value: Any) -> Any:
    """NaN, which JSON does not have, as null."""
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
