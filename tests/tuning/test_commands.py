"""fastcross tune and fastcross paper: what they print and leave, Ctrl-C, and bad input in one line."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fastcross.cli.main import main
from fastcross.tuning.study import Study

SMALL = ["--embedding-dim", "2", "--batch-size", "256", "--epochs", "2", "--evaluate-every", "5", "--threads", "1"]


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def fails(capsys):
    """Runs a command that must fail, and returns the one line of its error."""

    def run(*arguments):
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exit:
            code = exit.code
        lines = capsys.readouterr().err.strip().splitlines()
        assert code == 2
        assert lines[-1].startswith(f"fastcross {arguments[0]}: ")
        return lines[-1]

    return run


def test_tune_and_paper(cache, capsys):
    Path("space.json").write_text('{"dcn": {"hidden_layers": [1], "hidden_size": [4, 8], "cross_layers": [1, 2]}}')
    command = ["tune", "--data", str(cache.path), "--model", "dcn,lr", "--lr", "0.01", "--study", "study", *SMALL]
    assert main([*command, "--grid", "--space", "space.json", "--seeds", "2"]) == 0
    printed = capsys.readouterr()
    assert "dcn: 4 trials (4 complete)" in printed.out
    assert "lr: 1 trials (1 complete)" in printed.out  # its only parameter was given
    assert "training steps took" in printed.out
    assert "dcn-0003: complete, logloss 0." in printed.err
    assert Path("study/importances.png").read_bytes()[:4] == b"\x89PNG"
    summary = json.loads(Path("study/summary.json").read_text())
    assert 0 < summary["training_seconds"] < summary["total_seconds"]
    assert summary["models"]["dcn"]["best"]["training"]["lr"] == 0.01
    assert main(["paper", "--study", "study", "--beside", "criteo", "--title", "Ours"]) == 0
    page = Path("study/paper/tables.md").read_text()
    assert page.startswith("# Ours\n")
    assert page in capsys.readouterr().out
    for title in ("## Table 1", "## Table 2", "## Table 3", "## Figure 3"):
        assert title in page
    assert "## Table 4" not in page  # there is no DNN to compare with
    assert "0.4419" in page
    assert re.search(r"DCN - LR, logloss: [+-]0\.\d{5} ± 0\.\d{5}", page)
    assert Path("study/paper/figure-3.png").read_bytes()[:4] == b"\x89PNG"
    again = ["paper", "--study", "study/paper/results.json", "--beside", "criteo", "--title", "Ours", "--output", "p"]
    assert main(again) == 0
    assert Path("p/tables.md").read_text() == page


def test_paper_of_runs(cache, capsys):
    for model, seed in (("dcn", 0), ("dcn", 1), ("dnn", 0)):
        options = ["--model", model, "--seed", str(seed), "--deep-layers", "4", "--run", f"runs/{model}-{seed}"]
        assert main(["train", "--data", str(cache.path), *options, *SMALL]) == 0
    Path("runs/dnn-0/result.json").unlink()
    capsys.readouterr()
    assert main(["paper", "--runs", *map(str, Path("runs").iterdir()), "--beside", "covertype"]) == 0
    printed = capsys.readouterr()
    assert "runs/dnn-0 is not finished: left out" in printed.err
    accuracies = [json.loads(Path(f"runs/dcn-{seed}/result.json").read_text())["test"]["accuracy"] for seed in (0, 1)]
    page = Path("paper/tables.md").read_text()
    assert f"| 0, 1 | {sum(accuracies) / 2:.4f} ± " in page
    assert "| 0.9740 |" in page
    assert "standard error" not in page  # one DNN has no deviation
    assert "dnn-0" in page


def test_ctrl_c_leaves_a_study_to_go_on_with(cache):
    command = [
        sys.executable,
        "-m",
        "fastcross",
        "tune",
        "--data",
        str(cache.path),
        "--trials",
        "2",
        "--study",
        "study",
    ]
    slow = ["--epochs", "2000", "--embedding-dim", "2", "--deep-layers", "4", "--threads", "1", "--lr", "0.001"]
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    process = subprocess.Popen(
        [*command, *slow, "--pruner", "none"], stderr=subprocess.PIPE, text=True, env=environment
    )
    runs = Path("study/runs/dcn-0000/metrics.csv")
    end = time.monotonic() + 480
    while not runs.exists() and time.monotonic() < end and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=480)[1]
    assert process.returncode == 130, error
    assert "interrupted; go on with: fastcross tune --resume study --trials 2" in error
    assert "Traceback" not in error
    study = Study.open("study")
    assert [trial.state.name for trial in study.trials("dcn")] == ["RUNNING"]
    assert (study.path / "runs" / "dcn-0000" / "last.safetensors").exists()
    assert not any((study.path / "working").iterdir())


def test_bad_input_is_one_line(cache, fails):
    data = ["--data", cache.path]
    assert "say how long to search: --trials N, --budget 2h, or --grid" in fails("tune", *data)
    assert "there is no model 'xgboost'" in fails("tune", "--model", "dcn,xgboost")
    assert "expected a time as in 2h" in fails("tune", "--budget", "long")
    assert "must be at least 1; got 0" in fails("tune", "--trials", 0)
    assert "is not a study" in fails("tune", "--resume", "nowhere")
    assert "--lr has no effect on a study that is resumed" in fails("tune", "--resume", "nowhere", "--lr", 0.1)
    Path("space.json").write_text('{"dnn": {"lr": [0.1]}}')
    message = fails("tune", *data, "--trials", 1, "--space", "space.json")
    assert "space.json has a space for dnn; --model names dcn" in message
    Path("space.json").write_text('{"dcn": {"lr": {"low": 0.1, "high": 0.2}}}')
    message = fails("tune", *data, "--grid", "--space", "space.json", "--study", "s")
    assert "a full grid needs values for lr" in message
    Path("full").mkdir()
    Path("full/file").touch()
    assert "full is not empty" in fails("tune", *data, "--trials", 1, "--study", "full")
    assert "nowhere.json" in fails("tune", *data, "--trials", 1, "--space", "nowhere.json")
    assert "lr must be positive" in fails("tune", *data, "--trials", 1, "--lr", -1)
    assert not Path("s").exists()
    assert not Path("runs").exists()
    assert "say what to report" in fails("paper")
    assert "is not a study" in fails("paper", "--study", "nowhere")
    assert "is not a run folder" in fails("paper", "--runs", "nowhere")


def test_without_optuna_the_command_that_installs_it_is_named(cache, fails, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    message = fails("tune", "--data", cache.path, "--trials", 1)
    assert "tune needs optuna; install with: pip install -e" in message
    assert "[tune]" in message
