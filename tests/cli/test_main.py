"""The command as such: help, errors in one line, exit codes."""

import subprocess
import sys

import pytest

from fastcross.cli.arguments import build_parser
from fastcross.cli.main import main


def test_help_teaches():
    help = subprocess.run([sys.executable, "-m", "fastcross", "--help"], capture_output=True, text=True, check=True)
    for command in ("prepare", "train", "evaluate", "predict", "compare", "export", "info"):
        assert command in help.stdout
    for command in build_parser()._subparsers._group_actions[0].choices.values():
        assert "examples:" in command.format_help()


def test_usage_errors_are_one_line(capsys):
    for arguments in (["fly"], ["train", "--wings", "2"], ["train", "--lr", "fast"], ["predict"]):
        with pytest.raises(SystemExit) as exit:
            main(arguments)
        assert exit.value.code == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_bad_arguments(run, cache, log, tmp_path, fails):
    assert "already holds a run" in fails("train", "--data", cache, "--run", run)
    assert "is finished" in fails("train", "--resume", run)
    assert "not a run folder" in fails("evaluate", tmp_path)
    assert "no --cross-layers" in fails("train", "--data", cache, "--model", "lr", "--cross-layers", 2)
    assert "'C99' is not a categorical column" in fails(
        "train", "--data", cache, "--model", "wide_deep", "--cross", "C1,C99"
    )
    assert "must end in .csv or .npy; got p.txt" in fails("predict", run, log, "--output", "p.txt")
    assert "must end in .pt2 or .onnx; got m.pt" in fails("export", run, "--output", "m.pt")
    assert "'holdout'" in fails("evaluate", run, "--part", "holdout")
    assert "device 'cuda:77'" in fails("train", "--data", cache, "--run", "r1", "--device", "cuda:77")
    assert "lr must be positive" in fails("train", "--data", cache, "--lr", -1)
    assert "xgboost" in fails("compare", "--data", cache, "--models", "dcn,xgboost")
    assert "manifest.json" in fails("info", tmp_path)


def test_debug_shows_the_traceback():
    with pytest.raises(ValueError, match="nowhere"):
        main(["prepare", "nowhere", "--cache", "c", "--debug"])
