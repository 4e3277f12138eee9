"""What the tests of several processes share."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fastcross.training import Dataset, Experiment, TrainingConfig
from fastcross.training.run_folder import Run

# What TorchRec and torch.distributed.checkpoint say of each other's and of PyTorch's older interfaces.
QUIET = [
    pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "DeprecationWarning", "UserWarning")
]

WORKER = Path(__file__).with_name("distributed_worker.py")
# 129 rows are not even on two ranks; the paper's embedding sizes are not multiples of fbgemm's 4.
OPTIONS = {
    "cross_layers": 2,
    "deep_layers": "16,8",
    "batch_size": 129,
    "epochs": 1,
    "evaluate_every": 13,
    "patience": 0,
    "lr": 0.003,
    "dropout": 0,  # each process draws its own
    "threads": 1,
}
CASES = {
    "sgd-row": {"optimizer": "sgd", "lr": 0.05, "sharding": "row"},
    "sgd-column": {"optimizer": "sgd", "lr": 0.05, "sharding": "column"},
    "sgd-own": {"optimizer": "sgd", "lr": 0.05, "embedding": "fastcross", "sharding": "table"},
    "adam-row": {"sharding": "row"},
    "adam-clipped": {"sharding": "table", "clip_norm": 0.02},
    "adam-stopped": {"lr": 0.02, "epochs": 9, "patience": 1, "l2": 1e-4, "evaluate_every": 6},
}
DROPOUT = {"dropout": 0.3, "schedule": "plateau", "epochs": 3, "evaluate_every": 10}


def arguments(cache, run, **changes):
    options = (OPTIONS | changes).items()
    pairs = [text for name, value in options for text in (f"--{name.replace('_', '-')}", str(value))]
    return ["train", "--data", str(cache.path), "--run", str(run), "--batch-norm", *pairs]


def experiment(cache, *, sharded=True, **changes):
    values = OPTIONS | {"deep_layers": (16, 8), "seed": 7} | changes
    training = {name: values[name] for name in TrainingConfig.__dataclass_fields__ if name in values}
    options = {name: values[name] for name in ("cross_layers", "deep_layers", "dropout", "l2") if name in values}
    options["batch_norm"] = True
    sharding = values.get("sharding", "auto") if sharded else None
    return Experiment(
        Dataset(str(cache.path)),
        options=options,
        training=TrainingConfig(**training),
        threads=values["threads"],
        embedding=values.get("embedding", "auto"),
        sharding=sharding,
    )


def create(folder, cache, plan):
    """A run folder with an experiment that has not begun."""
    facts = {"cache": str(cache.path), "fingerprint": cache.fingerprint, "encoder": cache.encoder_fingerprint}
    plan, _ = plan.filled(cache)
    return Run.create(folder, plan.to_dict() | facts | {"optimum": {}}, cache.encoder)


def start(arguments):
    command = [sys.executable, "-m", "fastcross", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def curve(run, *without):
    with open(run / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    return [{name: float(value) for name, value in row.items() if name not in ("seconds", *without)} for row in rows]


def assert_same_curve(a, b, rel=2e-5):
    assert len(a) == len(b)
    for found, expected in zip(a, b, strict=True):
        assert found == pytest.approx(expected, rel=rel, abs=1e-6)


def children(pid):
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def newest_step(run, name="last"):
    steps = [int(path.name.rpartition("-")[2]) for path in run.glob(f"{name}-*")]
    return max(steps, default=0)


def wait_for(process, condition, seconds=360):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def interrupt(line):
    """At the first evaluation."""
    if "step" in line:
        os.kill(os.getpid(), signal.SIGINT)
