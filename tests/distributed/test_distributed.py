"""Training over several processes: the curve of one, faults, other numbers of ranks, conversion. Real processes."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from fastcross.cli.main import main
from fastcross.data import prepare
from fastcross.data.generate import write_click_log
from fastcross.training import checkpoint
from fastcross.training.config import TrainingConfig
from fastcross.training.dataset import Dataset
from fastcross.training.evaluate import evaluate
from fastcross.training.experiment import Experiment, resume
from fastcross.training.loop import Interrupted
from fastcross.training.run_folder import Run
from fastcross.training.shards import newest, read_whole
from fastcross.training.trained import load_model

pytest.importorskip("torchrec")
from fastcross.distributed import model as distributed_model
from fastcross.distributed.convert import convert
from fastcross.distributed.sharding import join

# What TorchRec and torch.distributed.checkpoint say of each other's and of PyTorch's older interfaces.
pytestmark = [
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


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clicks")
    write_click_log(folder / "clicks.txt", 4000, largest_vocabulary=300)
    return prepare(folder / "clicks.txt", folder / "cache")


def arguments(cache, run, **changes):
    options = (OPTIONS | changes).items()
    pairs = [text for name, value in options for text in (f"--{name.replace('_', '-')}", str(value))]
    return ["train", "--data", str(cache.path), "--run", str(run), *pairs]


def experiment(cache, *, sharded=True, **changes):
    values = OPTIONS | {"deep_layers": (16, 8), "seed": 7} | changes
    training = {name: values[name] for name in TrainingConfig.__dataclass_fields__ if name in values}
    options = {name: values[name] for name in ("cross_layers", "deep_layers", "dropout", "l2") if name in values}
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
    facts = {"cache": str(cache.path), "fingerprint": cache.fingerprint, "optimum": {}}
    return Run.create(folder, plan.to_dict() | facts)


@pytest.fixture(scope="module")
def trained(cache, tmp_path_factory):
    """Every case, trained by two processes in one launch: TorchRec takes longer to import than they take to train."""
    folder = tmp_path_factory.mktemp("trained")
    for name, changes in CASES.items():
        create(folder / name, cache, experiment(cache, **changes))
    create(folder / "undisturbed", cache, experiment(cache, **DROPOUT))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.run([*torchrun, str(WORKER), str(folder)], capture_output=True, text=True, timeout=170)
    assert process.returncode == 0, process.stderr[-4000:]
    done = json.loads((folder / "done.json").read_text())
    assert done == {"size": 2, "gathered": [[1.0] * 3] * 2}
    return folder


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


@pytest.mark.parametrize("name", CASES)
def test_two_processes_follow_the_curve_of_one(name, cache, trained, tmp_path):
    """Losses, metrics (AUC over all ranks) and final weights; for Adam too, whose rows are then fastcross's own."""
    result = experiment(cache, sharded=False, **CASES[name]).run(tmp_path / "one")
    run = Run(tmp_path / "one")
    sharded = Run(trained / name)
    # The share of rows within a bin moves in steps: a row on the edge between two changes ece by far more than it.
    assert_same_curve(curve(sharded.path, "validation_ece"), curve(run.path, "validation_ece"))
    assert sharded.result["stopped_early"] == result["stopped_early"] == (name == "adam-stopped")
    for key in ("steps", "best_step", "parameters", "dense_parameters"):
        assert sharded.result[key] == result[key]
    assert sharded.result["test"]["auc"] == pytest.approx(result["test"]["auc"], rel=1e-4)
    one, two = load_model(run.path).model.state_dict(), load_model(sharded.path).model.state_dict()
    assert one.keys() == two.keys()
    for key, weight in one.items():
        torch.testing.assert_close(two[key], weight, rtol=1e-3, atol=1e-4)


def test_sharded_runs_are_read_like_any_other(cache, trained, capsys):
    run = Run(trained / "sgd-row")
    model = load_model(run.path)
    assert evaluate(model.model, cache, "test") == pytest.approx(run.result["test"], rel=1e-6)
    assert main(["info", str(run.path)]) == 0
    assert "strongest crosses" in capsys.readouterr().out


def children(pid):
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def newest_step(run, name="last"):
    steps = [int(path.name.rpartition("-")[2]) for path in run.glob(f"{name}-*")]
    return max(steps, default=0)


