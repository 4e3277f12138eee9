"""One process at a time in a run folder: the others are told who holds it, and a killed one holds nothing."""

import os
import signal
import subprocess
import sys
import time

import pytest

from fastcross.training import Dataset, Experiment, TrainingConfig, resume
from fastcross.training.run_folder import RunInUse, locked
from tests.training.helpers import arguments, start

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
