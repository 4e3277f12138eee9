"""The run folder: the files of a training, and the trained model read from them.
Each file is written atomically and verified when it is read. One process at a time writes.

config.json      the experiment; enough to rebuild the model and to resume
encoder/         turns rows into batches; a copy of the cache's, so that the run predicts without the cache
result.json      the final metrics, once the run has finished
metrics.csv      one line per evaluation
curves.png       training loss and validation metrics over the steps
best.safetensors the model with the lowest validation logloss, with its configuration and schema
last.safetensors everything that a resumed run needs
NAME.checksum    the checksum of each of the last four; the other files contain theirs
"""

import contextlib
import csv
import fcntl
import io
import json
import math
import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastcross.batch import Schema
from fastcross.data.cache import Cache
from fastcross.files import (
    atomic,
    atomic_with_checksum,
    damage,
    read_checked_json,
    undisturbed,
    write_checked_json,
)
from fastcross.models import MODELS
from fastcross.models.base import Model, model_class
from fastcross.training import checkpoint
from fastcross.training.checkpoint import CheckpointError
from fastcross.training.config import choose_device

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fastcross.data.encoder import Encoder

History = list[dict[str, float]]  # one entry per evaluation
RUN_FORMAT = 3
SUMMED = ("metrics.csv", "curves.png", "best.safetensors", "last.safetensors")
FILES = ("config.json", "result.json", *SUMMED, *(f"{name}.checksum" for name in SUMMED))
LOCK = ".lock"
# Incomplete files of a killed process: .config.json.4711.tmp, a folder of shards, safetensors' .tmpA1b2C3.
LEFTOVER = re.compile(rf"\.({'|'.join(map(re.escape, FILES))}|(best|last)-\d+)(\.\d+)?\.tmp|\.tmp[A-Za-z0-9]{{6}}")


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
        """The saved state. A sharded run reads its shards into the tensors of ``like``, the present state."""
        return checkpoint.load(self.path / f"{name}.safetensors")

    def holds(self, name: str) -> bool:
        return (self.path / f"{name}.safetensors").exists()

    def verify(self, name: str) -> None:
        """Raise CheckpointError if the checkpoint is damaged."""
        checkpoint.verify(self.path / f"{name}.safetensors")

    @property
    def config(self) -> dict[str, Any]:
        config = _read(self.path / "config.json")
        for name in ("model", "options", "training", "cache", "fingerprint", "encoder", "device", "threads"):
            if name not in config:
                raise CheckpointError(f"{self.path / 'config.json'} does not describe a run: it has no {name!r}")
        return config

    @property
    def result(self) -> dict[str, Any] | None:
        """The final metrics; None if the run is unfinished."""
        path = self.path / "result.json"
        return _read(path) if path.exists() else None

    @property
    def encoder(self) -> "Encoder":
        """The encoder, which turns rows into batches of the run's model."""
        return load_encoder(self.path, self.config["encoder"])

    @property
    def history(self) -> History:
        """The rows of metrics.csv so far."""
        path = self.path / "metrics.csv"
        if not path.exists():
            return []

        def read() -> bytes:
            if reason := damage(path):
                raise CheckpointError(f"{path} is damaged: {reason}")
            return path.read_bytes()

        content = undisturbed(path, read)
        rows = csv.DictReader(io.StringIO(content.decode(), newline=""))
        return [{name: float(value) for name, value in row.items()} for row in rows]

    def write_history(self, history: History) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(history[0]))
        writer.writeheader()
        writer.writerows(history)
        with atomic_with_checksum(self.path / "metrics.csv") as temporary:
            temporary.write_bytes(text.getvalue().encode())

    def finish(self, result: Mapping[str, Any], history: History) -> None:
        """Write the curves, then result.json, which marks a run as finished."""
        if history:
            self.draw(result, history)
        _write(self.path / "result.json", result)

    def draw(self, result: Mapping[str, Any], history: History) -> None:
        """Write the curves."""
        optimum = result.get("optimum", {}).get("validation")
        with atomic_with_checksum(self.path / "curves.png") as temporary:
            temporary.write_bytes(draw_curves({"": history}, optimum))

    def remove_leftovers(self) -> None:
        """Remove the incomplete files of a killed process. The caller must hold the folder's lock."""
        remove_leftovers(self.path)


