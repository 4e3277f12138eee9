"""Callbacks are told of evaluations, checkpoints and the end; the loggers write what their own packages read."""

import pytest

from fastcross.cli.main import main
from fastcross.training.config import LOGGERS
from fastcross.training.loop import KINDS, Callback
from fastcross.training.run_folder import Run
from tests.training.helpers import arguments, tiny_experiment


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
