"""The run folder of a fitted estimator: kept on disk while the estimator lives, carried as bytes when it travels."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastcross.files import building, write_checked_json

if TYPE_CHECKING:
    from fastcross.batch import Batch
    from fastcross.data.cache import Cache
    from fastcross.training.run_folder import Trained

# The optimiser's state: with it a fit goes on more smoothly while the object lives; it does not travel.
LEFT_OUT = ("last.safetensors", "last.safetensors.checksum")
ROWS = 1024  # that importances are measured on


class KeptRun:
    """A folder of its own, which is removed with the object, by the process that made it."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.folder = Path(tempfile.mkdtemp(prefix="fastcross-"))
        self.rows: Batch | None = None  # some that were trained or validated with; they do not travel
        self.known: dict[str, float] | None = None  # importances, where the rows are gone
        weakref.finalize(self, _remove, self.folder, os.getpid())

    @property
    def path(self) -> Path:
        return self.folder / "run"

    @cached_property
    def trained(self) -> Trained:
        from fastcross.training import load_model

        return load_model(self.path, self.device)

    def look_at(self, cache: Cache) -> None:
        """Keep some rows of a cache, validation rows if there are any."""
        part = "validation" if cache.sizes["validation"] else "train"
        self.rows = next(cache.batches(part, ROWS, shuffle=True))

    @property
    def importances(self) -> dict[str, float]:
        """Of each input column: how far the output moves where its values are dealt to other rows; they sum to 1."""
        if self.known is None:
            if self.rows is None and Path(self.trained.cache).exists():
                self.look_at(self.trained.open_cache())
            if self.rows is None:
                raise ValueError("the rows it was trained on are gone; see sklearn.inspection.permutation_importance")
            from fastcross.explain.importance import permutation_importances
            from fastcross.training.metrics import predict_logits

            model, encoder = self.trained.model, self.trained.encoder
            self.known = permutation_importances(lambda rows: predict_logits(model, [rows])[0], [self.rows], encoder)
        return self.known

    def _known_importances(self) -> dict[str, float] | None:
        return self.known if self.rows is None else self.importances

    def copy_to(self, path: Path, name: str, content: dict[str, Any], *, overwrite: bool = False) -> None:
        """The run folder, and in it a file of JSON, at another place; whole or not at all.

        A run that is there is replaced if ``overwrite``; anything else is left alone."""
        from fastcross.training.run_folder import Run

        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            if not overwrite:
                raise ValueError(f"{path} is there already; save(path, overwrite=True) replaces a run")
            if not (path / "config.json").exists():
                raise ValueError(f"{path} is there already, and is no run folder; overwrite=True replaces a run alone")
        with building(path) as folder:
            left_out = shutil.ignore_patterns(".lock", *LEFT_OUT)
            shutil.copytree(self.path, folder, dirs_exist_ok=True, ignore=left_out)
            run = Run(folder)
            if run.history and not (folder / "curves.png").exists():  # a fit does not wait for them
                run.draw(run.result or {}, run.history)
            write_checked_json(folder / name, content)

    @classmethod
    def of(cls, path: Path, device: str) -> KeptRun:
        """A copy of a run folder that may change or vanish."""
        kept = cls(device)
        shutil.copytree(path, kept.path, ignore=shutil.ignore_patterns(*LEFT_OUT, "last-*", ".lock", "explanation"))
        return kept

    def __getstate__(self) -> dict[str, Any]:
        files = [file for file in _files(self.path) if file.name not in LEFT_OUT]
        contents = {str(file.relative_to(self.path)): file.read_bytes() for file in files}
        return {"device": self.device, "files": contents, "importances": self._known_importances()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["device"])  # type: ignore[misc]
        self.known = state["importances"]
        for name, content in state["files"].items():
            file = (self.path / name).resolve()
            if not file.is_relative_to(self.path.resolve()):
                raise ValueError(f"a run holds files of its own folder; got {name}")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def _remove(folder: Path, process: int) -> None:
    """Not by a process that was forked from the one that made it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
