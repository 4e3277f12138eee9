"""Training: an experiment (data, model, training), its loop, its run folder, and the model that comes out."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fastcross.training.config import TrainingConfig

if TYPE_CHECKING:
    from fastcross.training.experiment import Dataset, Experiment, resume
    from fastcross.training.run_folder import load_model

__all__ = ["Dataset", "Experiment", "TrainingConfig", "load_model", "resume"]

# These need the packages of fastcross[train], which naming an option does not.
_MODULES = {"Dataset": "experiment", "Experiment": "experiment", "resume": "experiment", "load_model": "run_folder"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"fastcross.training.{_MODULES[name]}"), name)
