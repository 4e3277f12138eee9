"""fastcross train as a user types it."""

import torch

from fastcross.cli.main import main
from fastcross.training.run_folder import load_model
from tests.cli.helpers import SMALL, read


def test_train_without_data_uses_the_generated_log(tmp_path, capsys):
    assert main(["train", "--rows", "3000", *SMALL]) == 0
    captured = capsys.readouterr()
    assert "generating a click log of 3,000 rows" in captured.err
    assert "best possible logloss: train 0." in captured.out
    (folder,) = (tmp_path / "runs").iterdir()
    result = read(folder / "result.json")
    assert result["test"]["logloss"] > result["optimum"]["test"]
    # Its own defaults hold where nothing else was asked for.
    plan = read(folder / "config.json")
    assert plan["training"]["lr"] == 0.01
    assert plan["options"]["cross_layers"] == 2
    assert plan["options"]["deep_layers"] == [8]
    # A second time the log and its cache are there already.
    assert main(["train", "--rows", "3000", "--run", "again", *SMALL]) == 0
    assert "generating" not in capsys.readouterr().err


def test_train_is_reproducible(run, cache):
    assert main(["train", "--data", str(cache), "--run", "again", *SMALL]) == 0
    first, second = load_model(run).model.state_dict(), load_model("again").model.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_train_on_a_file_keeps_its_cache_for_later(log, tmp_path):
    for name in ("a", "b"):
        assert main(["train", "--data", str(log), "--run", name, *SMALL]) == 0
    assert len(list((tmp_path / "user" / "fastcross").iterdir())) == 1


def test_training_that_fails_says_where(cache, fails):
    message = fails("train", "--data", cache, "--run", "r", "--lr", "1e30", *SMALL)
    assert "training stopped at step 2 (epoch 1, batch 2 of 13)" in message
