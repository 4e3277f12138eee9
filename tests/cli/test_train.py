"""fastcross prepare and train: what they say and leave, bad rows by file and line, every kind of label."""

import csv
import gzip
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from fastcross.cli.main import main
from fastcross.data import Cache
from fastcross.training.run_folder import load_model
from tests.cli.helpers import BAD_ROWS, SMALL, edited, read


def test_prepare_says_what_it_made(log, capsys):
    assert main(["prepare", str(log), "--cache", "made", "--split", "random:0.5,0.25,0.25"]) == 0
    printed = capsys.readouterr().out
    assert (
        "split at random: 0.5 train, 0.25 validation, 0.25 test; rows: train 1,000, validation 500, test 500" in printed
    )
    assert re.search(r"dense columns \(\d\d\): I1, .*, I13, I\d+\.missing", printed)
    assert "C26" in printed


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_bad_rows_name_file_and_line_or_are_skipped_and_counted(log, capsys, tmp_path, kind, fails):
    edit, expected = BAD_ROWS[kind]
    (tmp_path / "bad.txt").write_bytes(edited(log, 17, edit))
    message = fails("prepare", "bad.txt", "--format", "criteo", "--cache", "c")
    assert "bad.txt, line 17" in message
    assert expected.lower() in message.lower()
    assert not (tmp_path / "c").exists()
    assert main(["prepare", "bad.txt", "--format", "criteo", "--cache", "c", "--on-error", "skip"]) == 0
    captured = capsys.readouterr()
    assert "skipped 1 bad rows" in captured.err
    assert "line 17" in captured.err


def test_bad_files(run, log, tmp_path, fails):
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(log.read_bytes())[:-5000])
    assert "empty" in fails("train", "--data", "empty.txt")
    assert "cut.txt.gz" in fails("train", "--data", "cut.txt.gz", "--format", "criteo")
    assert "nowhere.txt" in fails("prepare", "nowhere.txt", "--cache", "c")
    assert "nowhere.txt" in fails("predict", run, "nowhere.txt", "--output", "p.csv")
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def films():
    """Ids that are numbers, several genres in one cell, a label in words, rows that are not in the order of time."""
    with open("films.csv", "w") as file:
        file.write("number,user_id,genres,length,seen,liked\n")
        for i in range(2000):
            genres = "|".join(("comedy", "crime", "western")[: 1 + i % 3])
            file.write(f"{i},{1000 + i * 7 % 97},{genres},{90 + i % 50}.5,{(i * 37) % 2000},{('no', 'yes')[i % 2]}\n")
    return "films.csv"


def test_what_was_inferred_is_printed_with_reasons(films, capsys):
    """At every prepare and every train, also where the cache is there already."""
    assert main(["prepare", films, "--cache", "c", "--label", "liked"]) == 0
    printed = capsys.readouterr().out
    reasons = {line.split()[0]: line.split()[1] for line in printed.splitlines() if line.startswith("  ")}
    assert reasons["user_id"] == "categorical"
    assert reasons["genres"] == "multi-valued"
    assert reasons["length"] == "dense"
    assert "label liked: no is 0 (1,000 rows), yes is 1 (1,000 rows)" in printed
    assert "split by time: the first 0.8571 of the rows train" in printed
    for data in ("c", films):
        options = [] if data == "c" else ["--label", "liked", "--cache", "c"]
        for run in ("first", "second"):
            assert main(["train", "--data", data, *options, "--run", f"{data}-{run}", *SMALL]) == 0
            errors = capsys.readouterr().err
            assert "genres multi-valued several values with | between them" in " ".join(errors.split())
            assert "label liked: no is 0" in errors
            assert "split by time" in errors


def test_options_say_what_columns_are(films, capsys):
    options = ["--label", "liked", "--dense", "user_id", "--categorical", "length,genres", "--drop", "number"]
    assert main(["prepare", films, "--cache", "c", *options, "--time-column", "seen"]) == 0
    printed = capsys.readouterr().out
    kinds = {line.split()[0]: line.split(maxsplit=2)[1:] for line in printed.splitlines() if line.startswith("  ")}
    assert kinds["user_id"] == ["dense", "declared; standardised, 1000 … 1096"]
    assert kinds["genres"][0] == kinds["length"][0] == "categorical"
    assert kinds["number"] == ["dropped", "declared"]
    assert "by column seen" in printed
    assert main(["prepare", films, "--cache", "d", "--label", "liked", "--multi", "genres:e"]) == 0
    assert "genres" in capsys.readouterr().out
    assert Cache.open("d").encoder.columns.separators == {"genres": "e"}


def test_columns_that_cannot_be_meant(films, fails):
    message = fails("prepare", films, "--cache", "c", "--label", "liked", "--dense", "weight")
    assert "no column weight; the columns are number, user_id, genres, length, seen, liked" in message
    assert "declared twice: user_id" in fails(
        "prepare", films, "--cache", "c", "--dense", "user_id", "--drop", "user_id"
    )
    assert "name the label column; the columns are" in fails("prepare", films, "--cache", "c")
    assert "expected a column and its separator" in fails("prepare", films, "--cache", "c", "--multi", ":|")
    options = ("--label", "liked", "--split", "random", "--time-column", "seen")
    assert "time_column" in fails("prepare", films, "--cache", "c", *options)
    assert not Path("c").exists()


@pytest.mark.parametrize("text", ["[1]", "{", "3", '"label"', '{"dense": 5}', '{"dens": ["a"]}', '{"label": ["x"]}'])
def test_a_file_of_columns_that_is_none(films, fails, text):
    Path("columns.json").write_text(text)
    message = fails("prepare", films, "--cache", "c", "--columns", "columns.json")
    assert "defect" not in message
    assert any(word in message for word in ("columns.json", "must be", "unknown key"))
    both = fails("prepare", films, "--cache", "c", "--columns", "columns.json", "--dense", "user_id")
    assert "in the file of --columns or by --dense, not both" in both


