"""fastcross compare: the table, and what it refuses."""

from pathlib import Path

import numpy as np
import pytest

from fastcross.cli.main import main
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
