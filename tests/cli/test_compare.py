"""fastcross compare, tune and paper: the tables, what they leave, Ctrl-C, and what they refuse."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fastcross.cli.main import main
from fastcross.data.generate import FIELDS_U, FIELDS_V, write_click_log
from fastcross.tuning.study import Study
from tests.cli.helpers import SMALL, read

SEARCHED = ["--embedding-dim", "2", "--batch-size", "256", "--epochs", "2", "--evaluate-every", "5", "--threads", "1"]


def test_compare_prints_and_saves_the_table(cache, capsys, fails):
    command = ["compare", "--data", str(cache), "--models", "dcn,lr", "--seeds", "0,1", "--output", "table", *SMALL]
    assert main(command) == 0
    first = capsys.readouterr()
    assert "| dcn " in first.out
    assert " ± 0." in first.out
    saved = read("table/table.json")
    assert [row["model"] for row in saved["models"]] == sorted(
        ("dcn", "lr"), key=lambda name: next(row["logloss"] for row in saved["models"] if row["model"] == name)
    )
    dcn = next(row for row in saved["models"] if row["model"] == "dcn")
    results = [read(f"table/dcn-{seed}/result.json")["test"]["logloss"] for seed in (0, 1)]
    assert dcn["logloss"] == pytest.approx(np.mean(results))
    assert dcn["logloss_std"] == pytest.approx(np.std(results, ddof=1))
    assert dcn["dense_parameters"] < dcn["parameters"]
    assert Path("table/table.md").read_text() in first.out
    assert Path("table/curves.png").read_bytes()[:4] == b"\x89PNG"
    # Run again, it has nothing left to train; with other options it refuses to mix.
    assert main(command) == 0
    assert "step" not in capsys.readouterr().err
    assert "another configuration" in fails(*command, "--lr", "0.5")


def test_compare_knows_the_optimum_of_the_generated_log(capsys):
    assert main(["compare", "--models", "lr", "--rows", "3000", "--output", "table", *SMALL]) == 0
    printed = capsys.readouterr().out
    saved = read("table/table.json")
    assert f"| Bayes optimum | {saved['optimum']:.4f}" in printed
    assert f"| {saved['models'][0]['logloss'] - saved['optimum']:.4f}" in printed


def test_compare_wide_deep_with_crosses(cache):
    command = ["compare", "--data", str(cache), "--models", "wide_deep", "--cross", "C1,C3", "--output", "wd", *SMALL]
    assert main(command) == 0
    assert read("wd/wide_deep-0/config.json")["options"]["crosses"] == [[0, 2]]


def test_logistic_regression_gains_from_the_crosses_that_a_dcn_finds(tmp_path, capsys):
    """Of the log's crosses u v and u v t the pairs are sixteen; with them LR comes near, without them it cannot."""
    log = tmp_path / "clicks.txt"
    write_click_log(log, 40_000, seed=1, degree_2=2.0, degree_3=0.5, largest_vocabulary=20)
    data = ["--data", str(log), "--embedding-dim", "8", "--lr", "0.01", "--schedule", "cosine", "--epochs", "6"]
    common = ["compare", *data, "--patience", "0", "--threads", "1"]
    assert main([*common, "--models", "lr", "--output", "without"]) == 0
    options = ["--cross-layers", "2", "--deep-layers", "8", "--crosses", "auto:16"]
    capsys.readouterr()
    assert main([*common, "--models", "lr,wide_deep", "--output", "with", *options]) == 0
    printed = capsys.readouterr().out
    saved = read("with/table.json")
    planted = {(f"C{u + 1}", f"C{v + 1}") for u in FIELDS_U for v in FIELDS_V}
    found = [tuple(cross["fields"]) for cross in saved["crosses"]]
    assert len(set(found) & planted) >= 14
    strongest = saved["crosses"][0]
    assert f"{' × '.join(strongest['fields'])} {strongest['strength']:.3g}, " in printed
    with_crosses = {row["model"]: row["logloss"] for row in saved["models"]}
    without = read("without/table.json")["models"][0]["logloss"]
    assert with_crosses["lr"] < without - 0.03
    assert with_crosses["wide_deep"] < without - 0.03
    for model in ("lr", "wide_deep"):
        crosses = read(f"with/{model}-0/config.json")["options"]["crosses"]
        assert [(f"C{f + 1}", f"C{g + 1}") for f, g in crosses] == found


def test_crosses_that_cannot_be_found(cache, fails):
    assert "got 'best'" in fails("compare", "--crosses", "best")
    assert "N at least 1" in fails("compare", "--crosses", "auto:0")
    message = fails("compare", "--data", cache, "--crosses", "auto", "--models", "dcn,dnn")
    assert "--crosses has no effect on dcn, dnn, but on wide_deep and lr" in message
    message = fails("compare", "--data", cache, "--crosses", "auto", "--cross", "C1,C2")
    assert "by --cross or have them found by --crosses auto, not both" in message
    assert "got cross_layers = 0" in fails("compare", "--data", cache, "--crosses", "auto", "--cross-layers", 0)


def test_tune_and_paper(cache, capsys):
    Path("space.json").write_text('{"dcn": {"hidden_layers": [1], "hidden_size": [4, 8], "cross_layers": [1, 2]}}')
    command = ["tune", "--data", str(cache), "--model", "dcn,lr", "--lr", "0.01", "--study", "study", *SEARCHED]
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
        assert main(["train", "--data", str(cache), *options, *SEARCHED]) == 0
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
        str(cache),
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
    assert "interrupted; continue with: fastcross tune --resume study --trials 2" in error
    assert "Traceback" not in error
    study = Study.open("study")
    assert [trial.state.name for trial in study.trials("dcn")] == ["RUNNING"]
    assert (study.path / "runs" / "dcn-0000" / "last.safetensors").exists()
    assert not any((study.path / "working").iterdir())


def test_bad_input_is_one_line(cache, fails):
    data = ["--data", cache]
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
    message = fails("tune", "--data", cache, "--trials", 1)
    assert "tune needs optuna; install with: pip install -e" in message
    assert "[tune]" in message
