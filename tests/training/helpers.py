"""What the tests of training share."""

import csv
import subprocess
import sys

import torch

from fastcross.models.dcn import DCN
from fastcross.training import Dataset, Experiment, TrainingConfig

OPTIONS = {
    "--cross-layers": 2,
    "--deep-layers": 16,
    "--dropout": 0.3,
    "--batch-size": 128,
    "--epochs": 3,
    "--evaluate-every": 5,
    "--schedule": "plateau",
    "--patience": 0,
    "--lr": 0.03,
    "--checkpoint-seconds": 0.05,
    "--threads": 1,
    "--seed": 7,
}


def arguments(cache, run, **changes):
    options = OPTIONS | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    pairs = [str(text) for pair in options.items() for text in pair]
    return ["train", "--data", str(cache.path), "--run", str(run), *pairs]


def start(arguments):
    command = [sys.executable, "-m", "fastcross", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def metrics_without_time(run):
    with open(run / "metrics.csv") as file:
        return [{name: value for name, value in row.items() if name != "seconds"} for row in csv.DictReader(file)]


def small_dcn(cache, seed=0, **options):
    torch.manual_seed(seed)
    sizes = {"cross_layers": 2, "deep_layers": (8,)} | options
    return DCN(cache.schema.cardinalities, len(cache.schema.dense_names), 4, **sizes)


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_weights(a, b):
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different


TINY = {"cross_layers": 1, "deep_layers": [4], "embedding_dim": 2}


def tiny_experiment(cache, options=TINY, **training):
    """Two steps of a DCN that is hardly one."""
    config = TrainingConfig(**{"batch_size": 256, "max_steps": 2, **training})
    return Experiment(Dataset(str(cache.path)), options=options, training=config, threads=1)
