"""The benchmark of served files runs, agrees with itself before it times, and says what encoding costs."""

import json

import numpy as np
import pytest

from benchmarks import serving
from benchmarks.harness.measure import Refused

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")


def test_serving(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(serving, "SETS", 3)
    case = serving.Case("tiny", (20, 7), 2, 1, (4,), dense=2, bags=(9,))
    (found,) = serving.run((case,), 0.05, 1, tmp_path / "cpu" / "serving.json")
    stored = json.loads((tmp_path / "cpu" / "serving.json").read_text())
    assert stored["cases"] == json.loads(json.dumps([found]))
    assert stored["machine"]["onnxruntime"]
    assert found["bytes"]["raw"] > 0
    for rows in ("1", "512"):
        result = found["batches"][rows]
        assert result["difference"] < 1e-6
        assert 0 < result["seconds"]["raw"]["p50"] <= result["seconds"]["raw"]["p99"]
        assert result["share"] == 1 - result["seconds"]["ids"]["p50"] / result["seconds"]["raw"]["p50"]
    assert "| tiny | 512 |" in capsys.readouterr().out
    right = serving.make_rows

    def shifted(*arguments):
        """Rows whose ids are not those of their texts."""
        made = right(*arguments)
        made["ids"]["categorical"] = np.roll(made["ids"]["categorical"], 1, axis=0)
        return made

    monkeypatch.setattr(serving, "make_rows", shifted)
    with pytest.raises(Refused, match="tiny: raw values and ids differ by"):
        serving.run((case,), 0.05, 1, tmp_path / "cpu" / "serving.json")
    assert json.loads((tmp_path / "cpu" / "serving.json").read_text()) == stored