def wait_for(process, condition, seconds=90):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_killed_worker_is_restarted_and_ends_like_the_undisturbed_run(cache, trained, tmp_path):
    """SIGKILL to one of two; dropout's generators, moments, plateau decay and the order of batches have to carry on."""
    run = tmp_path / "killed"
    options = {"processes": 2, "max_restarts": 1, "seed": 7, "checkpoint_seconds": 0.1, **DROPOUT}
    process = start([*arguments(cache, run, **options), "--distributed"])
    wait_for(process, lambda: newest_step(run) >= 15)
    workers = children(process.pid)
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    killed_at = newest_step(run)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert killed_at < 78
    assert errors.count("2 processes on cpu") == 2  # the second time after the restart
    assert errors.count("fastcross train:") == 1
    assert "lost another rank" in errors
    assert curve(run) == curve(trained / "undisturbed")
    expected, found = ((folder / "last-00000078" / "state.safetensors") for folder in (trained / "undisturbed", run))
    assert torch.equal(*(checkpoint.load(path)["model"]["cross.weight"] for path in (expected, found)))
    assert "test: logloss" in output
    assert not list(run.glob(".*"))


def interrupt(line):
    """Called at an evaluation."""
    os.kill(os.getpid(), signal.SIGINT)


def test_interrupted_on_two_resumed_on_one_and_finished_on_two(cache, tmp_path):
    """Another number of ranks each time, and the curve stays that of one process."""
    run, one = tmp_path / "run", tmp_path / "one"
    process = start(arguments(cache, run, processes=2, epochs=3))  # several processes imply --distributed
    while "step 13:" not in (line := process.stderr.readline()):
        assert process.poll() is None, line
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert f"continue with: fastcross train --resume {run} --processes 2" in errors
    assert "Traceback" not in errors
    first = newest_step(run)
    assert 13 <= first < 52
    with join("cpu") as processes, pytest.raises(Interrupted):
        resume(run, show=interrupt, processes=processes)
    assert first < newest_step(run) < 78
    process = start(["train", "--resume", str(run), "--processes", "2"])
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert main(arguments(cache, one, epochs=3)) == 0
    assert main(["train", "--resume", str(one), "--processes", "2"]) == 2
    assert_same_curve(curve(run, "validation_ece"), curve(one, "validation_ece"))


