"""The smoke set: what must run with the oldest versions that pyproject.toml admits. `make floors` runs it with them."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from operator_cases import operands_of
from packaging.requirements import Requirement
from packaging.version import Version

import fastcross
from fastcross import reference
from fastcross.accuracy import RANK_ONE
from fastcross.data.generate import write_click_log

ROOT = Path(__file__).parent.parent
# TorchRec exists for one release of PyTorch at a time, and the tools are pinned in constraints.txt.
WITHOUT_FLOOR = {"distributed", "dev", "docs"}


def requirements(lines):
    return [Requirement(text) for line in lines if (text := line.partition("#")[0].strip())]


def test_the_oldest_versions_are_those_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert set(extras) > WITHOUT_FLOOR
    wanted = [*project["dependencies"], *(one for name in extras.keys() - WITHOUT_FLOOR for one in extras[name])]
    bounds = [(one.name, [*one.specifier]) for one in requirements(wanted)]
    assert all(len(clauses) == 1 and clauses[0].operator == ">=" for _, clauses in bounds)
    floors = {name: Version(clauses[0].version) for name, clauses in bounds}
    pinned = requirements((ROOT / "constraints-floors.txt").read_text().splitlines())
    assert {one.name: Version(str(one.specifier).removeprefix("==")) for one in pinned} == floors


def operands(operator, dtype=torch.float32):
    return [t.requires_grad_() for t in operands_of(operator, 33, 20, dtype=dtype, scale=0.5)]


def results(function, leaves):
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]


@pytest.mark.parametrize("backend", ["auto", "cpu", "torch", "reference"])
@pytest.mark.parametrize("operator", RANK_ONE)
def test_operators(operator, backend):
    ours = results(lambda *t: getattr(fastcross, operator)(*t, backend=backend), operands(operator))
    exact = results(getattr(reference, operator), operands(operator, torch.float64))
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))


@pytest.mark.parametrize("operator", RANK_ONE)
def test_operators_compile(operator):
    torch._dynamo.reset()  # other tests may have compiled it as often as PyTorch allows
    compiled = torch.compile(getattr(fastcross, operator), fullgraph=True)
    for a, b in zip(
        results(compiled, operands(operator)), results(getattr(reference, operator), operands(operator)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()))


INTERPRET = """
import torch, fastcross
from fastcross import reference
x0, w, b = torch.randn(5, 20), torch.randn(3, 20) / 8, torch.randn(3, 20)
ours, loop = ([t.clone().requires_grad_() for t in (x0, w, b)] for _ in range(2))
fastcross.cross_network(*ours, backend="triton").square().sum().backward()
reference.cross_network(*loop).square().sum().backward()
for a, b in zip(ours, loop):
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4 * float(b.grad.abs().max()))
"""


def test_triton_interprets():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, "-c", INTERPRET], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def command(folder, *arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    run = subprocess.run(
        [sys.executable, "-m", "fastcross", *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_train_and_predict(tmp_path):
    write_click_log(tmp_path / "clicks.txt", 2000)
    small = ["--deep-layers", "8", "--embedding-dim", "4", "--epochs", "1", "--min-frequency", "2", "--cache", "cache"]
    command(tmp_path, "train", "--data", "clicks.txt", "--run", "run", *small)
    command(tmp_path, "predict", "run", "clicks.txt", "--output", "out.csv")
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 2001


def test_export(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    model = fastcross.DCN([10, 20], 3, 4, cross_layers=2, deep_layers=(8,)).eval()
    dense, categorical = torch.randn(5, 3), torch.randint(0, 10, (5, 2))
    file = fastcross.export(model, tmp_path / "model.onnx", (dense, categorical), to="onnx")
    session = onnxruntime.InferenceSession(str(file))
    inputs = {one.name: t.numpy() for one, t in zip(session.get_inputs(), (dense, categorical), strict=True)}
    (logits,) = session.run(None, inputs)
    torch.testing.assert_close(torch.from_numpy(logits), model(dense, categorical).detach(), rtol=1e-4, atol=1e-4)


def test_swap_of_a_peer():
    torchfm = pytest.importorskip("torchfm.layer")
    net, x = torchfm.CrossNetwork(20, 3), torch.randn(7, 20)
    before = net(x)
    assert fastcross.swap(net).swapped
    torch.testing.assert_close(net(x), before)
