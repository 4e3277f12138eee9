"""The loop: it learns, repeats itself, stops early, goes on where it was interrupted, and tells its callbacks."""

import csv
import math
import signal
import time

import pytest
import torch

from fastcross.cli.main import main
from fastcross.data import prepare
from fastcross.data.generate import write_click_log
from fastcross.models import MODELS
from fastcross.models.base import model_class
from fastcross.training import checkpoint
from fastcross.training.config import LOGGERS, TrainingConfig
from fastcross.training.loop import KINDS, Callback, Trainer
from fastcross.training.metrics import evaluate, predict_logits
from fastcross.training.run_folder import Run
from fastcross.training.step import gains_from_bf16
from tests.training.helpers import (
    arguments,
    assert_same_weights,
    metrics_without_time,
    small_dcn,
    start,
    tiny_experiment,
    weights,
)


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
    assert len(rows) == sum(line.startswith("epoch") for line in lines) == 4
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
    for name in MODELS:
        torch.manual_seed(0)
        options = {"deep_layers": (8,)} if name in ("dcn", "dnn", "wide_deep") else {}
        options |= {"cross_layers": 2} if name == "dcn" else {}
        options |= {"residual_units": 1, "input_dim": 32, "cross_dim": 32} if name == "deep_crossing" else {}
        built = model_class(name)(planted.schema.cardinalities, len(planted.schema.dense_names), 4, **options)
        epochs = 5 if name in ("dcn", "dnn", "lr") else 1
        config = TrainingConfig(batch_size=256, epochs=epochs, lr=0.03, schedule="cosine", patience=0)
        found[name] = Trainer(built, planted, config).fit()["test"]["logloss"]
    assert all(loss < base - 0.01 for loss in found.values()), (base, found)
    assert found["dcn"] < found["lr"] - 0.1, found
    assert found["dcn"] < found["dnn"] - 0.005, found


def test_killed_and_resumed_is_bit_for_bit_the_undisturbed_run(cache, tmp_path):
    """SIGKILL in the middle of an epoch; dropout, moments, plateau decay and the order of batches have to carry on."""
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "killed"
    assert main(arguments(cache, undisturbed)) == 0
    process = start(arguments(cache, run))
    deadline = time.monotonic() + 480
    while not (run / "last.safetensors").exists() or checkpoint.load(run / "last.safetensors")["step"] < 31:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    state = checkpoint.load(run / "last.safetensors")
    assert 31 <= state["step"] < 78
    assert state["decays"] > 0  # or the resumed run would have no lowered rate to remember
    assert not (run / "result.json").exists()
    torch.manual_seed(12345)  # the resumed run must not lean on this process's generator
    assert main(["train", "--resume", str(run)]) == 0
    for name in ("last", "best"):
        a, b = (checkpoint.load(folder / f"{name}.safetensors") for folder in (run, undisturbed))
        assert_same_weights(a["model"], b["model"])
        assert a["step"] == b["step"]
    assert torch.equal(*(checkpoint.load(folder / "last.safetensors")["rng"][0] for folder in (run, undisturbed)))
    assert metrics_without_time(run) == metrics_without_time(undisturbed)
    assert not list(run.glob(".*"))


def test_interrupted_saves_and_says_how_to_go_on(cache, tmp_path):
    run = tmp_path / "interrupted"
    process = start(arguments(cache, run, checkpoint_seconds=9999, epochs=1000))
    while "step 20" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 130
    assert f"continue with: fastcross train --resume {run}" in errors
    assert "Traceback" not in errors
    state = checkpoint.load(run / "last.safetensors")
    assert state["step"] >= 20
    assert f"interrupted at step {state['step']} of 26000" in errors


@pytest.mark.parametrize("optimizer", ["adamw", "adagrad", "rowwise_adagrad"])
def test_every_optimiser_goes_on_bit_for_bit(optimizer, cache, tmp_path, monkeypatch):
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "interrupted"
    options = {"optimizer": optimizer, "epochs": 1, "checkpoint_seconds": 9999}
    assert main(arguments(cache, undisturbed, **options)) == 0
    train = Trainer._train

    def interrupted(trainer, batch):
        train(trainer, batch)
        if trainer.step == 12:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train", interrupted)
        assert main(arguments(cache, run, **options)) == 130
    assert checkpoint.load(run / "last.safetensors")["step"] == 12
    assert main(["train", "--resume", str(run)]) == 0
    a, b = (checkpoint.load(folder / "last.safetensors") for folder in (run, undisturbed))
    assert_same_weights(a["model"], b["model"])
    assert str(a["optimizer"]) == str(b["optimizer"])
    assert metrics_without_time(run) == metrics_without_time(undisturbed)


class Diary(Callback):
    def __init__(self, fail=False):
        self.events, self.fail = [], fail

    def on_evaluate(self, row):
        self.events.append(("evaluate", row["step"]))
        if self.fail:
            raise RuntimeError("no more")

    def on_checkpoint(self, path, name):
        assert Run(path).holds(name)
        self.events.append(("checkpoint", name))

    def on_end(self, result):
        self.events.append(("end", result and result["steps"]))


def test_events_in_their_order(cache, tmp_path):
    diary = Diary()
    tiny_experiment(cache, evaluate_every=1).run(tmp_path / "run", callbacks=[diary])
    assert [event for event in diary.events if event[0] != "checkpoint"] == [
        ("evaluate", 1),
        ("evaluate", 2),
        ("end", 2),
    ]
    assert diary.events[0] == ("checkpoint", "best")
    assert ("checkpoint", "last") in diary.events


def test_a_training_that_fails_has_an_end_without_result(cache, tmp_path):
    diary = Diary(fail=True)
    with pytest.raises(RuntimeError, match="no more"):
        tiny_experiment(cache).run(tmp_path / "run", callbacks=[diary])
    assert diary.events[-1] == ("end", None)


def test_every_logger_has_its_name():
    assert tuple(KINDS) == LOGGERS


def test_tensorboard(cache, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    assert main([*arguments(cache, run, max_steps=10), "--log", "tensorboard"]) == 0
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    history = Run(run).history
    assert [event.step for event in events.Scalars("validation/auc")] == [row["step"] for row in history] == [5, 10]
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(
        [row["train_loss"] for row in history]
    )


def test_mlflow_in_a_folder(cache, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the one store that needs neither a server nor a database
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    assert main([*arguments(cache, tmp_path / "run", max_steps=10), "--log", "mlflow"]) == 0
    (found,) = mlflow.tracking.MlflowClient().search_runs(["0"])
    history = Run(tmp_path / "run").history
    assert found.info.status == "FINISHED"
    assert found.data.metrics["validation/auc"] == pytest.approx(history[-1]["validation_auc"])
    assert [item.path for item in mlflow.tracking.MlflowClient().list_artifacts(found.info.run_id)] == [
        "best.safetensors",
        "best.safetensors.checksum",
    ]


def test_wandb_offline(cache, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert main([*arguments(cache, tmp_path / "run", max_steps=10), "--log", "wandb"]) == 0
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"validation/auc" in file.read_bytes()


def test_a_logger_that_is_not_installed_is_one_line_and_no_run(cache, tmp_path, monkeypatch, capsys):
    import sys

    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main([*arguments(cache, tmp_path / "run"), "--log", "wandb"]) == 2
    assert "--log wandb needs wandb; install with: pip install wandb" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
