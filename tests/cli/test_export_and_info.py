"""fastcross export and info as a user types them."""

import json
from pathlib import Path

import pytest
import torch

from fastcross.cli.main import main
from fastcross.data import Cache
from fastcross.training.run_folder import load_model
from tests.cli.helpers import SMALL


def test_export_predicts_the_same(run, cache):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    assert main(["export", str(run), "--output", "model.onnx", "--encoded"]) == 0
    batch = next(Cache.open(cache).batches("test", 5))
    expected = load_model(run).model(batch.dense, batch.categorical).detach()
    session = onnxruntime.InferenceSession("model.onnx")
    inputs = {"dense": batch.dense.numpy(), "categorical": batch.categorical.numpy()}
    (found,) = session.run(None, inputs)
    torch.testing.assert_close(torch.as_tensor(found), expected, rtol=1e-4, atol=1e-5)


def test_info(run, cache, capsys):
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    for fact in ("fastcross 0.", "Python 3.", "CPU: ", "threads", "GPU: ", "backends: torch, reference, cpu ("):
        assert fact in printed
    assert f"torch {torch.__version__}" in printed
    assert main(["info", str(run)]) == 0
    printed = capsys.readouterr().out
    assert "dcn, finished" in printed
    assert "strongest crosses (standard deviation in the logit): " in printed
    assert main(["info", str(cache)]) == 0
    assert "made from clicks.txt" in capsys.readouterr().out


def test_export_names_every_input(capsys):
    """Multi-valued columns come as two inputs each; what is printed is what the file asks for."""
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    rows = []
    for i in range(400):
        tags = "abc"[: i % 4]
        weights = "|".join(str(j + 0.5) for j in range(len(tags)))
        rows.append(f"{i % 2},{i % 7}.5,{'|'.join('abcd'[: i % 5])},{'xyz'[i % 3]},{'|'.join(tags)},{weights}")
    Path("log.csv").write_text("\n".join(["label,price,genres,shop,tags,weight", *rows]) + "\n")
    columns = {"label": "label", "dense": ["price"], "categorical": ["shop"], "bags": ["genres", "tags"]}
    columns["weights"] = {"tags": "weight"}
    Path("columns.json").write_text(json.dumps(columns))
    assert main(["prepare", "log.csv", "--columns", "columns.json", "--cache", "cache"]) == 0
    assert main(["train", "--data", "cache", "--run", "run", *SMALL]) == 0
    capsys.readouterr()
    assert main(["export", "run", "--output", "model.onnx", "--encoded"]) == 0
    printed = capsys.readouterr().err
    session = onnxruntime.InferenceSession("model.onnx")
    for entry in session.get_inputs():
        assert f"  {entry.name} " in printed
    assert "the ids of genres" in printed
    assert "the weights of tags's ids" in printed
    batch = next(Cache.open("cache").batches("test", 20))
    inputs = {"dense": batch.dense, "categorical": batch.categorical}
    inputs |= {"bags_0_0": batch.bags[0].values, "bags_0_1": batch.bags[0].offsets}
    inputs |= {"bags_1_0": batch.bags[1].values, "bags_1_1": batch.bags[1].offsets, "bags_1_2": batch.bags[1].weights}
    (found,) = session.run(None, {name: value.numpy() for name, value in inputs.items()})
    expected = load_model("run").model(batch.dense, batch.categorical, batch.bags).detach()
    torch.testing.assert_close(torch.as_tensor(found), expected, rtol=1e-5, atol=1e-6)
