"""A run folder: every byte is verified, one process writes, a failed start leaves nothing, curves are drawn."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from fastcross.data import DataError
from fastcross.files import write_checked_json
from fastcross.training import Dataset, Experiment, TrainingConfig, checkpoint, load_model, resume
from fastcross.training.checkpoint import CheckpointError
from fastcross.training.run_folder import Run, RunInUse, curves, draw_curves, locked, working_in
from fastcross.training.step import TrainingError
from tests.training.helpers import TINY, arguments, start, tiny_experiment


@pytest.fixture(scope="module")
def finished(cache, tmp_path_factory):
    path = tmp_path_factory.mktemp("finished") / "run"
    tiny_experiment(cache).run(path)
    return path


def read_all(path):
    """Everything that evaluate, predict, export, info and compare read."""
    run = Run(path)
    Experiment.load(path)
    assert run.result is not None
    assert run.history
    return load_model(path, "cpu").encoder


@pytest.mark.parametrize(
    "name",
    ["config.json", "result.json", "metrics.csv", "metrics.csv.checksum", "encoder/encoder.json", "best.safetensors"],
)
def test_a_flipped_byte_anywhere_is_an_error_that_names_the_file(finished, tmp_path, name):
    """0.1 read all of these as they came: exit code 0 and other numbers."""
    shutil.copytree(finished, tmp_path / "run")
    file = tmp_path / "run" / name
    whole = file.read_bytes()
    for position in range(0, len(whole), 1 + len(whole) // 150):
        for change in (1 << (position % 8), 0x80):
            damaged = bytearray(whole)
            damaged[position] ^= change
            file.write_bytes(damaged)
            with pytest.raises((CheckpointError, DataError), match=file.name):
                read_all(tmp_path / "run")
    for damaged in (whole[:-1], whole[: len(whole) // 2], b"", whole + b" ", b"[]", b"{}", b"[" * 100_000):
        file.write_bytes(damaged)
        with pytest.raises((CheckpointError, DataError), match=file.name):
            read_all(tmp_path / "run")
    file.write_bytes(whole)
    read_all(tmp_path / "run")


def test_an_absent_file_is_named(finished, tmp_path):
    for name in (
        "metrics.csv.checksum",
        "best.safetensors.checksum",
        "best.safetensors",
        "encoder/encoder.json",
        "encoder/categorical3.arrow",
    ):
        copy = tmp_path / name.replace("/", "-")
        shutil.copytree(finished, copy)
        (copy / name).unlink()
        with pytest.raises((ValueError, OSError), match=r"\.checksum, is not there|holds no model yet|encoder"):
            read_all(copy)


def test_the_encoder_of_another_run_is_refused(finished, unvalidated, tmp_path):
    tiny_experiment(unvalidated).run(tmp_path / "other")
    shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "encoder")
    shutil.copytree(tmp_path / "other" / "encoder", tmp_path / "run" / "encoder")
    expected, found = (Run(path).config["encoder"][:12] for path in (finished, tmp_path / "other"))
    with pytest.raises(CheckpointError, match=f"not the encoder of this run; expected {expected}, got {found}"):
        read_all(tmp_path / "run")


NAMES = "model", "options", "cache", "fingerprint", "encoder", "device", "threads"


@pytest.mark.parametrize(
    ("content", "message"),
    [({}, "no 'model'"), ({"model": "dcn"}, "no 'options'"), (dict.fromkeys(NAMES) | {"training": 3}, "keys")],
)
def test_a_configuration_that_is_none(finished, tmp_path, content, message):
    shutil.copytree(finished, tmp_path / "run")
    write_checked_json(tmp_path / "run" / "config.json", content)
    with pytest.raises(CheckpointError, match=rf"config\.json.*{message}"):
        Experiment.load(tmp_path / "run")


HOLD = """
import sys, time
from pathlib import Path
from fastcross.training.run_folder import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of tmp_path."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_process_is_told_who_holds_it(holder, tmp_path):
    with pytest.raises(RunInUse, match=rf"{tmp_path} is in use by process {holder.pid} on "), locked(tmp_path):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with locked(tmp_path):
        assert str(os.getpid()) in (tmp_path / ".lock").read_text()
    assert list(tmp_path.iterdir()) == []


def test_within_one_process_too(tmp_path):
    with locked(tmp_path):
        with pytest.raises(RunInUse, match=f"process {os.getpid()}"), locked(tmp_path):
            pass
        with pytest.raises(RunInUse), locked(tmp_path):
            pass
    with locked(tmp_path):
        pass


def test_many_take_turns(tmp_path):
    """The lock's file is removed by whoever held it: none of those that wait for it may take a removed one for it."""
    script = f"""
import sys, time
from pathlib import Path
from fastcross.training.run_folder import RunInUse, locked
folder = Path({str(tmp_path)!r})
turns = 0
while turns < 25:
    try:
        with locked(folder):
            with open(folder / "inside", "x"):
                pass
            time.sleep(0.0005)
            (folder / "inside").unlink()
            turns += 1
    except RunInUse:
        time.sleep(0.0002)
"""
    processes = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(3)]
    assert [process.wait(timeout=480) for process in processes] == [0, 0, 0]
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_resumed_once_and_its_folder_taken_once(cache, tmp_path):
    """In 0.1 three `train --resume` of one run all returned 0, with each other's results."""
    run = tmp_path / "run"
    process = start(arguments(cache, run, epochs=1000))
    while "step 10" not in process.stderr.readline():
        assert process.poll() is None
    with pytest.raises(RunInUse, match=f"in use by process {process.pid} "):
        resume(run)
    with pytest.raises(RunInUse, match=f"in use by process {process.pid} "):
        Experiment(Dataset(str(cache.path)), training=TrainingConfig(epochs=1)).run(run)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=240)
    assert process.returncode == 130
    again = [start(["train", "--resume", str(run)]) for _ in range(3)]
    errors = []
    for _ in range(2):  # whoever came too late ends at once
        while all(process.poll() is None for process in again):
            time.sleep(0.05)
        (late,) = [process for process in again if process.poll() is not None][:1]
        again.remove(late)
        assert late.returncode == 2
        errors.append(late.communicate()[1])
    (first,) = again
    assert first.poll() is None
    assert all(f"is in use by process {first.pid} " in error for error in errors), errors
    first.send_signal(signal.SIGKILL)
    first.wait()


