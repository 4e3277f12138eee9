"""The package imports from a wheel, an editable install and a bare checkout, and never installs a module `kernels`."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
USE = """
import torch, fastcross, fastcross.kernels.closed_form as kernels
from fastcross import cross_layer, cross_network, cross_logits, CrossLayer, CrossNetwork
assert CrossNetwork(8, 3, backend="torch")(torch.randn(5, 8)).shape == (5, 8)
print(fastcross.__file__, kernels.__file__, sep="\\n")
"""


def imported_from(cwd, *path):
    """Where fastcross and fastcross.kernels come from, in a process started in ``cwd``."""
    script = f"import sys; sys.path[:0] = {list(map(str, path))}\n{USE}"
    run = subprocess.run([sys.executable, "-c", script], cwd=cwd, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return [Path(line) for line in run.stdout.split()]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the sources alone: a leftover build folder would put deleted files into the wheel."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("fastcross", "kernels"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


def test_wheel(checkout, tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", checkout]
    subprocess.run(build, check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    assert {name.split("/")[0].split("-")[0] for name in names} == {"fastcross"}
    packaged = {name for name in names if name.endswith(".py")}
    sources = {f"fastcross/{path.relative_to(ROOT / 'fastcross')}" for path in (ROOT / "fastcross").rglob("*.py")}
    kernels = {f"fastcross/kernels/{path.relative_to(ROOT / 'kernels')}" for path in (ROOT / "kernels").rglob("*.py")}
    assert packaged == sources | kernels
    for file in imported_from(tmp_path, tmp_path / "site"):
        assert file.is_relative_to(tmp_path / "site")


def test_bare_checkout(checkout):
    for file in imported_from(checkout, ""):
        assert file.is_relative_to(checkout)


def test_editable_install(tmp_path):
    for file in imported_from(tmp_path):
        assert file.is_relative_to(ROOT)


def test_public_names():
    import fastcross

    assert all(hasattr(fastcross, name) for name in fastcross.__all__)
