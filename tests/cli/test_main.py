"""The command as such: help, errors in one line, exit codes."""

import subprocess
import sys

import pytest

from fastcross.cli.main import main
from fastcross.cli.parser import build_parser


def test_help_teaches():
    help = subprocess.run([sys.executable, "-m", "fastcross", "--help"], capture_output=True, text=True, check=True)
    for command in ("prepare", "train", "evaluate", "predict", "compare", "tune", "paper", "export", "info"):
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
    assert "must end in .csv or .parquet or .npy; got p.txt" in fails("predict", run, log, "--output", "p.txt")
    assert "must end in .pt2 or .onnx; got m.pt" in fails("export", run, "--output", "m.pt")
    assert "'holdout'" in fails("evaluate", run, "--part", "holdout")
    assert "device 'cuda:77'" in fails("train", "--data", cache, "--run", "r1", "--device", "cuda:77")
    assert "lr must be positive" in fails("train", "--data", cache, "--lr", -1)
    assert "xgboost" in fails("compare", "--data", cache, "--models", "dcn,xgboost")
    assert "manifest.json" in fails("info", tmp_path)


def test_debug_shows_the_traceback():
    with pytest.raises(ValueError, match="nowhere"):
        main(["prepare", "nowhere", "--cache", "c", "--debug"])


def test_help_and_version_do_without_pytorch():
    """PyTorch takes two seconds to import; nor does it belong to parsing."""
    script = (
        "import sys\nfrom fastcross.cli.main import main\n"
        "for arguments in (['--version'], ['--help'], ['train', '--help'], ['train', '--threads', '0']):\n"
        "    try:\n        main(arguments)\n    except SystemExit:\n        pass\n"
        "print(sorted({'torch', 'pyarrow', 'numpy'} & set(sys.modules)))"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines()[-1] == "[]"


def test_commands_import_no_more_than_they_use():
    """matplotlib takes a second, TorchRec several; both are imported where they are used."""
    script = (
        "import importlib, sys\n"
        "for group in ('train', 'predict', 'compare', 'info'):\n"
        "    importlib.import_module(f'fastcross.cli.{group}')\n"
        "    print(group, sorted({'matplotlib', 'torchrec', 'triton', 'onnx', 'optuna'} & set(sys.modules)))"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert [line.split(maxsplit=1)[1] for line in printed.splitlines()] == ["[]"] * 4


def test_without_a_command_the_help_is_shown(capsys):
    with pytest.raises(SystemExit) as exit:
        main([])
    assert exit.value.code == 2
    assert "first steps:" in capsys.readouterr().err


UNREADABLE = {
    "--deep-layers foo": "expected layer sizes as in 1024,1024 or 292x6, or 0 for none; got 'foo'",
    "--deep-layers 3x": "got '3x'",
    "--deep-layers -3": "got '-3'",
    "--threads 0": "must be at least 1; got 0",
    "--threads two": "expected a whole number; got 'two'",
    "--rows 0": "must be at least 1; got 0",
    "--processes 0": "must be at least 1; got 0",
    "--cross ,": "expected names",
    "--cross C1,C1": "C1 is named twice",
    "clicks.txt": "unrecognized arguments: clicks.txt; did you mean --data clicks.txt? (see fastcross train --help)",
}


@pytest.mark.parametrize("options", UNREADABLE)
def test_values_that_cannot_be_read(options, fails):
    assert UNREADABLE[options] in fails("train", *options.split())


def test_options_without_effect_are_refused(run, cache, log, fails):
    """A user who gives an option expects it to matter."""
    message = fails("train", "--data", log, "--rows", 300_000)
    assert "--rows has no effect on --data, but on the log that is generated without it" in message
    message = fails("train", "--data", cache, "--split", "random", "--label", "x")
    assert f"--label, --split have no effect on the cache {cache}, which is prepared already" in message
    assert "--min-frequency has no effect on the generated log" in fails("compare", "--min-frequency", 5)
    message = fails("train", "--resume", run, "--lr", 0.5, "--cross", "C1,C2")
    assert "--cross, --lr have no effect on a run that is resumed" in message
    assert "--part has no effect on a file" in fails("evaluate", run, "--data", log, "--part", "train")
    assert "--on-error has no effect on a cache" in fails("evaluate", run, "--on-error", "skip")


def test_options_are_checked_before_data_is_prepared(log, fails, tmp_path):
    """An error after minutes of reading helps nobody."""
    for options, expected in (
        (("--dropout", 3), "dropout"),
        (("--backend", "cuda"), "backend must be one of"),
        (("--device", "gpu"), "cannot use the device 'gpu'"),
        (("--split", 2), "between 0 and 1; got 2"),
    ):
        for command in ("train", "compare"):
            assert expected in fails(command, "--data", log, *options)
    assert not (tmp_path / "user").exists()
    assert not (tmp_path / "runs").exists()


def test_what_is_no_run_and_no_cache(log, run, fails, tmp_path):
    swapped = fails("predict", log, run, "--output", "p.csv")
    assert f"expected a run folder, or the best.safetensors in it; got the file {log}" in swapped
    assert "there is no nowhere" in fails("evaluate", "nowhere")
    assert "there is no nowhere" in fails("info", "nowhere")
    assert f"{log} is neither a run folder" in fails("info", log)
    assert "no column Z; the columns are" in fails("predict", run, log, "--output", "p.csv", "--id-column", "Z")
    assert "0 is named twice" in fails("compare", "--seeds", "0,1,0")


def test_a_defect_says_what_and_how_to_find_it(fails, monkeypatch):
    def broken(args):
        return {}["surprise"]

    monkeypatch.setattr("fastcross.cli.info.info", broken)
    assert fails("info").endswith("KeyError: 'surprise'; this is a defect of fastcross, --debug shows where")


def test_a_missing_package_names_the_command_that_installs_it(run, cache, log, fails, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # which draws the curves at the end
    for command in ("train", "compare"):
        message = fails(command, "--data", cache)
        assert "training needs matplotlib; install with: pip install -e" in message
        assert "[train]" in message
    assert not (tmp_path / "runs").exists()
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    message = fails("evaluate", run)
    assert "this command needs tqdm; install with: pip install -e" in message
