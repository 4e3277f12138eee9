"""A sharded run: its lock, a flipped byte in any file of its checkpoints, and conversion there and back."""

import os
import shutil
import signal

import pytest
import torch

from fastcross.cli.main import main
from fastcross.distributed.sharding import convert_run, join
from fastcross.training import checkpoint, load_model, resume
from fastcross.training.checkpoint import CheckpointError, newest, read_whole
from fastcross.training.loop import Interrupted
from fastcross.training.run_folder import Run, RunInUse
from tests.distributed.helpers import (
    QUIET,
    arguments,
    assert_same_curve,
    curve,
    experiment,
    interrupt,
    start,
)

pytest.importorskip("torchrec")

pytestmark = QUIET


@pytest.fixture(scope="module")
def interrupted(cache, tmp_path_factory):
    path = tmp_path_factory.mktemp("interrupted") / "run"
    with join("cpu") as processes, pytest.raises(Interrupted):
        experiment(cache, sharding="row").run(path, show=interrupt, processes=processes)
    return path


def test_a_flipped_byte_in_any_file_of_the_shards_is_named(interrupted, tmp_path):
    """0.1 had no checksums; the index is a pickle, which must not be opened before it is known to be whole."""
    shutil.copytree(interrupted, tmp_path / "run")
    folder = newest(tmp_path / "run", "last")
    files = sorted(folder.iterdir())
    assert {path.suffix for path in files} == {".distcp", ".safetensors", ".checksum", ""}
    for path in files:
        whole = path.read_bytes()
        for position in range(0, len(whole), 1 + len(whole) // 40):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << position % 8
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=path.name):
                read_whole(folder)
        for damaged in (whole[:-1], whole + b"\0", b""):
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=path.name):
                read_whole(folder)
        path.write_bytes(whole)
    read_whole(folder)


@pytest.mark.parametrize("name", ["last", "best"])
def test_a_damaged_checkpoint_is_not_resumed(name, interrupted, tmp_path):
    """Neither from "last", nor, hours later, finished with "best"."""
    shutil.copytree(interrupted, tmp_path / "run")
    (part,) = newest(tmp_path / "run", name).glob("*.distcp")
    with open(part, "r+b") as file:
        file.seek(part.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    with join("cpu") as processes, pytest.raises(CheckpointError, match=f"{name}-.*{part.name} is damaged"):
        resume(tmp_path / "run", processes=processes)
    if name == "best":
        with pytest.raises(CheckpointError, match=part.name):
            load_model(tmp_path / "run")


def test_two_processes_hold_one_lock(cache, tmp_path, capsys):
    run = tmp_path / "run"
    process = start(arguments(cache, run, processes=2, epochs=200))
    while "step 13:" not in (line := process.stderr.readline()):
        assert process.poll() is None, line
    with join("cpu") as processes, pytest.raises(RunInUse, match="in use by process"):
        resume(run, processes=processes)
    assert main(["train", "--resume", str(run)]) == 2
    assert "is in use by process" in capsys.readouterr().err
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 130, errors
    assert not list(run.glob(".*"))


def test_a_start_that_fails_on_one_rank_leaves_nothing(cache, tmp_path):
    """Found on all ranks (a batch of one row for two of them), and on one alone (damaged rows of the second)."""
    process = start(arguments(cache, tmp_path / "small", processes=2, batch_size=1))
    _, errors = process.communicate(timeout=480)
    assert process.returncode == 2, errors
    assert "a batch needs a row for each of 2 ranks; got 1" in errors
    assert list(tmp_path.iterdir()) == []


def test_a_missing_torchrec_leaves_nothing(cache, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "fastcross.distributed.model", None)
    with join("cpu") as processes, pytest.raises(ImportError):
        experiment(cache).run(tmp_path / "runs" / "first", processes=processes)
    assert list(tmp_path.iterdir()) == []
    assert not torch.distributed.is_initialized()


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
    assert convert_run(Run(tmp_path / "sharded"), "single", tmp_path / "single") == ["best", "last"]
    resume(tmp_path / "single")
    experiment(cache, sharded=False, optimizer=optimizer).run(tmp_path / "whole")
    assert_same_curve(curve(tmp_path / "single", "validation_ece"), curve(tmp_path / "whole", "validation_ece"))
