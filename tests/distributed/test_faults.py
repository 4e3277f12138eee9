"""Killed workers, interruptions, other numbers of ranks, and errors on one rank."""

import os
import re
import shutil
import signal
import time
import zlib

import numpy as np
import pytest
import torch

from fastcross.cli.main import main
from fastcross.files import read_checked_json, write_checked_json
from fastcross.training import checkpoint, resume
from fastcross.training.loop import Interrupted
from tests.distributed.helpers import (
    DROPOUT,
    QUIET,
    arguments,
    assert_same_curve,
    children,
    curve,
    interrupt,
    newest_step,
    start,
    wait_for,
)

pytest.importorskip("torchrec")
from fastcross.distributed.sharding import join

pytestmark = QUIET


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
    output, errors = process.communicate(timeout=480)
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


def test_interrupted_on_two_resumed_on_one_and_finished_on_two(cache, tmp_path):
    """Another number of ranks each time, and the curve stays that of one process."""
    run, one = tmp_path / "run", tmp_path / "one"
    process = start(arguments(cache, run, processes=2, epochs=3))  # several processes imply --distributed
    while "step 13:" not in (line := process.stderr.readline()):
        assert process.poll() is None, line
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 130, errors
    assert f"continue with: fastcross train --resume {run} --processes 2" in errors
    assert "Traceback" not in errors
    first = newest_step(run)
    assert 13 <= first < 52
    with join("cpu") as processes, pytest.raises(Interrupted):
        resume(run, show=interrupt, processes=processes)
    assert first < newest_step(run) < 78
    process = start(["train", "--resume", str(run), "--processes", "2"])
    _, errors = process.communicate(timeout=480)
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
    # Not a damaged file, which every rank would notice, but a wrong one: its checksum is right.
    manifest = read_checked_json(damaged / "manifest.json")
    manifest["files"]["train/categorical.npy"]["crc32"] = zlib.crc32((damaged / "train/categorical.npy").read_bytes())
    write_checked_json(damaged / "manifest.json", manifest)
    cache_of_it = type(cache).open(damaged)
    began = time.monotonic()
    process = start([*arguments(cache_of_it, tmp_path / "run", processes=2), "--distributed"])
    _, errors = process.communicate(timeout=480)
    assert process.returncode == 2
    said = [line for line in errors.splitlines() if line.startswith("fastcross train:")]
    assert len(said) == 1, errors
    assert re.search(r"rank 1: feature 4 has \d+ ids, 0 to \d+; got id 1000000 in row \d+", said[0])
    assert "Traceback" not in errors
    assert time.monotonic() - began < 60
