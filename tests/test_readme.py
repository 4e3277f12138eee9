"""Every example of the README runs as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
EXAMPLES = re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?```python\n(.*?)```", README.read_text(), re.DOTALL | re.MULTILINE)
NEEDS = {
    "A DataFrame": ("pandas", "sklearn", "onnxruntime", "onnxscript"),
    "A ranking": ("sklearn",),
    "A swap": ("torchfm",),
}


def run(section, code, folder, monkeypatch):
    for package in NEEDS.get(section, ()):
        pytest.importorskip(package)
    monkeypatch.chdir(folder)
    values = {}
    exec(compile(code, f"{README}: {section}", "exec"), values)
    return values


@pytest.mark.parametrize(("section", "code"), EXAMPLES, ids=[section for section, _ in EXAMPLES])
def test_example(section, code, tmp_path, monkeypatch):
    run(section, code, tmp_path, monkeypatch)


def test_there_are_five_examples():
    assert [section for section, _ in EXAMPLES] == ["A layer", "A model", "A DataFrame", "A ranking", "A swap"]


def test_what_the_dataframe_prints(tmp_path, monkeypatch, capsys):
    run("A DataFrame", dict(EXAMPLES)["A DataFrame"], tmp_path, monkeypatch)
    said = capsys.readouterr().out
    assert "city  categorical  text, 2 different" in said
    assert float(said.splitlines()[-1]) > 0.95
    assert {path.name for path in tmp_path.iterdir()} == {"clicks.onnx"}


def test_the_log(tmp_path):
    """The commands, on a small log."""
    pytest.importorskip("onnxscript")
    generate = pytest.importorskip("fastcross.data.generate")
    log = tmp_path / "train.txt"
    generate.write_click_log(log, 3000)
    (tmp_path / "new.txt").write_text("".join(log.open().readlines()[:10]))
    subprocess.run(["gzip", log], check=True)
    (commands,) = re.findall(r"^## A log\n\n```\n(.*?)```", README.read_text(), re.DOTALL | re.MULTILINE)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    script = ["bash", "-euc", commands]
    done = subprocess.run(script, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PATH": path})
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "predictions.csv").read_text().splitlines()) == 11
    assert (tmp_path / "model.onnx").stat().st_size > 10_000


def test_its_links_and_commands_are_there():
    text, root = README.read_text(), README.parent
    for target in re.findall(r"\]\(([^)]+)\)", text):
        file, _, anchor = target.partition("#")
        if file.startswith("http"):
            continue
        assert (root / file).exists(), target
        headings = re.findall(r"^#+ (.*)$", (root / file).read_text(), re.MULTILINE) if anchor else []
        assert not anchor or anchor in [heading.lower().replace(" ", "-") for heading in headings], target
    makefile = (root / "Makefile").read_text()
    for line in re.findall(r"`?make ([a-z ]+)", text):
        assert all(f"\n{target}:" in makefile for target in line.split()), line


def test_it_is_short():
    assert len(README.read_text().splitlines()) <= 150
