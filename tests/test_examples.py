"""The examples run as they are, each in its own process, and say what they promise."""

import importlib.util
import os
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


def test_layer(tmp_path):
    output = run("layer.py", "--export", tmp_path / "model.onnx", needs=["onnx", "onnxscript"], cwd=tmp_path)
    assert losses(output)[-1] < 0.65 < losses(output)[0]
    assert (tmp_path / "model.onnx").stat().st_size > 10_000


def test_function(tmp_path):
    output = run("function.py", cwd=tmp_path)
    assert "y (4096, 1026)\ndx0 (4096, 1026)\ndw (6, 1026)\ndb (6, 1026)\n" in output
    assert float(output.split()[-1]) < 1e-5


def test_model(tmp_path):
    output = run("model.py", cwd=tmp_path)
    assert losses(output)[-1] < losses(output)[0]
    assert float(output.split()[-1]) > 0.95


def test_dataframe(tmp_path):
    """What it saves and exports is what it fitted, and onnxruntime alone serves it."""
    needs = ["pandas", "sklearn", "onnx", "onnxscript", "onnxruntime"]
    output = run("dataframe.py", needs=needs, cwd=tmp_path)
    accuracies = re.findall(r"accuracy (\d\.\d{3})$", output, re.MULTILINE)
    assert float(accuracies[-1]) > 0.95
    assert accuracies[-1] == accuracies[-2]
    assert float(re.search(r"R² (\S+)", output)[1]) > 0.95
    (tmp_path / "rows.csv").write_text("age,city,tags\n60.0,Oslo,new\n20.0,Oslo,new\n")
    older, younger = run("serve_onnx.py", "clicks.onnx", "rows.csv", cwd=tmp_path).split()
    assert float(older) > 0.9 > 0.1 > float(younger)


def test_click_log(tmp_path):
    for package in ("onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    command = ["bash", EXAMPLES / "click_log.sh"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PATH": path})
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"auc ([\d.]+)", done.stdout.split("test: ")[-1])[1]) > 0.6
    assert len((tmp_path / "predictions.csv").read_text().splitlines()) == 1001
    assert (tmp_path / "page" / "index.html").stat().st_size > 10_000
    assert (tmp_path / "model.onnx").stat().st_size > 10_000


def test_experiment(tmp_path):
    output = run("experiment.py", needs=["pyarrow"], cwd=tmp_path)
    assert "test logloss 0." in output
    assert (tmp_path / "runs" / "first" / "best.safetensors").exists()


def test_each_is_short_and_is_run_here():
    tests = Path(__file__).read_text() + (Path(__file__).parent / "interop" / "test_serving.py").read_text()
    for path in EXAMPLES.glob("*.py"):  # importing one leaves a folder of bytecode
        assert len(path.read_text().splitlines()) < 60, path.name
        assert path.name in tests
