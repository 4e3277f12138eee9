"""fastcross evaluate as a user types it."""

import pytest

from fastcross.cli.main import main
from tests.cli.helpers import SMALL, read


def test_evaluate_repeats_what_training_reported(run, capsys):
    assert main(["evaluate", str(run), "--output", "metrics.json"]) == 0
    expected = read(run / "result.json")["test"]
    assert read("metrics.json") == {"test": expected}
    assert f"test: logloss {expected['logloss']:.4f}, auc {expected['auc']:.4f}" in capsys.readouterr().out
    assert main(["evaluate", str(run / "best.safetensors"), "--part", "train"]) == 0


def test_evaluate_a_new_file_agrees_with_the_cache(run, log, cache, capsys):
    """The first 6/7 of the log are the training part, in order: the file of those rows has its metrics."""
    lines = log.read_text().splitlines(keepends=True)
    size = read(cache / "manifest.json")["sizes"]["train"]
    with open("train.txt", "w") as file:
        file.writelines(lines[:size])
    assert main(["evaluate", str(run), "--data", "train.txt", "--output", "file.json"]) == 0
    assert main(["evaluate", str(run), "--part", "train", "--output", "part.json"]) == 0
    (from_file,), (from_cache,) = (read(name).values() for name in ("file.json", "part.json"))
    assert from_file == pytest.approx(from_cache, abs=1e-6)


def test_a_damaged_checkpoint(run, tmp_path, fails):
    whole = (run / "best.safetensors").read_bytes()
    (tmp_path / "half.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "not a whole checkpoint" in fails("evaluate", tmp_path / "half.safetensors")


def test_a_cache_that_changed_is_refused(log, fails):
    base = ["prepare", str(log), "--cache", "c"]
    assert main(base) == 0
    assert main(["train", "--data", "c", "--run", "r", *SMALL]) == 0
    assert main([*base, "--min-frequency", "100"]) == 0
    assert "other data or with another configuration" in fails("evaluate", "r")
    assert "made with another encoder (columns, vocabularies" in fails("evaluate", "r", "--data", "c")
