"""Training: schedules, stopping, failures that say where, and resuming bit for bit after SIGKILL."""

import csv
import math
import signal
import subprocess
import sys
import time

import pytest
import torch

from fastcross.cli.main import main
from fastcross.data import prepare
from fastcross.data.generate import write_click_log
from fastcross.models import MODELS
from fastcross.models.dcn import DCN
from fastcross.training import checkpoint
from fastcross.training.config import TrainingConfig, learning_rate
from fastcross.training.divergence import TrainingError
from fastcross.training.evaluate import evaluate, gains_from_bf16, predict
from fastcross.training.loop import Trainer
from fastcross.training.run_folder import Run


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clicks")
    write_click_log(folder / "clicks.txt", 4000, largest_vocabulary=50)
    return prepare(folder / "clicks.txt", folder / "cache")


@pytest.fixture(scope="module")
def unvalidated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unvalidated")
    write_click_log(folder / "clicks.txt", 600, largest_vocabulary=10)
    return prepare(folder / "clicks.txt", folder / "cache", split="random:0.9,0,0.1")


def small_dcn(cache, seed=0, **options):
    torch.manual_seed(seed)
    sizes = {"cross_layers": 2, "deep_layers": (8,)} | options
    return DCN(cache.schema.cardinalities, len(cache.schema.dense_names), 4, **sizes)


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_weights(a, b):
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different


def test_training_learns_and_leaves_a_run_folder(cache, tmp_path):
    run = Run.create(tmp_path / "run", {"any": "thing"})
    lines = []
    trainer = Trainer(small_dcn(cache), cache, TrainingConfig(batch_size=128, epochs=4), run, show=lines.append)
    before = evaluate(trainer.model, cache, "validation")
    result = trainer.fit()
    assert result["validation"]["logloss"] < before["logloss"] - 0.01
    assert {path.name for path in run.path.iterdir()} == {
        "best.safetensors",
        "config.json",
        "curves.png",
        "last.safetensors",
        "metrics.csv",
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


def test_learning_rates():
    constant = TrainingConfig(lr=1.0, warmup_steps=4)
    assert [learning_rate(constant, step, 100) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    cosine = TrainingConfig(lr=1.0, schedule="cosine", warmup_steps=2)
    assert [learning_rate(cosine, step, 10) for step in (1, 2, 6)] == pytest.approx([1, 1, 0.5])
    assert 0 < learning_rate(cosine, 9, 10) < 0.05
    plateau = TrainingConfig(lr=1.0, schedule="plateau")
    assert learning_rate(plateau, 50, 100, decays=2) == pytest.approx(0.09)


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0}, "lr must be positive and finite; got 0"),
        ({"lr": math.nan}, "got nan"),
        ({"schedule": "linear"}, "constant, plateau, cosine; got 'linear'"),
        ({"batch_size": 0}, "batch_size must be at least 1; got 0"),
        ({"patience": -1}, "patience must not be negative; got -1"),
    ],
)
def test_bad_configurations(options, message):
    with pytest.raises(ValueError, match=message):
        TrainingConfig(**options)


def test_a_parameter_that_is_not_finite_is_named(cache):
    model = small_dcn(cache)
    with torch.no_grad():
        model.cross.weight[1, 3] = math.inf
    with pytest.raises(TrainingError, match=r"step 1 \(epoch 1, batch 1 of 26\).* first: the parameter cross"):
        Trainer(model, cache, TrainingConfig(batch_size=128)).fit()


def test_a_gradient_that_is_not_finite_is_named(cache):
    model = small_dcn(cache)
    healthy = weights(model)
    model.deep[0].weight.register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(TrainingError, match=r"gradient norm nan; not finite first: the gradient of deep\.0\.weight"):
        Trainer(model, cache, TrainingConfig(batch_size=128)).fit()
    trained = weights(model)
    assert torch.equal(healthy["deep.0.weight"], trained["deep.0.weight"])  # the step was not taken


def test_a_table_gradient_that_is_not_finite_is_named(cache):
    model = small_dcn(cache)
    model.embedding.tables[3].register_hook(
        lambda gradient: gradient * math.nan if not gradient.is_sparse else gradient.coalesce() * math.nan
    )
    with pytest.raises(TrainingError, match=r"the gradient of embedding\.tables\.3"):
        Trainer(model, cache, TrainingConfig(batch_size=128)).fit()


def test_an_input_that_is_not_finite_is_named(cache, monkeypatch):
    batches = cache.batches

    def poisoned(part, *arguments, **options):
        for i, batch in enumerate(batches(part, *arguments, **options)):
            if part == "train" and i == 4:
                batch.dense[7, 2] = math.nan
            yield batch

    monkeypatch.setattr(cache, "batches", poisoned)
    with pytest.raises(TrainingError, match=r"step 5 .*: the loss is nan.*the dense features of the batch"):
        Trainer(small_dcn(cache), cache, TrainingConfig(batch_size=128)).fit()


def test_an_exploding_loss_stops(cache):
    model = small_dcn(cache)
    with torch.no_grad():
        model.logits.weight *= 1e6
    with pytest.raises(TrainingError, match=r"exploded to .*above the limit of 1000; .* logits\.weight"):
        Trainer(model, cache, TrainingConfig(batch_size=128)).fit()


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
    logits, label = predict(model, cache.batches("test", 64))
    assert model.training
    assert len(logits) == len(label) == cache.sizes["test"]
    with pytest.raises(ValueError, match="0 rows"):
        predict(model, [])


OPTIONS = {
    "--cross-layers": 2,
    "--deep-layers": 16,
    "--dropout": 0.3,
    "--batch-size": 128,
    "--epochs": 3,
    "--evaluate-every": 5,
    "--schedule": "plateau",
    "--patience": 0,
    "--lr": 0.03,
    "--checkpoint-seconds": 0.05,
    "--threads": 1,
    "--seed": 7,
}


def arguments(cache, run, **changes):
    options = OPTIONS | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    pairs = [str(text) for pair in options.items() for text in pair]
    return ["train", "--data", str(cache.path), "--run", str(run), *pairs]


def start(arguments):
    command = [sys.executable, "-m", "fastcross", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def metrics_without_time(run):
    with open(run / "metrics.csv") as file:
        return [{name: value for name, value in row.items() if name != "seconds"} for row in csv.DictReader(file)]


def test_killed_and_resumed_is_bit_for_bit_the_undisturbed_run(cache, tmp_path):
    """SIGKILL in the middle of an epoch; dropout, moments, plateau decay and the order of batches have to carry on."""
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "killed"
    assert main(arguments(cache, undisturbed)) == 0
    process = start(arguments(cache, run))
    deadline = time.monotonic() + 120
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
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"continue with: fastcross train --resume {run}" in errors
    assert "Traceback" not in errors
    state = checkpoint.load(run / "last.safetensors")
    assert state["step"] >= 20
    assert f"interrupted at step {state['step']} of 26000" in errors


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
