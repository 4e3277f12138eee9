"""Optional dependencies: an error names one command, and the command is one that pip carries out."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fastcross import extras

ROOT = Path(__file__).parent.parent


def test_every_extra_of_the_project_is_known():
    """So that a package which is missing finds its extra; those of developers are in no hint."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, packages in extras.EXTRAS.items():
        requirements = " ".join(declared[extra]).replace("-", "_").replace("scikit_learn", "sklearn")
        assert all(package in requirements for package in packages)
    assert set(declared) == {*extras.EXTRAS, "docs", "dev"}


@pytest.mark.parametrize("installed", [False, True], ids=["checkout", "installed"])
def test_pip_understands_the_command(installed, tmp_path, monkeypatch):
    """As far as it can be tried without an index: every requirement of the extra is already satisfied here."""
    if installed:  # as a wheel leaves it: without pyproject.toml beside the package
        monkeypatch.setattr(extras, "__file__", str(tmp_path / "fastcross" / "extras.py"))
    monkeypatch.chdir(tmp_path)
    command = extras.install_command("tune", "train")
    assert ("-e" in command) != installed
    environment = {"PIP_NO_INDEX": "1", "PIP_DRY_RUN": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if not shutil.which("pip", path=path):
        pytest.skip("there is no pip here")
    pip = subprocess.run(
        command,
        shell=True,
        cwd=tmp_path,
        env={**os.environ, **environment, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert pip.returncode == 0, pip.stderr
    assert "does not provide the extra" not in pip.stderr


def test_in_the_checkout_the_command_is_short(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert extras.install_command("export") == 'pip install -e ".[export]"'
    assert extras.needs("exporting to onnx", "onnx", "onnxscript").count("pip install") == 1


def test_torchrec_is_installed_without_its_cuda_library_on_a_cpu(monkeypatch):
    monkeypatch.setattr(extras, "_torch_is_for_cpus", lambda: True)
    assert "fbgemm-gpu-cpu" in extras.install_command("distributed")
    monkeypatch.setattr(extras, "_torch_is_for_cpus", lambda: False)
    assert "[distributed]" in extras.install_command("distributed")
