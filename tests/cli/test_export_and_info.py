"""fastcross export and info as a user types them."""

import pytest
import torch

from fastcross.cli.main import main
from fastcross.data import Cache
from fastcross.training.trained import load_model


def test_export_predicts_the_same(run, cache):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    assert main(["export", str(run), "--output", "model.onnx"]) == 0
    batch = next(Cache.open(cache).batches("test", 5))
    expected = load_model(run).model(batch.dense, batch.categorical).detach()
    session = onnxruntime.InferenceSession("model.onnx")
    inputs = {"dense": batch.dense.numpy(), "categorical": batch.categorical.numpy()}
    (found,) = session.run(None, inputs)
    torch.testing.assert_close(torch.as_tensor(found), expected, rtol=1e-4, atol=1e-5)


def test_info(run, cache, capsys):
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    for fact in ("fastcross 0.", "Python 3.", "CPU: ", "threads", "GPU: ", "backends: torch, reference, ", "numba "):
        assert fact in printed
    assert f"torch {torch.__version__}" in printed
    assert main(["info", str(run)]) == 0
    printed = capsys.readouterr().out
    assert "dcn, finished" in printed
    assert "strongest crosses: " in printed
    assert main(["info", str(cache)]) == 0
    assert "made from clicks.txt" in capsys.readouterr().out
