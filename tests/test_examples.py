"""The examples run as they are, each in its own process, and say what they promise."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name, *arguments, needs=(), cwd):
    for package in needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    command = [sys.executable, EXAMPLES / name, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def change(output):
    return float(re.search(r"largest change of a \w+: (\S+)", output)[1])


def losses(output):
    return [float(value) for value in re.findall(r"loss:? +([\d.]+)", output)]


def test_swap_deepctr(tmp_path):
    output = run("swap_deepctr.py", needs=["deepctr_torch"], cwd=tmp_path)
    assert "swapped crossnet (deepctr_torch.layers.interaction.CrossNet): L = 3, d = 65" in output
    assert change(output) < 1e-6
    assert losses(output)[-1] < losses(output)[0]


def test_swap_torchrec(tmp_path):
    output = run("swap_torchrec.py", needs=["torchrec"], cwd=tmp_path)
    assert "swapped cross (torchrec.modules.crossnet.VectorCrossNet): L = 3, d = 48" in output
    assert change(output) < 1e-5
    assert losses(output) == sorted(losses(output), reverse=True)
    assert len(losses(output)) == 3


def test_plain_pytorch(tmp_path):
    output = run("plain_pytorch.py", "--export", tmp_path / "model.onnx", needs=["onnx", "onnxscript"], cwd=tmp_path)
    assert losses(output)[-1] < 0.65 < losses(output)[0]
    assert (tmp_path / "model.onnx").stat().st_size > 10_000
