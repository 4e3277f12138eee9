"""A trained model, read from the run folder that its training left."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastcross.batch import Schema
from fastcross.data import Cache
from fastcross.models import MODELS
from fastcross.models.dcn import Model
from fastcross.training import checkpoint
from fastcross.training.processes import choose_device
from fastcross.training.run_folder import Run


@dataclass(frozen=True)
class Trained:
    """A model ready to predict, and what it was trained on."""

    model: Model
    schema: Schema
    cache: str
    fingerprint: str

    def open_cache(self, path: str | None = None) -> Cache:
        """The cache the model was trained on, or another with the same columns and vocabularies."""
        cache = Cache.open(path or self.cache, fingerprint=None if path else self.fingerprint)
        if cache.schema != self.schema:
            raise ValueError(f"the cache {cache.path} has other columns or vocabularies than the model was trained on")
        return cache


def load_model(path: Path | str, device: str = "auto") -> Trained:
    """The best model of a run folder, sharded or not, or of a best.safetensors file, in evaluation mode."""
    path = Path(path)
    state = _read_best(Run(path)) if path.is_dir() else checkpoint.load(path)
    if state.get("kind") not in MODELS:
        raise checkpoint.CheckpointError(f"{path} holds no model; use best.safetensors")
    model = MODELS[state["kind"]].from_config(state["config"])
    model.load_state_dict(state["model"])
    model.to(choose_device(device)).eval()
    return Trained(model, Schema.from_dict(state["schema"]), state["cache"], state["fingerprint"])


def _read_best(run: Run) -> dict[str, Any]:
    if not run.config.get("sharding"):
        return checkpoint.load(run.best)
    from fastcross.training.shards import newest, read_whole  # torch.distributed.checkpoint takes a while to import

    return read_whole(newest(run.path, "best"))
