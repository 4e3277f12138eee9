"""Progress bars where standard error is a terminal; Ctrl-C: exit code 130, one line, no traceback, nothing left."""

import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from fastcross.data.generate import write_click_log


def errors_of(arguments, *, terminal):
    """What a command writes to standard error, a terminal or not."""
    command = [sys.executable, "-m", "fastcross", *map(str, arguments)]
    if not terminal:
        return subprocess.run(command, check=True, capture_output=True, text=True).stderr
    own, other = pty.openpty()
    termios.tcsetwinsize(own, (24, 80))  # tqdm draws nothing in a terminal of no size
    with subprocess.Popen(command, stderr=other, stdout=subprocess.DEVNULL) as process:
        os.close(other)
        pieces = []
        try:
            while piece := os.read(own, 1 << 16):
                pieces.append(piece)
        except OSError:  # what Linux says of a terminal that nobody has open any more
            pass
        os.close(own)
        assert process.wait() == 0
    return b"".join(pieces).decode()


@pytest.mark.parametrize("command", ["prepare", "evaluate", "evaluate a file", "predict"])
def test_bars_are_for_terminals(command, run, log):
    arguments = {
        "prepare": ["prepare", log, "--cache", "c"],
        "evaluate": ["evaluate", run],
        "evaluate a file": ["evaluate", run, "--data", log],
        "predict": ["predict", run, log, "--output", "p.csv"],
    }[command]
    stage = {"prepare": "read: "}.get(command, command.split()[0] + ": ")
    assert stage in errors_of(arguments, terminal=True)
    shutil.rmtree("c", ignore_errors=True)  # or it would be used again
    quiet = errors_of(arguments, terminal=False)
    assert stage not in quiet
    assert "\r" not in quiet


@pytest.fixture(scope="module")
def long_log(tmp_path_factory):
    """So many rows that a command is at work for half a second and more."""
    path = tmp_path_factory.mktemp("long") / "long.txt"
    write_click_log(path, 150_000, largest_vocabulary=20)
    return path


def interrupt(arguments, has_come, delay):
    """Start a command, wait until it has come to a point and a little longer, press Ctrl-C; exit code and errors."""
    command = [sys.executable, "-m", "fastcross", *map(str, arguments)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.default_int_handler
        ),  # ours may be ignored, as nohup's is
    ) as process:
        while process.poll() is None and not has_come(process):
            time.sleep(0.002)
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=240)
    return process.returncode, errors.strip()


def imports_torch(process):
    return "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()


@pytest.mark.parametrize("delay", [0, 0.1, 0.3, 0.6])
def test_while_libraries_are_imported(delay, run, long_log, tmp_path):
    code, errors = interrupt(["predict", run, long_log, "--output", "p.csv"], imports_torch, delay)
    assert code == 130, errors
    assert errors in ("fastcross: interrupted", "fastcross predict: interrupted")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("delay", [0, 0.1])
@pytest.mark.parametrize("command", ["prepare", "predict"])
def test_at_work(command, delay, run, long_log, tmp_path):
    arguments = {
        "prepare": ["prepare", long_log, "--cache", "c"],
        "predict": ["predict", run, long_log, "--output", "p.csv"],
    }[command]
    begun = ".c.building*" if command == "prepare" else ".p.csv*.tmp"
    code, errors = interrupt(arguments, lambda _: any(tmp_path.glob(begun)), delay)
    assert code == 130, errors
    assert errors == f"fastcross {command}: interrupted"
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_that_has_passed_through_exec():
    """Python would end itself by the signal, as if nobody had handled it."""
    script = (
        "import sys, fastcross.cli.info\nfrom fastcross.cli.main import main\n"
        "def interrupted(args):\n    exec('raise KeyboardInterrupt')\n"
        "fastcross.cli.info.info = interrupted\nsys.exit(main(['info']))"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert process.returncode == 130
    assert process.stderr == "fastcross info: interrupted\n"


def test_a_command_in_the_background_ignores_it(run):
    """As a shell starts it: with SIGINT ignored."""
    script = (
        "import signal, subprocess, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.exit(subprocess.call({}))"
    )
    command = [sys.executable, "-m", "fastcross", "info", str(run)]
    with subprocess.Popen([sys.executable, "-c", script.format(command)], stdout=subprocess.PIPE, text=True) as shell:
        while not (children := Path(f"/proc/{shell.pid}/task/{shell.pid}/children").read_text().split()):
            time.sleep(0.002)
        child = int(children[0])
        while "libtorch" not in Path(f"/proc/{child}/maps").read_text():
            time.sleep(0.002)
        subprocess.run(["kill", "-INT", str(child)], check=True)
        printed, _ = shell.communicate(timeout=240)
    assert shell.returncode == 0
    assert "dcn, finished" in printed
