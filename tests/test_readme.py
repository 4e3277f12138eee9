"""Every Python example of the README runs as it stands there."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
EXAMPLES = re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?```python\n(.*?)```", README.read_text(), re.DOTALL | re.MULTILINE)
NEEDS = {
    "A DataFrame": ("pandas", "sklearn", "onnxruntime", "onnxscript"),
    "A model that you have": ("torchfm",),
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


def test_there_are_four_examples():
    assert [section for section, _ in EXAMPLES] == ["A layer", "A model", "A DataFrame", "A model that you have"]


def test_what_the_dataframe_prints(tmp_path, monkeypatch, capsys):
    run("A DataFrame", dict(EXAMPLES)["A DataFrame"], tmp_path, monkeypatch)
    said = capsys.readouterr().out
    assert "city  categorical  text, 3 different" in said
    assert float(said.splitlines()[-1]) > 0.95
    assert {path.name for path in tmp_path.iterdir()} == {"clicks.onnx"}


def test_it_is_short():
    assert len(README.read_text().splitlines()) <= 150
