"""A small click log with its cache, and one study on it that several tests look at."""

import pytest

from fastcross.data import prepare
from fastcross.data.generate import write_click_log
from fastcross.training.config import TrainingConfig
from fastcross.training.experiment import Dataset, Experiment
from fastcross.tuning.search import search, seeds
from fastcross.tuning.study import Study

SPACES = {
    "dcn": {"hidden_layers": [1, 2], "hidden_size": [4, 8], "cross_layers": [1, 2], "lr": [0.01]},
    "dnn": {"hidden_layers": [1, 2], "hidden_size": [4, 8], "lr": {"low": 0.001, "high": 0.1, "log": True}},
}
TRAINING = TrainingConfig(batch_size=256, epochs=2, evaluate_every=5, patience=0)


def silent(*line):
    pass


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuning")
    write_click_log(folder / "clicks.txt", 4000, largest_vocabulary=20)
    return prepare(folder / "clicks.txt", folder / "cache")


@pytest.fixture(scope="session")
def experiments(cache):
    data = Dataset(str(cache.path))
    return {name: Experiment(data, name, {"embedding_dim": 2}, TRAINING, threads=1) for name in ("dcn", "dnn")}


@pytest.fixture(scope="session")
def study(cache, experiments, tmp_path_factory):
    """Four trials of each model, without pruning, and two more seeds."""
    made = Study.create(tmp_path_factory.mktemp("study") / "study", experiments, SPACES, pruner="none")
    search(made, (cache, {}), trials=4, show=silent, progress=silent)
    seeds(made, (cache, {}), 2, show=silent, progress=silent)
    return made
