"""The package imports from a wheel, an sdist, an editable install, a clone and a bare checkout, and never installs a
module `kernels`."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from fastcross.kernels import cpu

ROOT = Path(__file__).parent.parent
HAS_COMPILER = shutil.which("g++") is not None
LIBRARY = "fastcross/kernels/cpu/library.abi3.so"
USE = """
import torch, fastcross, fastcross.kernels.closed_form as kernels
from fastcross import cross_layer, cross_network, cross_logits, CrossLayer, CrossNetwork
assert CrossNetwork(8, 3)(torch.randn(5, 8)).shape == (5, 8)
print(fastcross.__file__, kernels.__file__, sep="\\n")
"""


def imported_from(cwd, *path, options=(), before=""):
    """Where fastcross and fastcross.kernels come from, in a process started in ``cwd``."""
    script = f"import sys; sys.path[:0] = {list(map(str, path))}\n{before}\n{USE}"
    run = subprocess.run([sys.executable, *options, "-c", script], cwd=cwd, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return [Path(line) for line in run.stdout.split()]


def build(kind, checkout, folder, compiling=False):
    """A wheel, sdist or editable wheel of the checkout, by the function that pip calls.

    Unless ``compiling`` it finds no compiler: one test builds the library, which takes a minute.
    """
    folder.mkdir(exist_ok=True)
    script = f"from setuptools import build_meta; build_meta.build_{kind}({str(folder)!r})"
    env = os.environ if compiling else {**os.environ, "PATH": ""}
    run = subprocess.run([sys.executable, "-c", script], cwd=checkout, capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stdout + run.stderr
    (file,) = folder.iterdir()
    return file


def unpack(wheel, folder):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
        return archive.namelist()


def modules(names):
    return {name for name in names if name.endswith((".py", "py.typed"))}


@pytest.fixture
def checkout(tmp_path):
    """A copy of the sources alone, without the library that was built here; links as links."""
    copy = tmp_path / "checkout"
    for name in ("fastcross", "kernels"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, copy)
    return copy


def sources():
    """Every module of the checkout, and the marker that it has types."""
    found = {f"{path.relative_to(ROOT)}" for path in (ROOT / "fastcross").rglob("*.py")} | {"fastcross/py.typed"}
    return found | {f"fastcross/{path.relative_to(ROOT)}" for path in (ROOT / "kernels").rglob("*.py")}


def test_wheel(checkout, tmp_path):
    names = unpack(build("wheel", checkout, tmp_path / "dist"), tmp_path / "site")
    assert {name.split("/")[0].split("-")[0] for name in names} == {"fastcross"}
    assert modules(names) == sources()
    assert not [name for name in names if name.endswith((".so", ".cpp", ".h"))], "there was no compiler"
    for file in imported_from(tmp_path, tmp_path / "site"):
        assert file.is_relative_to(tmp_path / "site")


def test_the_library_keeps_to_the_stable_abi(cpu_kernels):
    """So that one library serves every PyTorch from 2.10 on."""
    audit = pytest.importorskip("torch_abi_audit")
    found = audit.inspect_extension(cpu.LIBRARY).torch
    assert found.stable, found.unstable_symbols
    assert found.min_torch_version == "2.10.0"


def test_what_was_deleted_is_in_no_later_wheel(checkout, tmp_path):
    """A leftover build folder put it back."""
    (checkout / "fastcross" / "old.py").touch()
    (checkout / "kernels" / "gpu" / "old.py").touch()
    assert "fastcross/old.py" in unpack(build("wheel", checkout, tmp_path / "first"), tmp_path / "site")
    assert (checkout / "build").is_dir()
    (checkout / "fastcross" / "old.py").unlink()
    (checkout / "kernels" / "gpu" / "old.py").unlink()
    assert modules(unpack(build("wheel", checkout, tmp_path / "second"), tmp_path / "site")) == sources()


def test_sdist(checkout, tmp_path):
    """Without a link, which some systems cannot unpack; what is built from it is what is built from here, compiled."""
    with tarfile.open(build("sdist", checkout, tmp_path / "dist")) as archive:
        members = archive.getmembers()
        archive.extractall(tmp_path / "unpacked", filter="data")
    assert all(member.isfile() or member.isdir() for member in members)
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert {path.name for path in unpacked.iterdir()} >= {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml"}
    for file in imported_from(unpacked, ""):
        assert file.is_relative_to(unpacked)
    names = unpack(build("wheel", unpacked, tmp_path / "wheel", compiling=True), tmp_path / "site")
    assert modules(names) == sources()
    assert [name for name in names if name.endswith((".so", ".cpp", ".h"))] == [LIBRARY] * HAS_COMPILER
    use = "from fastcross.ops.backends import instruction_set; instruction_set()" if HAS_COMPILER else ""
    for file in imported_from(tmp_path, tmp_path / "site", before=use):
        assert file.is_relative_to(tmp_path / "site")


def test_bare_checkout(checkout):
    for file in imported_from(checkout, ""):
        assert file.is_relative_to(checkout)


def test_clone(tmp_path):
    if not (ROOT / ".git").exists():
        pytest.skip("this is no repository")
    subprocess.run(["git", "clone", "--quiet", "--depth=1", ROOT.as_uri(), tmp_path / "clone"], check=True)
    assert (tmp_path / "clone" / "fastcross" / "kernels").is_symlink()
    for file in imported_from(tmp_path / "clone", ""):
        assert file.is_relative_to(tmp_path / "clone")


def test_editable_install(checkout, tmp_path):
    """In a process that sees no other fastcross: the packages installed here, and none of their .pth files."""
    unpack(build("editable", checkout, tmp_path / "dist"), tmp_path / "site")
    site, packages = tmp_path / "site", sysconfig.get_paths()["purelib"]
    for file in imported_from(
        tmp_path, site, packages, options=("-I", "-S"), before=f"import site; site.addsitedir({str(site)!r})"
    ):
        assert file.is_relative_to(checkout)


def test_public_names():
    import fastcross

    assert all(hasattr(fastcross, name) for name in fastcross.__all__)


def test_what_runs_elsewhere_is_what_runs_here():
    """Hook and workflow call the Makefile's targets; every issue template asks for `fastcross info`."""
    yaml = pytest.importorskip("yaml")

    def load(path):
        return yaml.safe_load((ROOT / path).read_text())

    targets = {line.partition(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if line[:1].isalpha()}
    (hook,) = load(".pre-commit-config.yaml")["repos"][0]["hooks"]
    assert hook["entry"].split()[0] == "make"
    assert hook["entry"].split()[-1] in targets
    commands = [step.get("run") for job in load(".github/workflows/ci.yml")["jobs"].values() for step in job["steps"]]
    assert ".ci/run" in commands
    assert any("-m build --no-isolation" in command for command in commands if command)
    assert {command.split()[1] for command in commands if command and command.startswith("make ")} <= targets
    assert (ROOT / ".ci" / "run").read_text().split()[-1] in targets
    templates = [path for path in (ROOT / ".github/ISSUE_TEMPLATE").iterdir() if path.name != "config.yml"]
    assert templates
    for path in templates:
        (asked,) = (part for part in load(path)["body"] if part["id"] == "info")
        assert "fastcross info" in asked["attributes"]["label"]
        assert asked["validations"]["required"]
