"""fastcross evaluate, predict and export as a user types them; what export writes serves alone."""

import csv
import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch

from fastcross.cli.main import main
from fastcross.data import Cache
from fastcross.training.run_folder import load_model
from tests.cli.helpers import BAD_ROWS, SMALL, edited, read
from tests.serving_tables import COLUMNS, run_alone, write_movies

ROOT = str(Path(__file__).resolve().parents[2])


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


def test_a_damaged_checkpoint(run, tmp_path, fails):
    whole = (run / "best.safetensors").read_bytes()
    (tmp_path / "half.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "not a whole checkpoint" in fails("evaluate", tmp_path / "half.safetensors")


def test_a_cache_that_changed_is_refused(log, fails):
    base = ["prepare", str(log), "--cache", "c"]
    assert main(base) == 0
    assert main(["train", "--data", "c", "--run", "r", *SMALL]) == 0
    assert main([*base, "--min-frequency", "100"]) == 0
    assert "other data or with another configuration" in fails("evaluate", "r")
    assert "made with another encoder (columns, vocabularies" in fails("evaluate", "r", "--data", "c")


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


def rows_of(path):
    """The rows of a prediction file, as a list of dicts; what is absent is None."""
    if path.endswith(".parquet"):
        return pyarrow.parquet.read_table(path).to_pylist()
    with open(path, newline="") as file:
        return [{name: value or None for name, value in row.items()} for row in csv.DictReader(file)]


def test_bad_rows_at_prediction(run, log, capsys, tmp_path, fails):
    (tmp_path / "bad.txt").write_bytes(edited(log, 17, BAD_ROWS["columns"][0]))
    assert "bad.txt, line 17" in fails("predict", run, "bad.txt", "--output", "p.csv")
    assert not (tmp_path / "p.csv").exists()
    assert main(["predict", str(run), "bad.txt", "--output", "p.csv", "--on-error", "skip"]) == 0
    captured = capsys.readouterr().err
    assert "skipped 1 bad rows" in captured
    assert "1,999 predictions" in captured
    assert len(rows_of("p.csv")) == 2000


@pytest.mark.parametrize("bad", [(1,), (17, 18, 900), (1999, 2000), (1, 2, 3, 1000, 2000)], ids=str)
def test_a_bad_row_keeps_its_place(run, log, bad, monkeypatch):
    """One row of output for each row of input, whatever batches and blocks of the file its neighbours are in."""
    monkeypatch.setattr("fastcross.data.formats.text.BLOCK_BYTES", 100_000)
    lines = log.read_bytes().splitlines(keepends=True)
    for number in bad:
        lines[number - 1] = b"what is this?\n"
    Path("bad.txt").write_bytes(b"".join(lines))
    assert main(["predict", str(run), str(log), "--output", "whole.npy"]) == 0
    for output in ("p.npy", "p.csv", "p.parquet"):
        command = ["predict", str(run), "bad.txt", "--output", output, "--on-error", "skip"]
        assert main(command if output.endswith(".npy") else [*command, "--id-column", "C3"]) == 0
    expected = np.load("whole.npy")
    expected[np.array(bad) - 1] = np.nan
    np.testing.assert_allclose(np.load("p.npy"), expected, rtol=1e-6)
    for output in ("p.csv", "p.parquet"):
        rows = rows_of(output)
        assert [int(row["row"]) for row in rows] == list(range(1, 2001))
        assert [number for number, row in enumerate(rows, 1) if row["probability"] is None] == list(bad)
        found = [float(row["probability"] or "nan") for row in rows]
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        ids = [line.decode().split("\t")[16] if len(line) > 20 else None for line in lines]
        assert [row["C3"] for row in rows] == ids


@pytest.fixture(scope="module", params=["yes or no", "three classes"])
def fruit(request, tmp_path_factory):
    """A run on a CSV file with named classes, and that file; its rows are numbered."""
    folder = tmp_path_factory.mktemp("fruit")
    classes = ("no", "yes") if request.param == "yes or no" else ("apple", "pear", "sloe, dried")
    with open(folder / "fruit.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("number", "colour", "weight", "ripe"))
        for i in range(600):
            label = classes[i % len(classes)]
            writer.writerow((f"n{i}", f"colour {i % 7}", (i % len(classes)) * 10 + i % 3, label))
    options = ["--label", "ripe", "--drop", "number", "--split", "random", "--lr", "0.05", "--epochs", "10"]
    command = ["train", "--data", str(folder / "fruit.csv"), "--cache", str(folder / "cache"), *SMALL, *options]
    assert main([*command, "--batch-size", "32", "--run", str(folder / "run")]) == 0
    return folder / "run", folder / "fruit.csv", classes


def test_predictions_carry_the_names_of_the_classes_and_an_id(fruit, capsys):
    run, data, classes = fruit
    for output in ("p.csv", "p.parquet"):
        assert main(["predict", str(run), str(data), "--output", output, "--id-column", "number"]) == 0
        named = "the class yes" if len(classes) == 2 else f"the classes {', '.join(classes)}"
        assert f"600 predictions, the probability of {named}: {output}" in capsys.readouterr().err
        rows = rows_of(output)
        shown = classes[1:] if len(classes) == 2 else classes
        assert list(rows[0]) == ["row", "number", *(f"probability_{name}" for name in shown), "class"]
        assert [row["number"] for row in rows] == [f"n{i}" for i in range(600)]
        # The weight tells the classes apart, so the likeliest one is the right one.
        assert [row["class"] for row in rows] == [classes[i % len(classes)] for i in range(600)]
    assert main(["predict", str(run), str(data), "--output", "p.npy"]) == 0
    assert np.load("p.npy").shape == ((600,) if len(classes) == 2 else (600, 3))


def test_the_id_column_is_checked(fruit, fails):
    run, data, _ = fruit
    message = fails("predict", run, data, "--output", "p.csv", "--id-column", "nobody")
    assert "no column nobody; the columns are number, colour, weight, ripe" in message


def test_the_id_of_a_parquet_file_keeps_its_type(tmp_path):
    number = pa.array(range(300), pa.int64())
    table = pa.table({"row": number, "colour": [f"{i % 7}" for i in range(300)], "label": [i % 2 for i in range(300)]})
    pyarrow.parquet.write_table(table, "t.parquet")
    assert main(["train", "--data", "t.parquet", "--drop", "row", "--split", "random", "--run", "r", *SMALL]) == 0
    assert main(["predict", "r", "t.parquet", "--output", "p.parquet", "--id-column", "row"]) == 0
    found = pyarrow.parquet.read_table("p.parquet")
    assert found.column_names == ["row_number", "row", "probability"]
    assert found["row"].combine_chunks() == number


@pytest.mark.parametrize("link", ["itself", "symbolic link", "hard link"])
def test_the_output_does_not_overwrite_the_input(fruit, fails, link):
    run, original, _ = fruit
    shutil.copy(original, "fruit.csv")
    output = {"itself": "./fruit.csv", "symbolic link": "s.csv", "hard link": "h.csv"}[link]
    os.symlink("fruit.csv", "s.csv")
    os.link("fruit.csv", "h.csv")
    message = fails("predict", run, "fruit.csv", "--output", output)
    assert "would overwrite fruit.csv, which is read" in message
    assert "would overwrite fruit.csv" in fails("predict", run, "fru*.csv", "--output", output)
    assert Path("fruit.csv").read_bytes() == original.read_bytes()


def test_the_output_does_not_overwrite_the_run(run, log, fails):
    config = (run / "config.json").read_bytes()
    assert "would overwrite" in fails("evaluate", run, "--output", run / "config.json")
    assert "would overwrite" in fails("predict", run, log, "--output", run / "metrics.csv")
    assert (run / "config.json").read_bytes() == config


def test_an_output_that_cannot_be_written_is_an_error_before_the_work(run, log, fails, monkeypatch, tmp_path):
    monkeypatch.setattr("fastcross.cli.predict.load_model", lambda *_: pytest.fail("the model was read"))
    (tmp_path / "folder.csv").mkdir()
    assert "there is no folder nowhere to write p.csv to" in fails("predict", run, log, "--output", "nowhere/p.csv")
    assert "there is no folder nowhere" in fails("evaluate", run, "--output", "nowhere/m.json")
    assert "there is no folder nowhere" in fails("export", run, "--output", "nowhere/m.onnx")
    assert "folder.csv is a folder" in fails("predict", run, log, "--output", "folder.csv")
    assert "must end in .json; got m.csv" in fails("evaluate", run, "--output", "m.csv")


def test_a_file_that_breaks_off_says_so_and_returns_1(run, log, capsys, tmp_path, fails):
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(log.read_bytes())[:-5000])
    assert "cut.txt.gz, line" in fails("predict", run, "cut.txt.gz", "--output", "p.csv")
    assert not (tmp_path / "p.csv").exists()
    capsys.readouterr()
    assert main(["predict", str(run), "cut.txt.gz", "--output", "p.csv", "--on-error", "skip"]) == 1
    captured = capsys.readouterr().err
    whole = len(rows_of("p.csv"))
    assert 1000 < whole < 2000
    assert f"warning: cut.txt.gz, line {whole + 1}: the gzip stream is damaged or ends early" in captured
    assert "all from here on is lost" in captured
    assert main(["evaluate", str(run), "--data", "cut.txt.gz", "--on-error", "skip"]) == 1
    assert main(["prepare", "cut.txt.gz", "--cache", "c", "--on-error", "skip"]) == 1


@pytest.mark.parametrize("output", ["p.csv", "p.parquet", "p.npy", "cache"])
def test_a_disk_that_is_full(run, log, output, tmp_path):
    """As a limit on the size of a file shows it: one line that names the file, and nothing left."""
    limit = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
    command = ["predict", str(run), str(log), "--output", output]
    if output == "cache":
        command = ["prepare", str(log), "--cache", output]
    script = f"{limit}\nfrom fastcross.cli.main import main\nsys.exit(main({command}))"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert process.returncode == 2
    assert process.stderr.strip() == f"fastcross {command[0]}: {output}: cannot be written: File too large"
    assert list(tmp_path.iterdir()) == []


def test_export_predicts_the_same(run, cache):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    assert main(["export", str(run), "--output", "model.onnx", "--encoded"]) == 0
    batch = next(Cache.open(cache).batches("test", 5))
    expected = load_model(run).model(batch.dense, batch.categorical).detach()
    session = onnxruntime.InferenceSession("model.onnx")
    inputs = {"dense": batch.dense.numpy(), "categorical": batch.categorical.numpy()}
    (found,) = session.run(None, inputs)
    torch.testing.assert_close(torch.as_tensor(found), expected, rtol=1e-4, atol=1e-5)


def test_export_names_every_input(capsys):
    """Multi-valued columns come as two inputs each; what is printed is what the file asks for."""
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    rows = []
    for i in range(400):
        tags = "abc"[: i % 4]
        weights = "|".join(str(j + 0.5) for j in range(len(tags)))
        rows.append(f"{i % 2},{i % 7}.5,{'|'.join('abcd'[: i % 5])},{'xyz'[i % 3]},{'|'.join(tags)},{weights}")
    Path("log.csv").write_text("\n".join(["label,price,genres,shop,tags,weight", *rows]) + "\n")
    columns = {"label": "label", "dense": ["price"], "categorical": ["shop"], "bags": ["genres", "tags"]}
    columns["weights"] = {"tags": "weight"}
    Path("columns.json").write_text(json.dumps(columns))
    assert main(["prepare", "log.csv", "--columns", "columns.json", "--cache", "cache"]) == 0
    assert main(["train", "--data", "cache", "--run", "run", *SMALL]) == 0
    capsys.readouterr()
    assert main(["export", "run", "--output", "model.onnx", "--encoded"]) == 0
    printed = capsys.readouterr().err
    session = onnxruntime.InferenceSession("model.onnx")
    for entry in session.get_inputs():
        assert f"  {entry.name} " in printed
    assert "the ids of genres" in printed
    assert "the weights of tags's ids" in printed
    batch = next(Cache.open("cache").batches("test", 20))
    inputs = {"dense": batch.dense, "categorical": batch.categorical}
    inputs |= {"bags_0_0": batch.bags[0].values, "bags_0_1": batch.bags[0].offsets}
    inputs |= {"bags_1_0": batch.bags[1].values, "bags_1_1": batch.bags[1].offsets, "bags_1_2": batch.bags[1].weights}
    (found,) = session.run(None, {name: value.numpy() for name, value in inputs.items()})
    expected = load_model("run").model(batch.dense, batch.categorical, batch.bags).detach()
    torch.testing.assert_close(torch.as_tensor(found), expected, rtol=1e-5, atol=1e-6)


SERVER = ("onnxruntime", "numpy")


@pytest.fixture(scope="module")
def movies(tmp_path_factory):
    """A run on ratings of three classes, and rows with ids that it has not seen."""
    folder = tmp_path_factory.mktemp("movies")
    write_movies(folder / "ratings.csv", 2500)
    write_movies(folder / "new.csv", 700, seed=1, new=15)
    (folder / "columns.json").write_text(json.dumps(COLUMNS))
    data = ["--data", folder / "ratings.csv", "--columns", folder / "columns.json", "--cache", folder / "cache"]
    assert main([str(part) for part in ("train", *data, "--run", folder / "run", *SMALL, "--lr", "0.05")]) == 0
    return folder


def served_and_predicted(run, rows, headed):
    """Probabilities of the ONNX file in a process of its own, and those of the command."""
    assert main(["export", str(run), "--output", "model.onnx"]) == 0
    served = run_alone(SERVER, "serve_onnx.py", Path("model.onnx").resolve(), headed)
    assert main(["predict", str(run), str(rows), "--output", "predictions.npy"]) == 0
    return np.array([line.split() for line in served.splitlines()], float).squeeze(), np.load("predictions.npy")


def test_click_log(run, log, tmp_path):
    """Criteo's format, with gaps in every column and categories that training has not seen."""
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    lines = [line.split("\t") for line in log.read_text().splitlines()[:600]]
    for i, values in enumerate(lines):
        values[1 + i % 39] = ""
        values[14 + i % 26] = f"new{i}"
    text = "\n".join("\t".join(values) for values in lines) + "\n"
    (tmp_path / "new.txt").write_text(text)
    header = "\t".join(["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))])
    (tmp_path / "headed.tsv").write_text(f"{header}\n{text}")
    served, predicted = served_and_predicted(run, tmp_path / "new.txt", tmp_path / "headed.tsv")
    assert served.shape == (600,)
    assert served.std() > 0.01
    np.testing.assert_allclose(served, predicted, rtol=0, atol=1e-6)


def test_ratings(movies, capsys):
    """Bags, weights, date-times, gaps, users never seen, three classes; and what export says of it."""
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    served, predicted = served_and_predicted(movies / "run", movies / "new.csv", movies / "new.csv")
    assert served.shape == (700, 3)
    assert served.std(axis=0).min() > 0.01
    np.testing.assert_allclose(served, predicted, rtol=0, atol=1e-6)
    printed = capsys.readouterr().err
    session = onnxruntime.InferenceSession("model.onnx")
    for entry in session.get_inputs():
        assert f"\n  {entry.name} " in printed
        assert entry.shape == ["batch"]
    assert [entry.name for entry in session.get_outputs()] == ["probability"]
    assert "values with '|' between them" in printed
    assert "the weights of tags, with ' ' between them" in printed
    assert "of the classes 0, 1, 2" in printed
    stored = session.get_modelmeta().custom_metadata_map
    assert json.loads(stored["fastcross.classes"]) == ["0", "1", "2"]
    config = json.loads((movies / "run" / "config.json").read_text())
    assert stored["fastcross.encoder"] == config["encoder"]
    assert stored["fastcross.version"] == config["fastcross"]
    assert {"input": "probability_in", "column": "probability", "kind": "categorical", "type": "string"} in json.loads(
        stored["fastcross.columns"]
    )


def test_what_onnx_cannot_say_is_refused(log, tmp_path, fails):
    pytest.importorskip("onnxscript")
    data = ["--data", str(log), "--hash-buckets", "50", "--cache", "hashed"]
    assert main(["train", *data, "--run", "hashed-run", *SMALL]) == 0
    told = fails("export", "hashed-run", "--output", "model.onnx")
    assert "column C1 is hashed into 50 buckets, and ONNX has no such operator; --encoded exports" in told
    assert not Path("model.onnx").exists()
    assert "--encoded has no effect on a .pt2 file" in fails("export", "hashed-run", "--output", "m.pt2", "--encoded")
    Path("model.encoder").mkdir()
    Path("model.encoder/notes.txt").write_text("mine")
    assert "model.encoder is there and is no encoder" in fails(
        "export", "hashed-run", "--output", "model.onnx", "--encoded"
    )
    assert Path("model.encoder/notes.txt").read_text() == "mine"
    Path("model.encoder/notes.txt").unlink()
    Path("model.encoder").rmdir()
    assert main(["export", "hashed-run", "--output", "model.onnx", "--encoded"]) == 0
    assert sorted(path.name for path in Path("model.encoder").iterdir()) == ["encoder.json"]


def test_sigterm_leaves_no_temporary_file(run, log, tmp_path):
    script = f"""
import signal, sys
from fastcross.cli import main, predict
predict._CsvFile.write = lambda *args: signal.raise_signal(signal.SIGTERM)
sys.exit(main.main(["predict", {str(run)!r}, {str(log)!r}, "--output", "p.csv"]))
"""
    assert subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": ROOT}).returncode == 143
    assert list(tmp_path.iterdir()) == []