@dataclass(frozen=True)
class Trained:
    """A trained model in evaluation mode, with its encoder and the cache it was trained on."""

    model: Model
    schema: Schema
    path: Path  # of the run folder
    cache: str
    fingerprint: str  # of the cache
    encoder_fingerprint: str

    @cached_property
    def encoder(self) -> "Encoder":
        """The encoder in the run folder, which turns rows into batches of the model."""
        return load_encoder(self.path, self.encoder_fingerprint)

    def open_cache(self, path: Path | str | None = None) -> Cache:
        """The cache that the model was trained on, at ``path`` if it has moved."""
        if path is not None:
            self.open_other_cache(path)  # that another encoder made it says more than that it is another one
        cache = Cache.open(path or self.cache, fingerprint=self.fingerprint)
        cache.check_encoder(self.encoder.fingerprint)
        return cache

    def open_other_cache(self, path: Path | str) -> Cache:
        """Any cache that was made with the model's encoder."""
        cache = Cache.open(path)
        cache.check_encoder(self.encoder.fingerprint)
        return cache


def load_model(path: Path | str, device: str = "auto") -> Trained:
    """The best model of a run folder, sharded or not, or of a best.safetensors file, in evaluation mode."""
    path = Path(path)
    run = path if path.is_dir() else path.parent
    state = _read_best(Run(path)) if path.is_dir() else checkpoint.load(path)
    if path.is_dir():
        _check_owner(path, state, Run(path).config)
    if state.get("kind") not in MODELS:
        raise CheckpointError(f"{path} holds no model; use best.safetensors")
    try:
        model = model_class(state["kind"]).from_config(state["config"])
        model.load_state_dict(state["model"])
        facts = (state["cache"], state["fingerprint"], state["encoder"])
        schema = Schema.from_dict(state["schema"])
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointError(f"{path} holds no model that this version can build: {error}") from error
    model.to(choose_device(device)).eval()
    return Trained(model, schema, run, *facts)


def _check_owner(path: Path, state: dict[str, Any], config: dict[str, Any]) -> None:
    """Raise if the checkpoint was copied from another run: it is valid, but of another model."""
    for name, known in (("kind", "model"), ("fingerprint", "fingerprint"), ("encoder", "encoder")):
        if state.get(name) != config.get(known):
            both = f"expected {known} {str(config.get(known))[:12]}, got {str(state.get(name))[:12]}"
            raise CheckpointError(f"the best checkpoint in {path} is not that of this run: {both}")
    for name, value in config["training"].items():
        if (found := state.get("training", {}).get(name, value)) != value:
            raise CheckpointError(
                f"the best checkpoint in {path} is not that of this run: expected {name} {value}, got {found}"
            )


def _read_best(run: Run) -> dict[str, Any]:
    if run.config.get("sharding"):
        return checkpoint.read_whole(checkpoint.newest(run.path, "best"))
    if not run.holds("best"):
        raise CheckpointError(f"{run.path} holds no model yet: it has not come to its first evaluation")
    return checkpoint.load(run.best)


def load_encoder(path: Path, fingerprint: str) -> "Encoder":
    """The encoder of a run folder. It must be the one that the model was trained with."""
    from fastcross.data.encoder import Encoder  # needs pyarrow, which a model alone does not

    encoder = Encoder.load(path / "encoder")
    if encoder.fingerprint != fingerprint:
        raise CheckpointError(
            f"{path / 'encoder'} is not the encoder of this run; "
            f"expected {fingerprint[:12]}, got {encoder.fingerprint[:12]}"
        )
    return encoder


