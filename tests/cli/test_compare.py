"""fastcross compare: the table, and what it refuses."""

from pathlib import Path

import numpy as np
import pytest

from fastcross.cli.main import main
from fastcross.data.generate import FIELDS_U, FIELDS_V, write_click_log
from tests.cli.helpers import SMALL, read


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
    data = ["--data", str(log), "--embedding-dim", "8", "--lr", "0.02", "--schedule", "cosine", "--epochs", "3"]
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
