"""Two processes follow the curve of one, for every sharding and optimiser; what cannot be sharded says so."""

import pytest
import torch

from fastcross.cli.main import main
from fastcross.training import load_model
from fastcross.training.metrics import evaluate
from fastcross.training.run_folder import Run
from tests.distributed.helpers import CASES, QUIET, arguments, assert_same_curve, curve, experiment

pytest.importorskip("torchrec")
from fastcross.distributed import model as distributed_model

pytestmark = QUIET


@pytest.mark.parametrize("name", CASES)
def test_two_processes_follow_the_curve_of_one(name, cache, trained, tmp_path):
    """Losses, metrics (AUC over all ranks) and final weights; for Adam too, whose rows are then fastcross's own."""
    result = experiment(cache, sharded=False, **CASES[name]).run(tmp_path / "one")
    run = Run(tmp_path / "one")
    sharded = Run(trained / name)
    # The share of rows within a bin moves in steps: a row on the edge between two changes ece by far more than it.
    assert_same_curve(curve(sharded.path, "validation_ece"), curve(run.path, "validation_ece"))
    assert sharded.result["stopped_early"] == result["stopped_early"] == (name == "adam-stopped")
    for key in ("steps", "best_step", "parameters", "dense_parameters"):
        assert sharded.result[key] == result[key]
    assert sharded.result["test"]["auc"] == pytest.approx(result["test"]["auc"], rel=1e-4)
    one, two = load_model(run.path).model.state_dict(), load_model(sharded.path).model.state_dict()
    assert one.keys() == two.keys()
    for key, weight in one.items():
        torch.testing.assert_close(two[key], weight, rtol=1e-3, atol=1e-4)


def test_sharded_runs_are_read_like_any_other(cache, trained, capsys):
    run = Run(trained / "sgd-row")
    model = load_model(run.path)
    assert evaluate(model.model, cache, "test") == pytest.approx(run.result["test"], rel=1e-6)
    assert main(["info", str(run.path)]) == 0
    assert "strongest crosses" in capsys.readouterr().out


def test_fbgemm_in_one_ordinary_process(cache, tmp_path, capsys):
    """Without torchrun or --distributed; its folder evaluates like any other."""
    options = {"optimizer": "sgd", "lr": 0.05}
    assert main(arguments(cache, tmp_path / "own", **options)) == 0
    assert main(arguments(cache, tmp_path / "fbgemm", embedding="fbgemm", **options)) == 0
    assert_same_curve(curve(tmp_path / "fbgemm", "validation_ece"), curve(tmp_path / "own", "validation_ece"))
    assert main(["evaluate", str(tmp_path / "fbgemm")]) == 0
    capsys.readouterr()
    assert main(arguments(cache, tmp_path / "adam", embedding="fbgemm")) == 2
    assert "fbgemm has no adam for the cpu; use --embedding fastcross" in capsys.readouterr().err


def test_tables_are_drawn_in_pieces_as_if_at_once(monkeypatch):
    class Whole:
        def __init__(self, tensor):
            self.tensor, self.metadata = tensor, type("", (), {"shard_offsets": [0, 0]})

        def local_shards(self):
            return [self]

        def size(self, dim):
            return self.tensor.shape[dim]

    monkeypatch.setattr(distributed_model, "CHUNK", 16)
    for rows, dim in ((1, 3), (5, 4), (16, 3), (49, 1), (64, 7), (1000, 5)):
        torch.manual_seed(5)
        expected, after = torch.empty(rows, dim).normal_(std=dim**-0.5), torch.rand(2)
        torch.manual_seed(5)
        found = Whole(torch.full((rows, dim + 2), 9.0))
        distributed_model._draw(found, dim)
        assert torch.equal(found.tensor[:, :dim], expected)
        assert not found.tensor[:, dim:].any()
        assert torch.equal(torch.rand(2), after)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "fm"}, "trains the models dcn and dnn; got fm"),
        ({"optimizer": "lion"}, "must be one of adam, adamw, adagrad, rowwise_adagrad, sgd; got 'lion'"),
        ({"optimizer": "adagrad"}, "sharded tables have the optimizers adam and sgd; got adagrad"),
    ],
)
def test_what_cannot_be_sharded_is_said(changes, message, cache, tmp_path, capsys):
    model = {"cross-layers": 2, "deep-layers": "8"} if "model" not in changes else {}
    pairs = [str(text) for name, value in (model | changes).items() for text in (f"--{name}", value)]
    assert main(["train", "--distributed", "--data", str(cache.path), "--run", str(tmp_path / "run"), *pairs]) == 2
    assert message in capsys.readouterr().err


def test_data_without_tables_is_said(tmp_path, capsys):
    (tmp_path / "table.csv").write_text("label,a,b\n" + "".join(f"{i % 2},{i * 0.5},{i * 0.25}\n" for i in range(200)))
    options = ["--data", str(tmp_path / "table.csv"), "--label", "label", "--cache", str(tmp_path / "cache")]
    assert main(["train", "--distributed", *options, "--run", str(tmp_path / "run")]) == 2
    assert "there is no table to shard" in capsys.readouterr().err
