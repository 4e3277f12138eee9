"""Labels: any two values, several names, and every way in which it is unclear what they mean."""

import gzip

import numpy as np
import pytest

pytest.importorskip("pyarrow")
import pyarrow as pa
import pyarrow.parquet as pq

from fastcross.data import DataError, prepare, read_for_prediction

N = 300


def write(path, labels):
    text = "y,x\n" + "".join(f"{label},{i / 7:.3f}\n" for i, label in enumerate(labels))
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def cycle(*labels):
    return [labels[i % len(labels)] for i in range(N)]


@pytest.mark.parametrize(
    ("labels", "classes", "ids"),
    [
        (cycle(0, 1), ("0", "1"), [0, 1]),
        (cycle(1, -1), ("-1", "1"), [1, 0]),
        (cycle("1.0", "0.0"), ("0", "1"), [1, 0]),
        (cycle(2, 1), ("1", "2"), [1, 0]),
        (cycle("yes", "no"), ("no", "yes"), [1, 0]),
        (cycle("Yes", "No", "YES", "no"), ("No", "YES"), [1, 0, 1, 0]),
        (cycle("TRUE", "FALSE"), ("FALSE", "TRUE"), [1, 0]),
        (cycle("t", "f"), ("f", "t"), [1, 0]),
        (cycle("good", "bad"), ("bad", "good"), [1, 0]),
        (cycle("c", "a", "b"), ("a", "b", "c"), [2, 0, 1]),
        (cycle(5, 10, 1), ("1", "5", "10"), [1, 2, 0]),
        (cycle(0.5, 1.5, 1), ("0.5", "1", "1.5"), [0, 2, 1]),
    ],
    ids=str,
)
@pytest.mark.parametrize("suffix", [".csv", ".csv.gz"])
def test_accepted_and_mapped(tmp_path, labels, classes, ids, suffix):
    path = write(tmp_path / f"t{suffix}", labels)
    cache = prepare(path, tmp_path / "c", split="time:1,0,0")
    assert cache.encoder.classes == classes
    assert cache.schema.num_outputs == (1 if len(classes) == 2 else len(classes))
    (batch,) = cache.batches("train", N)
    assert batch.label.tolist() == [ids[i % len(ids)] for i in range(N)]
    (again,) = read_for_prediction(path, cache, labelled=True)
    assert again.label.equal(batch.label)
    for i, name in enumerate(classes):
        assert f"{name} is {i} (" in cache.report


def test_booleans_of_parquet(tmp_path):
    pq.write_table(pa.table({"y": cycle(True, False), "x": np.arange(N) / 3}), tmp_path / "t.parquet")
    cache = prepare(tmp_path / "t.parquet", tmp_path / "c", split="time:1,0,0")
    assert cache.encoder.classes == ("false", "true")
    assert next(cache.batches("train", 4)).label.tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (cycle(0), r"the label \(column y\) is 0 in all 300 rows: there is nothing to tell apart"),
        (cycle("yes"), "is yes in all 300 rows"),
        (cycle("cat"), "is cat in all 300 rows"),
        (cycle(""), "has no value in any row"),
        (cycle("yes", 1, 0), r"has the values yes \(100 rows\), 1 \(100 rows\), 0 .*: numbers and words"),
        (cycle("Cat", "cat", "dog"), r"Cat \(100 rows\), cat \(100 rows\), dog .*capitals"),
        ([*cycle("a", "b")[:-1], "c"], r"a \(150 rows\), b \(149 rows\), c \(1 rows\): two classes and stray values"),
        ([f"w{i}" for i in range(N)], "300 different ones: a quantity, and no numbers"),
        ([*cycle(0, 1)[:-1], "oops"], r"t\.csv, line 301: the label \(column y\) must be 0 or 1; got oops"),
        ([*cycle(0, 1)[:-1], ""], r"t\.csv, line 301: the label \(column y\) must be 0 or 1; got nothing"),
        ([*cycle("no", "yes")[:-1], 7], r"t\.csv, line 301: .* must be no or yes; got 7"),
        ([0] * 260 + [1] * 40, r"is 0 in all 257 rows of the training part"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_refused(tmp_path, labels, message):
    with pytest.raises(DataError, match=message):
        prepare(write(tmp_path / "t.csv", labels), tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_classes_that_the_first_rows_do_not_show(tmp_path, monkeypatch):
    """A gzip file is sampled at its beginning; classes other than a known pair are then read from all of it."""
    monkeypatch.setattr("fastcross.data.formats.text.FIRST_BYTES", 500)
    labels = ["a"] * 150 + ["b"] * 100 + ["c"] * 50
    cache = prepare(write(tmp_path / "t.csv.gz", labels), tmp_path / "c", split="random:0.6,0.2,0.2")
    assert cache.encoder.classes == ("a", "b", "c")
    cache = prepare(write(tmp_path / "t.csv.gz", [0] * 150 + [1] * 150), tmp_path / "c", split="random:0.6,0.2,0.2")
    assert cache.encoder.classes == ("0", "1")


def test_declared_classes_win(tmp_path):
    path = write(tmp_path / "t.csv", cycle("good", "bad"))
    cache = prepare(path, tmp_path / "c", columns={"classes": ["good", "bad"]}, split="time:1,0,0")
    assert next(cache.batches("train", 2)).label.tolist() == [0, 1]


def test_a_part_with_one_class_is_warned_of(tmp_path):
    labels = cycle(0, 1)[:257] + [1] * 43
    report = prepare(write(tmp_path / "t.csv", labels), tmp_path / "c").report
    assert "warning: every row of the test part has the label 1: no AUC can be had from it" in report