def test_files_that_are_not_what_their_name_says(fails, tmp_path):
    (tmp_path / "random.parquet").write_bytes(np.random.default_rng(0).bytes(20_000))
    (tmp_path / "half.parquet").write_bytes(b"PAR1" + bytes(1000))
    for name in ("random.parquet", "half.parquet"):
        for command in (["prepare", name, "--cache", "c"], ["train", "--data", name, "--format", "parquet"]):
            message = fails(*command)
            assert name in message
            assert "defect" not in message
    assert not (tmp_path / "runs").exists()


def test_labels_of_one_class(fails, tmp_path):
    (tmp_path / "same.csv").write_text("a,label\n" + "1,0\n2,0\n" * 500)
    message = fails("train", "--data", "same.csv")
    assert "the label (column label) is 0 in all 1,000 rows" in message
    assert not (tmp_path / "runs").exists()


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


def test_training_that_fails_says_where(cache, fails):
    message = fails("train", "--data", cache, "--run", "r", "--lr", "1e30", *SMALL)
    assert "training stopped at step 2 (epoch 1, batch 2 of 13)" in message


ROWS = 600


@pytest.fixture
def table(tmp_path):
    generator = np.random.default_rng(0)
    x, user = generator.normal(size=ROWS), generator.integers(0, 9, ROWS)
    price, click = 5000 + 900 * x, (x > 0).astype(int)
    weight = generator.integers(0, 3, ROWS)
    rows = zip(x, user, price, click, weight, strict=True)
    lines = "".join(f"{a:.4f},u{b},{c:.2f},{d},{e}\n" for a, b, c, d, e in rows)
    path = tmp_path / "t.csv"
    path.write_text("x,user,price,click,w\n" + lines)
    return path


def test_regression_from_a_file_to_predictions_and_an_export(table, capsys, tmp_path):
    arguments = ["train", "--data", str(table), "--label", "price", "--drop", "click,w", "--run", "run", *SMALL]
    assert main([*arguments, "--lr", "0.03", "--epochs", "20", "--monitor", "mae"]) == 0
    said = capsys.readouterr()
    assert "label price: a quantity (regression), mean 49" in said.err
    assert "validation rmse" in said.err
    assert "test: rmse " in said.out
    result = read("run/result.json")
    assert result["test"]["r2"] > 0.5
    assert main(["evaluate", "run", "--output", "metrics.json"]) == 0
    assert read("metrics.json")["test"] == pytest.approx(result["test"], rel=1e-6)
    assert main(["evaluate", "run", "--data", str(table)]) == 0
    assert main(["predict", "run", str(table), "--output", "out.csv"]) == 0
    with open("out.csv") as file:
        rows = list(csv.DictReader(file))
    predicted = np.array([float(row["prediction"]) for row in rows])
    assert list(rows[0]) == ["row", "prediction"]
    assert abs(predicted.mean() - 5000) < 500
    assert main(["predict", "run", str(table), "--output", "out.npy"]) == 0
    np.testing.assert_allclose(np.load("out.npy"), predicted, rtol=1e-8)
    assert main(["info", "run"]) == 0

    onnxruntime = pytest.importorskip("onnxruntime")
    assert main(["export", "run", "--output", "model.onnx"]) == 0
    session = onnxruntime.InferenceSession("model.onnx")
    with open(table) as file:
        columns = list(csv.DictReader(file))
    inputs = {}
    for port in session.get_inputs():
        values = [row[port.name] for row in columns]
        inputs[port.name] = np.array(values if "string" in port.type else [float(v) for v in values])
    (served,) = session.run(["prediction"], inputs)
    np.testing.assert_allclose(served, predicted, rtol=1e-5)


def test_weights_groups_and_the_monitored_metric(table, capsys):
    arguments = ["--data", str(table), "--label", "click", "--drop", "price", "--weight", "w", "--group", "user"]
    assert main(["train", *arguments, "--monitor", "gauc", "--positive-weight", "2", "--run", "run", *SMALL]) == 0
    said = capsys.readouterr()
    assert "weight w: mean" in said.err
    assert "validation gauc" in said.err
    assert "gauc" in read("run/result.json")["validation"]
    assert read("run/config.json")["training"]["monitor"] == "gauc"


def test_what_cannot_be_is_one_line_and_no_run(table, fails, tmp_path):
    data = ["--data", table, "--label", "click", "--run", "run", *SMALL]
    assert "there is no rmse to monitor: a binary label has logloss, auc, accuracy, ece" in fails(
        "train", *data, "--monitor", "rmse"
    )
    assert "monitor must be one of" in fails("train", *data, "--monitor", "loss")
    assert "no column nobody" in fails("train", *data, "--weight", "nobody")
    assert "gauc takes a column of groups (--group)" in fails("train", *data, "--monitor", "gauc")
    message = fails("train", *data, "--task", "regression", "--positive-weight", "2")
    assert "positive_weight is for a label of two classes; the task of" in message
    assert "--task, --weight have no effect on the generated log" in fails(
        "train", "--weight", "w", "--task", "regression", "--run", "run"
    )
    assert not (tmp_path / "run").exists()


def test_compare_ranks_by_rmse(table, capsys):
    arguments = ["compare", "--data", str(table), "--label", "price", "--models", "lr,dnn", "--output", "out"]
    assert main([*arguments, *SMALL]) == 0
    assert "| model | rmse" in capsys.readouterr().out
