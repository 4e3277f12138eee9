"""What `fastcross export` writes serves alone: raw values in, the probabilities of `fastcross predict` out."""

import json
from pathlib import Path

import numpy as np
import pytest

from fastcross.cli.main import main
from tests.cli.helpers import SMALL
from tests.serving_tables import COLUMNS, run_alone, write_movies

SERVER = ("onnxruntime", "numpy")


@pytest.fixture(scope="module")
def movies(tmp_path_factory):
    """A run on ratings of three classes, and rows with ids that it has not seen."""
    folder = tmp_path_factory.mktemp("movies")
    write_movies(folder / "ratings.csv", 2500)
    write_movies(folder / "new.csv", 700, seed=1, new=15)
    (folder / "columns.json").write_text(json.dumps(COLUMNS))
    data = ["--data", folder / "ratings.csv", "--columns", folder / "columns.json", "--cache", folder / "cache"]
    assert main([str(part) for part in ("train", *data, "--run", folder / "run", *SMALL, "--lr", "0.05")]) == 0
    return folder


def served_and_predicted(run, rows, headed):
    """Probabilities of the ONNX file in a process of its own, and those of the command."""
    assert main(["export", str(run), "--output", "model.onnx"]) == 0
    served = run_alone(SERVER, "serve_onnx.py", Path("model.onnx").resolve(), headed)
    assert main(["predict", str(run), str(rows), "--output", "predictions.npy"]) == 0
    return np.array([line.split() for line in served.splitlines()], float).squeeze(), np.load("predictions.npy")


def test_click_log(run, log, tmp_path):
    """Criteo's format, with gaps in every column and categories that training has not seen."""
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    lines = [line.split("\t") for line in log.read_text().splitlines()[:600]]
    for i, values in enumerate(lines):
        values[1 + i % 39] = ""
        values[14 + i % 26] = f"new{i}"
    text = "\n".join("\t".join(values) for values in lines) + "\n"
    (tmp_path / "new.txt").write_text(text)
    header = "\t".join(["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))])
    (tmp_path / "headed.tsv").write_text(f"{header}\n{text}")
    served, predicted = served_and_predicted(run, tmp_path / "new.txt", tmp_path / "headed.tsv")
    assert served.shape == (600,)
    assert served.std() > 0.01
    np.testing.assert_allclose(served, predicted, rtol=0, atol=1e-6)


def test_ratings(movies, capsys):
    """Bags, weights, date-times, gaps, users never seen, three classes; and what export says of it."""
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    served, predicted = served_and_predicted(movies / "run", movies / "new.csv", movies / "new.csv")
    assert served.shape == (700, 3)
    assert served.std(axis=0).min() > 0.01
    np.testing.assert_allclose(served, predicted, rtol=0, atol=1e-6)
    printed = capsys.readouterr().err
    session = onnxruntime.InferenceSession("model.onnx")
    for entry in session.get_inputs():
        assert f"\n  {entry.name} " in printed
        assert entry.shape == ["batch"]
    assert [entry.name for entry in session.get_outputs()] == ["probability"]
    assert "values with '|' between them" in printed
    assert "the weights of tags, with ' ' between them" in printed
    assert "of the classes 0, 1, 2" in printed
    stored = session.get_modelmeta().custom_metadata_map
    assert json.loads(stored["fastcross.classes"]) == ["0", "1", "2"]
    config = json.loads((movies / "run" / "config.json").read_text())
    assert stored["fastcross.encoder"] == config["encoder"]
    assert stored["fastcross.version"] == config["fastcross"]
    assert {"input": "probability_in", "column": "probability", "kind": "categorical", "type": "string"} in json.loads(
        stored["fastcross.columns"]
    )


def test_what_onnx_cannot_say_is_refused(log, tmp_path, fails):
    pytest.importorskip("onnxscript")
    data = ["--data", str(log), "--hash-buckets", "50", "--cache", "hashed"]
    assert main(["train", *data, "--run", "hashed-run", *SMALL]) == 0
    told = fails("export", "hashed-run", "--output", "model.onnx")
    assert "column C1 is hashed into 50 buckets, and ONNX has no such operator; --encoded exports" in told
    assert not Path("model.onnx").exists()
    assert "--encoded has no effect on a .pt2 file" in fails("export", "hashed-run", "--output", "m.pt2", "--encoded")
    Path("model.encoder").mkdir()
    Path("model.encoder/notes.txt").write_text("mine")
    assert "model.encoder is there and is no encoder" in fails(
        "export", "hashed-run", "--output", "model.onnx", "--encoded"
    )
    assert Path("model.encoder/notes.txt").read_text() == "mine"
    Path("model.encoder/notes.txt").unlink()
    Path("model.encoder").rmdir()
    assert main(["export", "hashed-run", "--output", "model.onnx", "--encoded"]) == 0
    assert sorted(path.name for path in Path("model.encoder").iterdir()) == ["encoder.json"]
