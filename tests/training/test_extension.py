"""A run learns the ids of new data: what it knew stays bit for bit, and what fails leaves everything as it was."""

import json
import signal
import subprocess
import sys
import time

import pyarrow as pa
import pytest
import torch

from fastcross.cli.main import main
from fastcross.data import Encoder, read_for_prediction
from fastcross.training import Dataset, Experiment, TrainingConfig, checkpoint, load_model, resume
from fastcross.training import extension as module
from fastcross.training.checkpoint import CheckpointError
from fastcross.training.extension import extend
from fastcross.training.metrics import predict_logits
from tests.serving_tables import COLUMNS, write_movies
from tests.training.helpers import assert_same_weights

TRAINING = {"batch_size": 256, "epochs": 2, "lr": 0.02}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run on ratings; more of them, with new users and films; and rows of old values alone."""
    folder = tmp_path_factory.mktemp("movies")
    write_movies(folder / "old.csv", 1500)
    write_movies(folder / "new.csv", 1500, seed=1, new=15)
    write_movies(folder / "rows.csv", 300, seed=2)
    data = Dataset(str(folder / "old.csv"), str(folder / "cache"), {"columns": COLUMNS, "min_frequency": 5})
    options = {"cross_layers": 2, "deep_layers": [8]}  # embeddings as wide as the cardinality says
    Experiment(data, options=options, training=TrainingConfig(**TRAINING), threads=1).run(folder / "run")
    return folder


def contents(path):
    return {file.relative_to(path): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def logits(run, rows):
    trained = load_model(run)
    return predict_logits(trained.model, read_for_prediction(rows, trained.encoder))[0]


def extended(folder, target, **options):
    preparation = {"min_frequency": 5, "seed": 0}
    cache = str(target.with_suffix(".cache"))
    return extend(folder / "run", [folder / "new.csv"], target, preparation=preparation, cache=cache, **options)


class Stop(Exception):
    pass


@pytest.fixture
def stopped(monkeypatch):
    """Training fails before its first step."""

    def stop(*args, **kwargs):
        raise Stop

    monkeypatch.setattr(module, "resume", stop)


def test_before_training_goes_on_nothing_is_changed(folder, tmp_path, stopped):
    before = contents(folder / "run")
    with pytest.raises(Stop):
        extended(folder, tmp_path / "run")
    assert contents(folder / "run") == before
    assert torch.equal(logits(tmp_path / "run", folder / "rows.csv"), logits(folder / "run", folder / "rows.csv"))
    old, new = (Encoder.load(path / "run" / "encoder") for path in (folder, tmp_path))
    for a, b in zip((*old.categorical, *old.bags), (*new.categorical, *new.bags), strict=True):
        assert b.values[: len(a.values)].equals(a.values)
    user = old.columns.categories.index("user")
    assert new.categorical[user].cardinality == old.categorical[user].cardinality + 15
    unseen = pa.array(["u30"])
    assert old.categorical[user].ids(unseen) == 0
    assert new.categorical[user].ids(unseen) >= old.categorical[user].cardinality
    assert (new.format, new.columns) == (old.format, old.columns)
    assert new.numbers == old.numbers


def leaves(state, name=""):
    if isinstance(state, torch.Tensor):
        yield name, state
    elif isinstance(state, dict | list | tuple):
        for key, item in state.items() if isinstance(state, dict) else enumerate(state):
            yield from leaves(item, f"{name}.{key}")


def test_new_rows_and_moments_start_as_those_of_the_out_of_vocabulary_id(folder, tmp_path, stopped):
    with pytest.raises(Stop):
        extended(folder, tmp_path / "run")
    for name, part in (("best", "model"), ("last", "model"), ("last", "optimizer")):
        source = "best" if part == "model" else name  # the model that predicts is the one that goes on
        old = dict(leaves(checkpoint.load(folder / "run" / f"{source}.safetensors")[part]))
        new = dict(leaves(checkpoint.load(tmp_path / "run" / f"{name}.safetensors")[part]))
        assert old.keys() == new.keys()
        grown = [key for key in old if old[key].shape != new[key].shape]
        assert len(grown) == (3 if part == "model" else 6)  # users, films, tags; two moments each
        for key, tensor in old.items():
            rows = new[key] if not tensor.dim() else new[key][: len(tensor)]
            assert torch.equal(rows, tensor), key
        for key in grown:
            added = new[key][len(old[key]) :]
            assert torch.equal(added, old[key][:1].expand_as(added))


def test_new_ids_are_learned(folder, tmp_path, monkeypatch):
    result = extended(folder, tmp_path / "run", training={"epochs": 1})
    assert result["steps"] == 1500 * 6 // 7 // 256
    model, encoder = load_model(tmp_path / "run").model, load_model(tmp_path / "run").encoder
    before = len(Encoder.load(folder / "run" / "encoder").categorical[0].values) + 1
    table = model.embedding.tables[0]
    assert len(table) == encoder.categorical[0].cardinality
    moved = (table[before:] != load_model(folder / "run").model.embedding.tables[0][0]).any(dim=1)
    assert moved.all()
    with monkeypatch.context() as patch:
        patch.setattr(module, "resume", lambda *args, **kwargs: None)
        extended(folder, tmp_path / "later", training={"epochs": 1})
    assert resume(tmp_path / "later")["steps"] == result["steps"]
    assert_same_weights(load_model(tmp_path / "later").model.state_dict(), model.state_dict())
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["extends"] == str(folder / "run")
    assert config["training"] == {**vars(TrainingConfig(**TRAINING)), "epochs": 1}


def test_other_models_and_optimisers(folder, tmp_path, monkeypatch):
    """One number for each row, and tables that are no embeddings: they grow all the same."""
    config = TrainingConfig(batch_size=256, max_steps=2, optimizer="rowwise_adagrad")
    Experiment(Dataset(str(folder / "cache")), "fm", training=config, threads=1).run(tmp_path / "fm")
    rows, new = folder / "rows.csv", [folder / "new.csv"]
    with monkeypatch.context() as patch:
        patch.setattr(module, "resume", lambda *args, **kwargs: None)
        extend(tmp_path / "fm", new, tmp_path / "grown", cache=str(tmp_path / "cache"), training={"max_steps": 1})
    assert torch.equal(logits(tmp_path / "grown", rows), logits(tmp_path / "fm", rows))
    assert resume(tmp_path / "grown")["steps"] == 1
    users = [load_model(tmp_path / name).model.one_hot.tables.tables[0] for name in ("grown", "fm")]
    assert len(users[0]) == len(users[1]) + 15


def test_in_place(folder, tmp_path, monkeypatch):
    """The run is replaced when all is done, and what a user put into its folder stays."""
    run = tmp_path / "run"
    for name, data in contents(folder / "run").items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(data)
    (run / "explanation").mkdir()
    (run / "explanation" / "page.html").write_text("mine")
    before, options = contents(run), {"cache": str(tmp_path / "cache"), "preparation": {"min_frequency": 5}}

    def stop(*args, **kwargs):
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(module, "resume", stop)
        with pytest.raises(Stop):
            extend(run, [folder / "new.csv"], run, **options)
    assert contents(run) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "run"]
    extend(run, [folder / "new.csv"], run, training={"max_steps": 1}, **options)
    assert (run / "explanation" / "page.html").read_text() == "mine"
    assert (
        load_model(run).encoder.categorical[0].cardinality
        > load_model(folder / "run").encoder.categorical[0].cardinality
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "run"]


def test_killed(folder, tmp_path):
    """kill -9 in the middle: the old run is what it was, and the new one is there to go on."""
    before, target = contents(folder / "run"), tmp_path / "run"
    arguments = ["extend", folder / "run", "--data", folder / "new.csv", "--run", target, "--cache", tmp_path / "cache"]
    options = ["--epochs", "100000", "--patience", "0", "--threads", "1", "--checkpoint-seconds", "0.2"]
    command = [sys.executable, "-m", "fastcross", *map(str, arguments), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 480
        while not (target / "metrics.csv").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert contents(folder / "run") == before
    assert logits(folder / "run", folder / "rows.csv").isfinite().all()
    assert checkpoint.load(target / "last.safetensors")["step"] >= 0
    assert load_model(target).encoder.categorical[0].cardinality > 20


def test_what_cannot_be_extended(folder, tmp_path, capsys):
    def told(*arguments):
        assert main(["extend", *map(str, arguments)]) == 2
        return capsys.readouterr().err.strip().splitlines()[-1]

    run, new, target = folder / "run", folder / "new.csv", tmp_path / "target"
    hashed = Dataset(str(folder / "old.csv"), str(tmp_path / "hashed"), {"columns": COLUMNS, "hash_buckets": 50})
    config = TrainingConfig(batch_size=256, max_steps=1)
    Experiment(hashed, options={"embedding_dim": 2}, training=config, threads=1).run(tmp_path / "hashed-run")
    assert "there is nothing to extend: values are hashed into 50 buckets" in told(
        tmp_path / "hashed-run", "--data", new, "--run", target
    )
    crossed = Experiment(
        Dataset(str(folder / "cache")), "lr", {"crosses": [["user", "film"]]}, training=config, threads=1
    )
    crossed.run(tmp_path / "crossed")
    assert "has crosses, which number the combinations of all ids" in told(
        tmp_path / "crossed", "--data", new, "--run", target
    )
    assert "it must stay adam; got sgd" in told(run, "--data", new, "--run", target, "--optimizer", "sgd")
    (tmp_path / "bad.csv").write_text("user,film\nu1,2\n")
    assert "no column" in told(run, "--data", tmp_path / "bad.csv", "--run", target)
    assert "is there already and not empty" in told(run, "--data", new, "--run", tmp_path / "crossed")
    (tmp_path / "unfinished").mkdir()
    for name, data in contents(run).items():
        (tmp_path / "unfinished" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "unfinished" / name).write_bytes(data)
    (tmp_path / "unfinished" / "result.json").unlink()
    with pytest.raises(CheckpointError, match="is not finished; go on with it first"):
        extend(tmp_path / "unfinished", [new], target)
    assert not target.exists()


def test_a_quantity_keeps_its_scale(folder, tmp_path, monkeypatch):
    """New rows have another mean; what was learned is said in the unit of the old one."""
    preparation = {"columns": COLUMNS | {"task": "regression"}, "min_frequency": 5}
    data = Dataset(str(folder / "old.csv"), str(tmp_path / "cache"), preparation)
    Experiment(data, options={"embedding_dim": 2}, training=TrainingConfig(**TRAINING), threads=1).run(tmp_path / "run")
    scale = Encoder.load(tmp_path / "run" / "encoder").label_scale
    with monkeypatch.context() as patch:
        patch.setattr(module, "resume", lambda *args, **kwargs: {})
        extend(tmp_path / "run", [folder / "new.csv"], tmp_path / "stopped", preparation={"min_frequency": 5})
    assert torch.equal(logits(tmp_path / "stopped", folder / "rows.csv"), logits(tmp_path / "run", folder / "rows.csv"))
    result = extend(tmp_path / "run", [folder / "new.csv"], tmp_path / "next", preparation={"min_frequency": 5})
    assert result["steps"] > 0
    config = load_model(tmp_path / "next").model.config
    assert (
        (config.label_mean, config.label_deviation) == scale == Encoder.load(tmp_path / "next" / "encoder").label_scale
    )
