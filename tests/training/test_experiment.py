"""An experiment: data, model and training in one object, which runs, goes on, and comes back from JSON."""

import json
import math
import time

import pytest
import torch

from fastcross.data import DataError
from fastcross.training import Dataset, Experiment, TrainingConfig, load_model, metrics, resume
from fastcross.training.checkpoint import CheckpointError
from fastcross.training.experiment import model_options, run_name
from fastcross.training.loop import check_labels
from fastcross.training.metrics import evaluate
from fastcross.training.run_folder import Run
from tests.training.helpers import TINY, assert_same_weights, small_dcn


@pytest.fixture
def plan(cache):
    training = TrainingConfig(batch_size=256, max_steps=4, evaluate_every=2, seed=3)
    return Experiment(Dataset(str(cache.path)), "dcn", TINY, training, threads=1, preset="paper")


def test_it_runs_and_leaves_a_model(plan, cache, tmp_path):
    lines = []
    before = torch.get_num_threads()
    result = plan.run(tmp_path / "run", show=lines.append)
    assert torch.get_num_threads() == before
    assert result == Run(tmp_path / "run").result
    assert lines[0].startswith("data: ")
    assert [line.partition(":")[0] for line in lines[1:] if line.startswith("epoch")] == [
        "epoch 0.15, step 2",
        "epoch 0.31, step 4",
    ]
    trained = load_model(tmp_path / "run")
    assert trained.schema == cache.schema
    assert trained.model.config.cross_layers == 1
    assert trained.encoder.fingerprint == cache.encoder_fingerprint


def test_the_same_again(plan, tmp_path):
    """From what the run folder says, and from a JSON file."""
    plan.run(tmp_path / "first")
    again = Experiment.load(tmp_path / "first")
    assert again == plan
    again.run(tmp_path / "second")
    plan.save(tmp_path / "plan.json")
    Experiment.load(tmp_path / "plan.json").run(tmp_path / "third")
    first, *others = (load_model(tmp_path / name).model.state_dict() for name in ("first", "second", "third"))
    for other in others:
        assert_same_weights(first, other)
    assert json.loads((tmp_path / "plan.json").read_text())["training"]["seed"] == 3


def test_a_folder_is_taken_once_unless_it_is_to_go_on(plan, tmp_path):
    result = plan.run(tmp_path / "run")
    with pytest.raises(CheckpointError, match="already holds a run; resume it"):
        plan.run(tmp_path / "run")
    with pytest.raises(CheckpointError, match="is finished"):
        resume(tmp_path / "run")
    assert plan.run(tmp_path / "run", go_on=True) == result
    other = Experiment(plan.data, "dcn", TINY, TrainingConfig(batch_size=99))
    with pytest.raises(CheckpointError, match="another configuration"):
        other.run(tmp_path / "run", go_on=True)
    (tmp_path / "run" / "result.json").unlink()
    again = plan.run(tmp_path / "run", go_on=True)
    assert again["test"] == result["test"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": "xgboost"}, "there is no model 'xgboost'; there are dcn, deep_crossing, dnn"),
        ({"model": "lr", "options": {"cross_layers": 2}}, "the model lr has no option cross_layers"),
        ({"options": {"wings": 2}}, "the model dcn has no option wings"),
        ({"options": {"num_dense": 2}}, "no option num_dense"),
        ({"threads": 0}, "threads must be at least 1; got 0"),
        ({"embedding": "faiss"}, "one of auto, fastcross, fbgemm; got 'faiss'"),
        ({"sharding": "diagonal"}, "one of auto, table, row, column; got 'diagonal'"),
        ({"sharding": "row", "model": "fm"}, "trains the models dcn and dnn; got fm"),
    ],
)
def test_what_it_refuses(values, message):
    with pytest.raises(ValueError, match=message):
        Experiment(**values)


def test_sharding_needs_processes(plan, tmp_path):
    sharded = Experiment.from_dict(plan.to_dict() | {"sharding": "row"})
    with pytest.raises(ValueError, match=r"needs the processes of fastcross\.distributed"):
        sharded.run(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("model", ["dcn", "lr"])
def test_the_generated_log_has_defaults_of_its_own(model, tmp_path, monkeypatch):
    """In 0.1 DCN's were given to every model, so that `train --model lr` was refused."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plan = Experiment.on_generated_log(Dataset(rows=1500), model, {}, {"epochs": 1}, threads=1)
    assert plan.training.lr == 0.01
    assert plan.training.epochs == 1
    options = {"cross_layers": 2, "deep_layers": [32], "embedding_dim": 4}
    assert plan.options == {name: value for name, value in options.items() if name in model_options(model)}
    assert ("cross_layers" in plan.options) == (model == "dcn")
    result = plan.run(tmp_path / "run")
    assert result["test"]["logloss"] > result["optimum"]["test"]


def test_crosses_by_name(cache, tmp_path):
    options = {"crosses": [["C1", "C3"], [0, 4]], "deep_layers": [4], "embedding_dim": 2}
    training = TrainingConfig(batch_size=256, max_steps=1)
    Experiment(Dataset(str(cache.path)), "wide_deep", options, training).run(tmp_path / "run")
    assert Run(tmp_path / "run").config["options"]["crosses"] == [[0, 2], [0, 4]]
    with pytest.raises(ValueError, match="'C99' is not a categorical column"):
        Experiment(Dataset(str(cache.path)), "wide_deep", {"crosses": [["C1", "C99"]]}).run(tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_one_label_is_nothing_to_learn(cache, monkeypatch):
    """0.1 trained on it, to `auc nan`."""
    labels = {"train": 1.0, "validation": 0.0}
    batches = type(cache).batches

    def constant(self, part, *arguments, **options):
        for batch in batches(self, part, *arguments, **options):
            if part in labels:
                batch.label.fill_(labels[part])
            yield batch

    monkeypatch.setattr(type(cache), "batches", constant)
    with pytest.raises(ValueError, match=r"nothing to learn: all 3,429 training rows of .* have label 1"):
        check_labels(cache)
    del labels["train"]
    lines = []
    check_labels(cache, lines.append)
    assert lines == ["all 286 validation rows have label 0: they have no AUC"]


def test_undefined_metrics_are_left_out(cache, monkeypatch):
    monkeypatch.setattr(metrics, "summarise", lambda logits, label: {"logloss": 0.5, "auc": math.nan})
    assert evaluate(small_dcn(cache), cache, "test") == {"logloss": 0.5}


def test_names_of_runs(monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda form: "20170814-120000")
    assert str(run_name("dcn")) == "runs/dcn-20170814-120000"


def test_a_cache_that_is_none(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no cache here"):
        Experiment(Dataset(str(tmp_path / "empty"))).run(tmp_path / "run")
    assert not (tmp_path / "run").exists()
