"""A run on ratings of films: bags with and without weights, date-times, gaps, ids never seen."""

import pytest
from hypothesis import settings
from serving_tables import COLUMNS, write_movies

from fastcross.data import prepare
from fastcross.training.config import TrainingConfig
from fastcross.training.experiment import Dataset, Experiment

settings.register_profile("long", max_examples=10_000)  # pytest --hypothesis-profile long


def train(folder, name="run", seed=0, **options):
    """A small run on the ratings in the folder, trained for a few steps."""
    if not (folder / "ratings.csv").exists():
        write_movies(folder / "ratings.csv", 1500)
        prepare(folder / "ratings.csv", folder / "cache", columns=COLUMNS)
    options = {"cross_layers": 2, "deep_layers": (16,), "embedding_dim": 4, **options}
    training = TrainingConfig(epochs=1, seed=seed, batch_size=256)
    Experiment(model="dcn", data=Dataset((str(folder / "cache"),)), options=options, training=training).run(
        folder / name
    )
    return folder / name


@pytest.fixture(scope="session")
def movies(tmp_path_factory):
    """The folder with ratings.csv, its cache and the run."""
    folder = tmp_path_factory.mktemp("movies")
    train(folder)
    write_movies(folder / "new.csv", 60, seed=1, new=15)
    return folder
