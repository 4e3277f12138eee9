"""The README's first example runs as it stands there."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def test_from_a_dataframe(tmp_path, monkeypatch, capsys):
    for package in ("pandas", "sklearn", "onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    section = README.read_text().partition("## From a DataFrame\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, str(README), "exec"), {})
    said = capsys.readouterr().out
    assert "city  categorical  text, 3 different" in said
    assert float(said.splitlines()[-1]) > 0.95
    assert {path.name for path in tmp_path.iterdir()} == {"clicks", "clicks.onnx"}
