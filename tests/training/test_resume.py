"""A training that was killed or interrupted goes on as if nothing had happened."""

import signal
import time

import pytest
import torch

from fastcross.cli.main import main
from fastcross.training import checkpoint
from fastcross.training.loop import Trainer
from tests.training.helpers import arguments, assert_same_weights, metrics_without_time, start


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
