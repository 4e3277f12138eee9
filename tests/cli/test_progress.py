"""Progress bars where standard error is a terminal, and none where it is a file."""

import os
import pty
import shutil
import subprocess
import sys
import termios

import pytest


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
