"""The benchmark of the estimator runs, at a size that says nothing about speed."""

import json

import pytest

from benchmarks import estimator


def test_it_measures_every_contestant_and_the_memory(tmp_path, capsys, monkeypatch):
    pytest.importorskip("deepctr_torch")
    monkeypatch.setattr(estimator, "BATCH", 64)
    estimator.main(["--rows", "300", "--epochs", "1", "--repeats", "1", "--output", str(tmp_path)])
    (file,) = tmp_path.iterdir()
    result = json.loads(file.read_text())
    assert set(result["seconds"]) == {
        "fastcross train, adam",
        "estimator, adam",
        "estimator, adagrad",
        "DeepCTR-Torch, adam",
        "DeepCTR-Torch, adagrad",
    }
    assert result["memory"]["table"] > 10_000
    assert result["memory"]["added"] > 0  # of the fit alone, whatever the making of the table took before
    said = capsys.readouterr().out
    assert "| estimator, adam |" in said
    assert "Peak memory that fit adds" in said
