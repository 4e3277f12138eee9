"""The loop: it learns, repeats itself, stops early, clips, lowers its rate, and finds planted crosses."""

import csv
import math

import pytest
import torch

from fastcross.data import prepare
from fastcross.data.generate import write_click_log
from fastcross.models import MODELS
from fastcross.training import checkpoint
from fastcross.training.config import TrainingConfig
from fastcross.training.loop import Trainer
from fastcross.training.metrics import evaluate, predict_logits
from fastcross.training.run_folder import Run
from fastcross.training.step import gains_from_bf16
from tests.training.helpers import assert_same_weights, small_dcn, weights


def test_training_learns_and_leaves_a_run_folder(cache, tmp_path):
    run = Run.create(tmp_path / "run", {"any": "thing"})
    lines = []
    trainer = Trainer(small_dcn(cache), cache, TrainingConfig(batch_size=128, epochs=4), run, show=lines.append)
    before = evaluate(trainer.model, cache, "validation")
    result = trainer.fit()
    assert result["validation"]["logloss"] < before["logloss"] - 0.01
    assert {path.name for path in run.path.iterdir()} == {
        "best.safetensors",
        "best.safetensors.checksum",
        "config.json",
        "curves.png",
        "curves.png.checksum",
        "last.safetensors",
        "last.safetensors.checksum",
        "metrics.csv",
        "metrics.csv.checksum",
        "result.json",
    }
    assert (run.path / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert run.result == result
    with open(run.path / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(lines) == 4
    assert min(float(row["validation_logloss"]) for row in rows) == result["validation"]["logloss"]
    best = checkpoint.load(run.best)
    assert best["step"] == result["best_step"]
    assert_same_weights(best["model"], weights(trainer.model))


def test_seeds_reproduce_and_differ(cache):
    config = {"batch_size": 128, "max_steps": 12}
    models = []
    for seed in (0, 0, 1):
        model = small_dcn(cache, dropout=0.5)
        torch.manual_seed(seed)
        Trainer(model, cache, TrainingConfig(seed=seed, **config)).fit()
        models.append(weights(model))
    assert_same_weights(models[0], models[1])
    assert not torch.equal(models[0]["cross.weight"], models[2]["cross.weight"])


def test_early_stopping_keeps_the_best_weights(cache, tmp_path):
    """A rate that overfits 3,400 rows in a few epochs: validation gets worse, training stops, the best one stays."""
    config = TrainingConfig(batch_size=64, epochs=100, lr=0.02, patience=2)
    trainer = Trainer(small_dcn(cache, deep_layers=(64, 64)), cache, config, Run.create(tmp_path / "run", {}))
    result = trainer.fit()
    losses = [row["validation_logloss"] for row in trainer.history]
    assert result["stopped_early"]
    assert len(losses) < 30
    assert losses.index(min(losses)) == len(losses) - 3
    assert evaluate(trainer.model, cache, "validation")["logloss"] == pytest.approx(min(losses), abs=1e-12)


def test_no_validation_rows_means_the_last_weights(unvalidated):
    trainer = Trainer(small_dcn(unvalidated), unvalidated, TrainingConfig(batch_size=100, epochs=3, patience=1))
    result = trainer.fit()
    assert result["best_step"] == result["steps"] == 15
    assert "validation" not in result
    assert "test" in result


def test_a_batch_larger_than_the_data_is_one_step(unvalidated):
    assert Trainer(small_dcn(unvalidated), unvalidated, TrainingConfig(batch_size=9999, epochs=2)).fit()["steps"] == 2


def test_plateau_lowers_the_rate(cache):
    config = TrainingConfig(batch_size=64, epochs=40, lr=0.02, schedule="plateau", patience=3)
    trainer = Trainer(small_dcn(cache, deep_layers=(64, 64)), cache, config)
    trainer.fit()
    rates = [row["lr"] for row in trainer.history]
    losses = [row["validation_logloss"] for row in trainer.history]
    for i in range(1, len(rates)):
        worse = losses[i - 1] >= min(losses[: i - 1], default=math.inf)
        assert rates[i] == pytest.approx(rates[i - 1] * (0.3 if worse else 1))
    assert rates[-1] < rates[0]


def test_gradients_are_clipped(cache):
    """SGD with rate 1 moves the weights by exactly the gradient: by clip_norm, when that is smaller."""
    model = small_dcn(cache)
    before = weights(model)
    names = {name for name, _ in model.named_parameters()}
    config = TrainingConfig(batch_size=128, max_steps=1, lr=1.0, optimizer="sgd", clip_norm=1e-3)
    Trainer(model, cache, config).fit()
    after = weights(model)
    moved = math.sqrt(sum(float((after[name] - before[name]).double().square().sum()) for name in names))
    assert moved == pytest.approx(1e-3, rel=1e-2)


def test_bf16_is_off_on_a_cpu_and_runs_when_asked_for(cache):
    assert not gains_from_bf16(torch.device("cpu"))
    model = small_dcn(cache)
    seen = []
    model.deep[0].register_forward_hook(lambda module, arguments, output: seen.append(output.dtype))
    result = Trainer(model, cache, TrainingConfig(batch_size=128, epochs=2, bf16=True)).fit()
    assert set(seen) == {torch.bfloat16}
    assert result["validation"]["logloss"] < 0.68


def test_predict_leaves_the_mode_and_needs_rows(cache):
    model = small_dcn(cache).train()
    logits, label = predict_logits(model, cache.batches("test", 64))
    assert model.training
    assert len(logits) == len(label) == cache.sizes["test"]
    with pytest.raises(ValueError, match="0 rows"):
        predict_logits(model, [])


def test_every_model_trains_and_dcn_finds_the_planted_crosses(tmp_path):
    """Fields multiply in the logit: logistic regression cannot see it, a DNN of the same size only in part."""
    split = "random:0.7,0.1,0.2"
    write_click_log(tmp_path / "clicks.txt", 40_000, degree_2=2.0, degree_3=1.0, largest_vocabulary=4, split=split)
    planted = prepare(tmp_path / "clicks.txt", tmp_path / "cache", split=split)
    label = torch.cat([batch.label for batch in planted.batches("test", 1000)]).mean()
    base = float(torch.nn.functional.binary_cross_entropy(label, label))
    found = {}
    for name, model in MODELS.items():
        torch.manual_seed(0)
        options = {"deep_layers": (8,)} if name in ("dcn", "dnn", "wide_deep") else {}
        options |= {"cross_layers": 2} if name == "dcn" else {}
        options |= {"residual_units": 1, "input_dim": 32, "cross_dim": 32} if name == "deep_crossing" else {}
        built = model(planted.schema.cardinalities, len(planted.schema.dense_names), 4, **options)
        epochs = 5 if name in ("dcn", "dnn", "lr") else 1
        config = TrainingConfig(batch_size=256, epochs=epochs, lr=0.03, schedule="cosine", patience=0)
        found[name] = Trainer(built, planted, config).fit()["test"]["logloss"]
    assert all(loss < base - 0.01 for loss in found.values()), (base, found)
    assert found["dcn"] < found["lr"] - 0.1, found
    assert found["dcn"] < found["dnn"] - 0.005, found