@contextlib.contextmanager
def working_in(path: Path) -> Iterator[None]:
    """Hold the lock of a run folder, which is made if necessary.

    If the block fails before the run has a checkpoint, all files that it wrote are removed, so that a failed start does
    not block the next one.
    """
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    try:
        with locked(path):
            before = {item.name for item in path.iterdir()}
            try:
                yield
            except BaseException:
                if "config.json" not in before and not _holds_any(path):
                    remove_leftovers(path)
                    for name in {*FILES, "encoder"} - before:
                        _remove(path / name)
                raise
    finally:
        for folder in made:
            with contextlib.suppress(OSError):  # it has something in it
                folder.rmdir()


def _holds_any(path: Path) -> bool:
    """Whether a run folder has a checkpoint, sharded or not."""
    return any(
        (path / f"{name}.safetensors").exists() or checkpoint.checkpoints(path, name) for name in ("best", "last")
    )


def remove_leftovers(path: Path) -> None:
    for leftover in path.iterdir():
        if LEFTOVER.fullmatch(leftover.name):
            _remove(leftover)


class RunInUse(CheckpointError):
    """Another process holds the lock of a run folder."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder. The system releases it when the process dies, in any way."""
    path = folder / LOCK
    descriptor = _acquire(path)
    try:
        with contextlib.suppress(OSError):  # on a full disk the lock holds all the same, without a name on it
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held: see _acquire
        os.close(descriptor)


def _acquire(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous holder may have removed the file after it was opened here. Then open it again.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return descriptor
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise RunInUse(f"{path.parent} is in use by {holder}; wait for it, or stop it, and try again") from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def draw_curves(histories: Mapping[str, History], optimum: float | None = None) -> bytes:
    """A PNG of :func:`curves`."""
    png = io.BytesIO()
    curves(histories, optimum).savefig(png, format="png", dpi=120)
    return png.getvalue()


def curves(histories: Mapping[str, History], optimum: float | None = None) -> "Figure":
    """Logloss (left) and AUC or accuracy (right) over the steps, one colour per entry of ``histories``. For regression:
    the training loss, in variances of the label, and the RMSE.

    The legend is below both, where it hides no curve.
    """
    from matplotlib.figure import Figure  # slow to import; without pyplot, which would look for a display
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(10, 4.4), layout="constrained")
    first = next(iter(histories.values()))[0]
    score = next((name for name in ("validation_auc", "validation_accuracy", "validation_rmse") if name in first), "")
    left, *others = figure.subplots(1, 2 if score else 1, squeeze=False)[0]
    training: dict[str, Any] = {"alpha": 0.4}
    validation: dict[str, Any] = {"marker": "."}
    best: dict[str, Any] = {"color": "black", "linestyle": ":"}
    entries = []
    for index, (name, history) in enumerate(histories.items()):
        colour = f"C{index}"
        steps = [row["step"] for row in history]
        left.plot(steps, [row["train_loss"] for row in history], color=colour, **training)
        if "validation_logloss" in first:
            left.plot(steps, [row["validation_logloss"] for row in history], color=colour, **validation)
        for right in others:
            right.plot(steps, [row[score] for row in history], color=colour, **validation)
        if name:
            entries.append(Line2D([], [], color=colour, label=name))
    colour = "grey" if entries else "C0"
    entries.append(Line2D([], [], color=colour, label="training", **training))
    if score:
        entries.append(Line2D([], [], color=colour, label="validation", **validation))
    if optimum is not None:
        left.axhline(optimum, **best)
        entries.append(Line2D([], [], label="Bayes optimum", **best))
    left.set(xlabel="step", ylabel="squared error" if score == "validation_rmse" else "logloss")
    for right in others:
        right.set(xlabel="step", ylabel=score.replace("_", " "))
    figure.legend(handles=entries, loc="outside lower center", ncols=5, frameon=False)
    return figure


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
    """Write JSON for the user to read. Files that fastcross reads back have a checksum too."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(_strict(content), indent=2) + "\n")


def _write(path: Path, content: Mapping[str, Any]) -> None:
    write_checked_json(path, _strict({"run_format": RUN_FORMAT, **content}))


def _read(path: Path) -> dict[str, Any]:
    """What :func:`_write` wrote."""
    try:
        content = read_checked_json(path)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    if content.pop("run_format", 0) > RUN_FORMAT:
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