def test_a_corrupt_part_on_one_rank_stops_all_with_one_message(cache, tmp_path):
    damaged = tmp_path / "cache"
    shutil.copytree(cache.path, damaged)
    categorical = np.load(damaged / "train" / "categorical.npy", mmap_mode="r+")
    order = next(iter(cache.batches("train", 129, shuffle=True, start=6, rank=1, world_size=2)))
    row = int((cache._arrays("train")["categorical"] == order.categorical[3].numpy()).all(1).nonzero()[0][0])
    categorical[row, 4] = 1_000_000
    categorical.flush()
    cache_of_it = type(cache).open(damaged)
    began = time.monotonic()
    process = start([*arguments(cache_of_it, tmp_path / "run", processes=2), "--distributed"])
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    said = [line for line in errors.splitlines() if line.startswith("fastcross train:")]
    assert len(said) == 1, errors
    assert re.search(r"rank 1: feature 4 has \d+ ids, 0 to \d+; got id 1000000 in row \d+", said[0])
    assert "Traceback" not in errors
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("name", ["adam-clipped", "sgd-row"])
def test_conversion_there_and_back_is_bit_for_bit(name, trained, tmp_path, capsys):
    single, sharded, again = tmp_path / "single", tmp_path / "sharded", tmp_path / "again"
    assert main(["convert", str(trained / name), str(single), "--to", "single"]) == 0
    assert main(["convert", str(single), str(sharded), "--to", "sharded"]) == 0
    assert main(["convert", str(sharded), str(again), "--to", "single"]) == 0
    for kept in ("best", "last"):
        first, second = (checkpoint.load(folder / f"{kept}.safetensors") for folder in (single, again))
        assert_equal(first, second)
        assert_equal(read_whole(newest(sharded, kept)), read_whole(newest(trained / name, kept)))
    assert load_model(single).model.state_dict().keys() == load_model(sharded).model.state_dict().keys()
    assert Run(single).result == Run(trained / name).result
    assert main(["convert", str(single), str(tmp_path / "other"), "--to", "single"]) == 2
    (part,) = newest(sharded, "best").glob("*.distcp")
    os.truncate(part, part.stat().st_size // 2)
    assert main(["convert", str(sharded), str(tmp_path / "other"), "--to", "single"]) == 2
    assert "is not a whole checkpoint" in capsys.readouterr().err


def assert_equal(a, b):
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        for first, second in zip(a, b, strict=True):
            assert_equal(first, second)
    else:
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_converted_run_goes_on_where_the_sharded_one_stopped(optimizer, cache, tmp_path):
    """One process each, TorchRec's first: half of an epoch, converted, then to the end on fastcross's own tables."""
    with join("cpu") as processes, pytest.raises(Interrupted, match="step 13 of 26"):
        experiment(cache, optimizer=optimizer).run(tmp_path / "sharded", show=interrupt, processes=processes)
    assert convert(Run(tmp_path / "sharded"), "single", tmp_path / "single") == ["best", "last"]
    resume(tmp_path / "single")
    experiment(cache, sharded=False, optimizer=optimizer).run(tmp_path / "whole")
    assert_same_curve(curve(tmp_path / "single", "validation_ece"), curve(tmp_path / "whole", "validation_ece"))


def test_fbgemm_in_one_ordinary_process(cache, tmp_path, capsys):
    """Without torchrun or --distributed; its folder evaluates like any other."""
    options = {"optimizer": "sgd", "lr": 0.05}
    assert main(arguments(cache, tmp_path / "own", **options)) == 0
    assert main(arguments(cache, tmp_path / "fbgemm", embedding="fbgemm", **options)) == 0
    assert_same_curve(curve(tmp_path / "fbgemm", "validation_ece"), curve(tmp_path / "own", "validation_ece"))
    assert main(["evaluate", str(tmp_path / "fbgemm")]) == 0
    capsys.readouterr()
    assert main(arguments(cache, tmp_path / "adam", embedding="fbgemm")) == 2
    assert "fbgemm has no adam for the cpu; use --embedding fastcross" in capsys.readouterr().err


def test_tables_are_drawn_in_pieces_as_if_at_once(monkeypatch):
    class Whole:
        def __init__(self, tensor):
            self.tensor, self.metadata = tensor, type("", (), {"shard_offsets": [0, 0]})

        def local_shards(self):
            return [self]

        def size(self, dim):
            return self.tensor.shape[dim]

    monkeypatch.setattr(distributed_model, "CHUNK", 16)
    for rows, dim in ((1, 3), (5, 4), (16, 3), (49, 1), (64, 7), (1000, 5)):
        torch.manual_seed(5)
        expected, after = torch.empty(rows, dim).normal_(std=dim**-0.5), torch.rand(2)
        torch.manual_seed(5)
        found = Whole(torch.full((rows, dim + 2), 9.0))
        distributed_model._draw(found, dim)
        assert torch.equal(found.tensor[:, :dim], expected)
        assert not found.tensor[:, dim:].any()
        assert torch.equal(torch.rand(2), after)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "fm"}, "trains the models dcn and dnn; got fm"),
        ({"optimizer": "lion"}, 'must be "adam" or "sgd"; got \'lion\''),
    ],
)
def test_what_cannot_be_sharded_is_said(changes, message, cache, tmp_path, capsys):
    model = {"cross-layers": 2, "deep-layers": "8"} if "model" not in changes else {}
    pairs = [str(text) for name, value in (model | changes).items() for text in (f"--{name}", value)]
    assert main(["train", "--distributed", "--data", str(cache.path), "--run", str(tmp_path / "run"), *pairs]) == 2
    assert message in capsys.readouterr().err


def test_data_without_tables_is_said(tmp_path, capsys):
    (tmp_path / "table.csv").write_text("label,a,b\n" + "".join(f"{i % 2},{i * 0.5},{i * 0.25}\n" for i in range(200)))
    options = ["--data", str(tmp_path / "table.csv"), "--label", "label", "--cache", str(tmp_path / "cache")]
    assert main(["train", "--distributed", *options, "--run", str(tmp_path / "run")]) == 2
    assert "there is no table to shard" in capsys.readouterr().err
