"""A start that failed leaves nothing behind, and what a killed process left half written never blocks."""

import shutil

import pytest

from fastcross.training import checkpoint, resume
from fastcross.training.run_folder import working_in
from fastcross.training.step import TrainingError
from tests.training.helpers import TINY, tiny_experiment


def everything_under(path):
    return sorted(str(item.relative_to(path)) for item in path.rglob("*"))


@pytest.mark.parametrize(
    ("options", "training", "error", "message"),
    [
        ({}, {"lr": 1e30, "max_steps": 9}, TrainingError, "step 2"),
        ({"structure": "square"}, {}, ValueError, "square"),
        ({"backend": "quantum"}, {}, ValueError, "quantum"),
        ({}, {"batch_size": 1}, ValueError, "needs 2 rows in a batch; got 1"),
    ],
)
def test_a_start_that_failed_leaves_nothing(cache, tmp_path, options, training, error, message):
    """In 0.1 its folder stood in the way of the next try."""
    with pytest.raises(error, match=message):
        tiny_experiment(cache, TINY | options, **training).run(tmp_path / "runs" / "first")
    assert everything_under(tmp_path) == []
    # In a folder of the user's own, the user's files stay.
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "notes.txt").write_text("mine")
    (tmp_path / "own" / ".draft.tmp").write_text("mine too")
    with pytest.raises(error, match=message):
        tiny_experiment(cache, TINY | options, **training).run(tmp_path / "own")
    assert everything_under(tmp_path / "own") == [".draft.tmp", "notes.txt"]
    tiny_experiment(cache).run(tmp_path / "own")


def test_a_disk_that_fills_up_at_a_checkpoint(cache, tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full)
        with pytest.raises(OSError, match="No space left"):
            tiny_experiment(cache).run(tmp_path / "run")
    assert everything_under(tmp_path) == []
    # Once there is a checkpoint the run is worth keeping: it can go on.
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        tiny_experiment(cache, max_steps=6, evaluate_every=2).run(
            tmp_path / "run", show=lambda line: "step 2:" in line and patch.setattr(checkpoint, "save_file", full)
        )
    assert (tmp_path / "run" / "best.safetensors").exists()
    assert resume(tmp_path / "run")["steps"] == 6


def test_a_failure_in_a_run_that_exists_removes_nothing(cache, tmp_path):
    tiny_experiment(cache).run(tmp_path / "run")
    for name in ("best", "last"):
        (tmp_path / "run" / f"{name}.safetensors").unlink()
    before = everything_under(tmp_path)
    with pytest.raises(RuntimeError, match="at once"), working_in(tmp_path / "run"):
        raise RuntimeError("at once")
    assert everything_under(tmp_path) == before


def test_leftovers_of_a_killed_process_vanish_and_never_block(cache, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for name in (".config.json.4711.tmp", ".best.safetensors.4711.tmp", ".tmpzd4cu6", ".lock"):
        (run / name).write_text("half")
    (run / ".last-00000003.tmp").mkdir()
    (run / ".last-00000003.tmp" / "part").write_text("half")
    (run / ".mine.tmp").write_text("no leftover of a run")
    (run / "encoder").mkdir()  # killed before config.json was there
    tiny_experiment(cache, max_steps=4, evaluate_every=2).run(run)
    assert [name for name in everything_under(run) if name.startswith(".")] == [".mine.tmp"]
    (run / "result.json").unlink()
    (run / ".result.json.4711.tmp").write_text("half")
    shutil.copy(run / "best.safetensors", run / ".last.safetensors.1.tmp")
    resume(run)
    assert [name for name in everything_under(run) if name.startswith(".")] == [".mine.tmp"]