def everything_under(path):
    return sorted(str(item.relative_to(path)) for item in path.rglob("*"))


@pytest.mark.parametrize(
    ("options", "training", "error", "message"),
    [
        ({}, {"lr": 1e30, "max_steps": 9}, TrainingError, "step 2"),
        ({"structure": "square"}, {}, ValueError, "square"),
        ({"backend": "quantum"}, {}, ValueError, "quantum"),
        ({"batch_norm": True}, {"batch_size": 1}, ValueError, "needs 2 rows in a batch; got 1"),
    ],
)
def test_a_start_that_failed_leaves_nothing(cache, tmp_path, options, training, error, message):
    """In 0.1 its folder stood in the way of the next try."""
    with pytest.raises(error, match=message):
        tiny_experiment(cache, TINY | options, **training).run(tmp_path / "runs" / "first")
    assert everything_under(tmp_path) == []
    # In a folder of the user's own, the user's files stay.
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "notes.txt").write_text("mine")
    (tmp_path / "own" / ".draft.tmp").write_text("mine too")
    with pytest.raises(error, match=message):
        tiny_experiment(cache, TINY | options, **training).run(tmp_path / "own")
    assert everything_under(tmp_path / "own") == [".draft.tmp", "notes.txt"]
    tiny_experiment(cache).run(tmp_path / "own")


def test_a_disk_that_fills_up_at_a_checkpoint(cache, tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full)
        with pytest.raises(OSError, match="No space left"):
            tiny_experiment(cache).run(tmp_path / "run")
    assert everything_under(tmp_path) == []
    # Once there is a checkpoint the run is worth keeping: it can go on.
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        tiny_experiment(cache, max_steps=6, evaluate_every=2).run(
            tmp_path / "run", show=lambda line: "step 2:" in line and patch.setattr(checkpoint, "save_file", full)
        )
    assert (tmp_path / "run" / "best.safetensors").exists()
    assert resume(tmp_path / "run")["steps"] == 6


def test_a_failure_in_a_run_that_exists_removes_nothing(cache, tmp_path):
    tiny_experiment(cache).run(tmp_path / "run")
    for name in ("best", "last"):
        (tmp_path / "run" / f"{name}.safetensors").unlink()
    before = everything_under(tmp_path)
    with pytest.raises(RuntimeError, match="at once"), working_in(tmp_path / "run"):
        raise RuntimeError("at once")
    assert everything_under(tmp_path) == before


def test_leftovers_of_a_killed_process_vanish_and_never_block(cache, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for name in (".config.json.4711.tmp", ".best.safetensors.4711.tmp", ".tmpzd4cu6", ".lock"):
        (run / name).write_text("half")
    (run / ".last-00000003.tmp").mkdir()
    (run / ".last-00000003.tmp" / "part").write_text("half")
    (run / ".mine.tmp").write_text("no leftover of a run")
    (run / "encoder").mkdir()  # killed before config.json was there
    tiny_experiment(cache, max_steps=4, evaluate_every=2).run(run)
    assert [name for name in everything_under(run) if name.startswith(".")] == [".mine.tmp"]
    (run / "result.json").unlink()
    (run / ".result.json.4711.tmp").write_text("half")
    shutil.copy(run / "best.safetensors", run / ".last.safetensors.1.tmp")
    resume(run)
    assert [name for name in everything_under(run) if name.startswith(".")] == [".mine.tmp"]


def history(start, *names):
    columns = {"train_loss": 1.0, "validation_logloss": 1.1, "validation_auc": -1.0}
    rows = [{"step": 10 * i} | {name: columns[name] * (start + 1 / i) for name in names} for i in range(1, 9)]
    return rows


EVERYTHING = ("train_loss", "validation_logloss", "validation_auc")
MODELS = ("dcn", "deep_crossing", "dnn", "wide_deep", "fm", "lr")


@pytest.mark.parametrize("names", [("",), MODELS])
def test_the_legend_covers_no_curve(names):
    """0.1 let the legend stand within the axes, where a training curve and its legend met at the upper right."""
    figure = curves({name: history(i, *EVERYTHING) for i, name in enumerate(names)}, optimum=0.5)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert all(axes.get_legend() is None for axes in figure.axes)
    assert not any(box.overlaps(axes.get_window_extent()) for axes in figure.axes)
    assert figure.bbox.containsx(box.x0)
    assert figure.bbox.containsx(box.x1)
    shown = [text.get_text() for text in legend.get_texts()]
    assert shown == [*filter(None, names), "training", "validation", "Bayes optimum"]


def test_without_validation_there_is_one_panel():
    figure = curves({"": history(0, "train_loss")})
    assert len(figure.axes) == 1
    assert draw_curves({"": history(0, "train_loss")})[:8] == b"\x89PNG\r\n\x1a\n"
