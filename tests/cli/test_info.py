"""fastcross info, and explain: a page from a run folder, with or without the cache it was trained on."""

import csv
import shutil

import pytest
import torch

from fastcross.cli.main import main
from fastcross.data.generate import write_click_log

OPTIONS = ["--cross-layers", "2", "--deep-layers", "4", "--embedding-dim", "2", "--epochs", "1", "--threads", "1"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("explain")
    write_click_log(folder / "clicks.txt", 4000)
    arguments = ["train", "--data", str(folder / "clicks.txt"), "--cache", str(folder / "cache"), *OPTIONS]
    assert main([*arguments, "--run", str(folder / "run")]) == 0
    return folder


def test_a_page_for_the_test_part(trained, tmp_path, capsys):
    assert main(["explain", str(trained / "run"), "--output", str(tmp_path / "page"), "--row", "7"]) == 0
    printed = capsys.readouterr().out
    assert "strongest crosses" in printed
    assert f"page: {tmp_path / 'page' / 'index.html'}" in printed
    text = (tmp_path / "page" / "index.html").read_text()
    assert text.count("data:image/png;base64,") == 4
    assert "strongest fields by themselves (standard deviation in the logit): " in printed
    assert "permuted, moves the output (share): " in printed
    with open(tmp_path / "page" / "pairs.csv") as file:
        rows = list(csv.DictReader(file))
    fields = {row[end] for row in rows for end in ("field", "other_field")}
    assert {"I13", "C26"} <= fields
    assert any(name.endswith(".missing") for name in fields)
    assert len(rows) == len(fields) * (len(fields) - 1) // 2
    assert f"{rows[0]['field']} × {rows[0]['other_field']}" in printed
    assert "% of rows" in printed


def test_info(run, cache, capsys):
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    for fact in ("fastcross 0.", "Python 3.", "CPU: ", "threads", "GPU: ", "backends: torch, reference, cpu ("):
        assert fact in printed
    assert f"torch {torch.__version__}" in printed
    assert main(["info", str(run)]) == 0
    printed = capsys.readouterr().out
    assert "dcn, finished" in printed
    assert "strongest crosses (standard deviation in the logit): " in printed
    assert main(["info", str(cache)]) == 0
    assert "made from clicks.txt" in capsys.readouterr().out


def test_info_of_a_run_without_options_has_no_empty_line(cache, capsys):
    assert main(["train", "--data", str(cache), "--run", "r", "--model", "lr", "--epochs", "1"]) == 0
    capsys.readouterr()
    assert main(["info", "r"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.rstrip().endswith(":")] == []


def test_a_run_without_its_cache_explains_a_file(trained, tmp_path, capsys):
    shutil.copytree(trained / "run", tmp_path / "run")
    shutil.move(trained / "cache", trained / "elsewhere")
    try:
        assert main(["explain", str(tmp_path / "run")]) == 2
        assert "cache" in capsys.readouterr().err
        assert main(["explain", str(tmp_path / "run"), "--data", str(trained / "clicks.txt")]) == 0
        assert "means are taken over" in capsys.readouterr().err
        assert (tmp_path / "run" / "explanation" / "index.html").exists()
    finally:
        shutil.move(trained / "elsewhere", trained / "cache")


def test_a_row_that_is_not_there_and_a_model_without_crosses_are_named(trained, tmp_path, capsys):
    assert main(["explain", str(trained / "run"), "--row", "1000000", "--output", str(tmp_path / "page")]) == 2
    assert "--row must be one of the" in capsys.readouterr().err
    assert not (tmp_path / "page").exists()
    lr = str(tmp_path / "lr")
    assert main(["train", "--data", str(trained / "cache"), "--model", "lr", "--max-steps", "2", "--run", lr]) == 0
    assert main(["explain", lr]) == 2
    assert "holds a LogisticRegression" in capsys.readouterr().err
