"""A trained model, read from the run folder that its training left."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastcross.batch import Schema
from fastcross.data import Cache
from fastcross.models import MODELS
from fastcross.models.base import Model
from fastcross.training import checkpoint
from fastcross.training.checkpoint import CheckpointError
from fastcross.training.processes import choose_device
from fastcross.training.run_folder import Run, load_encoder

if TYPE_CHECKING:
    from fastcross.data.encoder import Encoder


@dataclass(frozen=True)
class Trained:
    """A model ready to predict, and what it was trained on."""

    model: Model
    schema: Schema
    path: Path  # of the run folder
    cache: str
    fingerprint: str  # of the cache
    encoder_fingerprint: str | None  # None for a run of fastcross 0.1

    @cached_property
    def encoder(self) -> "Encoder":
        """What turns rows into the batches that the model knows, from the run folder."""
        return load_encoder(self.path, self.encoder_fingerprint)

    def open_cache(self, path: Path | str | None = None) -> Cache:
        """The cache the model was trained on, which is at ``path`` if it has moved."""
        if path is not None:
            self.open_other_cache(path)  # that another encoder made it says more than that it is another one
        cache = Cache.open(path or self.cache, fingerprint=self.fingerprint)
        cache.check_encoder(self.encoder.fingerprint)
        return cache

    def open_other_cache(self, path: Path | str) -> Cache:
        """A cache of any data that was made with the model's encoder."""
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
        model = MODELS[state["kind"]].from_config(state["config"])
        model.load_state_dict(state["model"])
        facts = (state["cache"], state["fingerprint"], state.get("encoder"))
        schema = Schema.from_dict(state["schema"])
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointError(f"{path} holds no model that this version can build: {error}") from error
    model.to(choose_device(device)).eval()
    return Trained(model, schema, run, *facts)


def _check_owner(path: Path, state: dict[str, Any], config: dict[str, Any]) -> None:
    """A checkpoint that was copied from another run is sound, and is another model."""
    for name, known in (("kind", "model"), ("fingerprint", "fingerprint"), ("encoder", "encoder")):
        if state.get(name) != config.get(known):
            both = f"expected {known} {str(config.get(known))[:12]}, got {str(state.get(name))[:12]}"
            raise CheckpointError(f"the best checkpoint in {path} is not that of this run: {both}")


def _read_best(run: Run) -> dict[str, Any]:
    if run.config.get("sharding"):
        from fastcross.training.shards import newest, read_whole  # torch.distributed.checkpoint takes a while to import

        return read_whole(newest(run.path, "best"))
    if not run.holds("best"):
        raise CheckpointError(f"{run.path} holds no model yet: it has not come to its first evaluation")
    return checkpoint.load(run.best)
