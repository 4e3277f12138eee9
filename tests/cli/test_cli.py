"""Each command as a user types it, and each failure: one line on standard error, exit code 2, no half-written file."""

import csv
import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fastcross.cli.arguments import build_parser
from fastcross.cli.main import main
from fastcross.data import Cache
from fastcross.data.generate import write_click_log
from fastcross.training.experiment import load_model

SMALL = ["--embedding-dim", "4", "--deep-layers", "8", "--batch-size", "128", "--epochs", "1", "--threads", "1"]


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "clicks.txt"
    write_click_log(path, 2000, largest_vocabulary=20)
    return path


@pytest.fixture(scope="module")
def cache(log):
    path = log.parent / "cache"
    assert main(["prepare", str(log), "--cache", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def run(cache, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "first"
    assert main(["train", "--data", str(cache), "--run", str(path), *SMALL]) == 0
    return path


def read(path):
    return json.loads(Path(path).read_text())


def fails(capsys, *arguments):
    """The one line of an error."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert lines[-1].startswith(f"fastcross {arguments[0]}: ")
    assert "Traceback" not in captured.err
    return lines[-1]


def test_prepare_says_what_it_made(log, capsys):
    assert main(["prepare", str(log), "--cache", "made", "--split", "random:0.5,0.25,0.25"]) == 0
    printed = capsys.readouterr().out
    assert "train 1000, validation 500, test 500" in printed
    assert "dense columns (13): I1" in printed
    assert "C26" in printed


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


def test_predict_csv_and_npy_agree_labels_or_not(run, log):
    with open("unlabelled.txt", "w") as file:
        file.writelines(line.split("\t", 1)[1] for line in log.read_text().splitlines(keepends=True))
    assert main(["predict", str(run), str(log), "--output", "p.csv"]) == 0
    assert main(["predict", str(run), "unlabelled.txt", "--output", "p.npy"]) == 0
    with open("p.csv") as file:
        rows = list(csv.DictReader(file))
    probability = np.load("p.npy")
    assert len(rows) == len(probability) == 2000
    assert ((probability > 0) & (probability < 1)).all()
    np.testing.assert_allclose([float(row["probability"]) for row in rows], probability, rtol=1e-8)


def test_predict_reports_unknown_values(run, log, capsys):
    line = log.read_text().splitlines()[0].split("\t")
    line[14] = "ffffffff"
    with open("new.txt", "w") as file:
        file.write("\t".join(line) + "\n")
    assert main(["predict", str(run), "new.txt", "--output", "p.csv"]) == 0
    assert "C1 100.0% of the rows" in capsys.readouterr().err


def test_compare_prints_and_saves_the_table(cache, capsys):
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
    assert "another configuration" in fails(capsys, *command, "--lr", "0.5")


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


def test_export_predicts_the_same(run, cache):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    assert main(["export", str(run), "--output", "model.onnx"]) == 0
    batch = next(Cache.open(cache).batches("test", 5))
    expected = load_model(run).model(batch.dense, batch.categorical).detach()
    session = onnxruntime.InferenceSession("model.onnx")
    inputs = {"dense": batch.dense.numpy(), "categorical": batch.categorical.numpy()}
    (found,) = session.run(None, inputs)
    torch.testing.assert_close(torch.as_tensor(found), expected, rtol=1e-4, atol=1e-5)


def test_info(run, cache, capsys):
    assert main(["info"]) == 0
    assert torch.__version__ in capsys.readouterr().out
    assert main(["info", str(run)]) == 0
    printed = capsys.readouterr().out
    assert "dcn, finished" in printed
    assert "strongest crosses: " in printed
    assert main(["info", str(cache)]) == 0
    assert "made from clicks.txt" in capsys.readouterr().out


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


def edited(log, number, edit):
    """The log with line ``number`` (from 1) changed."""
    lines = log.read_bytes().split(b"\n")
    lines[number - 1] = edit(lines[number - 1])
    return b"\n".join(lines)


BAD_ROWS = {
    "columns": (lambda line: line.rsplit(b"\t", 3)[0], "expected 40 columns, got 37"),
    "integer": (lambda line: line.replace(b"\t", b"\tseven", 1), "seven"),
    "utf8": (lambda line: line[:-3] + b"\xff\xfe\xfd", "UTF"),
    "label": (lambda line: b"2" + line[1:], "label"),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_bad_rows_name_file_and_line_or_are_skipped_and_counted(log, capsys, tmp_path, kind):
    edit, expected = BAD_ROWS[kind]
    (tmp_path / "bad.txt").write_bytes(edited(log, 17, edit))
    message = fails(capsys, "prepare", "bad.txt", "--format", "criteo", "--cache", "c")
    assert "bad.txt, line 17" in message
    assert expected.lower() in message.lower()
    assert not (tmp_path / "c").exists()
    assert main(["prepare", "bad.txt", "--format", "criteo", "--cache", "c", "--on-error", "skip"]) == 0
    captured = capsys.readouterr()
    assert "skipped 1 bad rows" in captured.err
    assert "line 17" in captured.err


def test_bad_rows_at_prediction(run, log, capsys, tmp_path):
    (tmp_path / "bad.txt").write_bytes(edited(log, 17, BAD_ROWS["columns"][0]))
    assert "bad.txt, line 17" in fails(capsys, "predict", run, "bad.txt", "--output", "p.csv")
    assert not (tmp_path / "p.csv").exists()
    assert main(["predict", str(run), "bad.txt", "--output", "p.csv", "--on-error", "skip"]) == 0
    assert "skipped 1 bad rows" in capsys.readouterr().err
    assert len(Path("p.csv").read_text().splitlines()) == 2000  # a header and 1,999 predictions


def test_bad_files(run, log, capsys, tmp_path):
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(log.read_bytes())[:-5000])
    assert "empty" in fails(capsys, "train", "--data", "empty.txt")
    assert "cut.txt.gz" in fails(capsys, "train", "--data", "cut.txt.gz", "--format", "criteo")
    assert "nowhere.txt" in fails(capsys, "prepare", "nowhere.txt", "--cache", "c")
    assert "nowhere.txt" in fails(capsys, "predict", run, "nowhere.txt", "--output", "p.csv")
    assert not (tmp_path / "runs").exists()


def test_bad_arguments(run, cache, log, capsys, tmp_path):
    assert "already holds a run" in fails(capsys, "train", "--data", cache, "--run", run)
    assert "is finished" in fails(capsys, "train", "--resume", run)
    assert "not a run folder" in fails(capsys, "evaluate", tmp_path)
    assert "no --cross-layers" in fails(capsys, "train", "--data", cache, "--model", "lr", "--cross-layers", 2)
    assert "'C99' is not a categorical column" in fails(
        capsys, "train", "--data", cache, "--model", "wide_deep", "--cross", "C1,C99"
    )
    assert "must end in .csv or .npy; got p.txt" in fails(capsys, "predict", run, log, "--output", "p.txt")
    assert "must end in .pt2 or .onnx; got m.pt" in fails(capsys, "export", run, "--output", "m.pt")
    assert "'holdout'" in fails(capsys, "evaluate", run, "--part", "holdout")
    assert "device 'cuda:77'" in fails(capsys, "train", "--data", cache, "--run", "r1", "--device", "cuda:77")
    assert "lr must be positive" in fails(capsys, "train", "--data", cache, "--lr", -1)
    assert "xgboost" in fails(capsys, "compare", "--data", cache, "--models", "dcn,xgboost")
    assert "manifest.json" in fails(capsys, "info", tmp_path)


def test_training_that_fails_says_where(cache, capsys):
    message = fails(capsys, "train", "--data", cache, "--run", "r", "--lr", "1e30", *SMALL)
    assert "training stopped at step 2 (epoch 1, batch 2 of 13)" in message


def test_a_damaged_checkpoint(run, capsys, tmp_path):
    whole = (run / "best.safetensors").read_bytes()
    (tmp_path / "half.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "not a whole checkpoint" in fails(capsys, "evaluate", tmp_path / "half.safetensors")


def test_a_cache_that_changed_is_refused(log, capsys):
    base = ["prepare", str(log), "--cache", "c"]
    assert main(base) == 0
    assert main(["train", "--data", "c", "--run", "r", *SMALL]) == 0
    assert main([*base, "--min-frequency", "100"]) == 0
    assert "other data or with another configuration" in fails(capsys, "evaluate", "r")
    assert "other columns or vocabularies" in fails(capsys, "evaluate", "r", "--data", "c")


def test_debug_shows_the_traceback():
    with pytest.raises(ValueError, match="nowhere"):
        main(["prepare", "nowhere", "--cache", "c", "--debug"])
