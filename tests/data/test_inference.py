"""What columns are taken for, and why it is said; labels: any two values, several names, and what is unclear."""

import datetime
import gzip
import re

import numpy as np
import pytest

pytest.importorskip("pyarrow")
import pyarrow as pa
import pyarrow.parquet as pq

from fastcross.data import Columns, DataError, prepare, read_for_prediction
from fastcross.data.inference import is_id_name, judge, look_like_ids

N = 3000


def kind_of(values, name="column"):
    return judge(name, pa.chunked_array([pa.array(values)])).name


def write(path, columns, rows=N):
    """A CSV of {name: function of the row's number}, with a label that alternates."""
    with open(path, "w") as file:
        file.write(",".join(["label", *columns]) + "\n")
        for i in range(rows):
            file.write(",".join([str(i % 2), *(str(make(i)) for make in columns.values())]) + "\n")
    return path


def popular_ids(rows, distinct, seed=0):
    """Ids with Zipf's popularities, in no order."""
    rng = np.random.default_rng(seed)
    popularity = 1 / np.arange(1, distinct + 1)
    names = rng.choice(10 * distinct, distinct, replace=False) + 1
    return names[rng.choice(distinct, rows, p=popularity / popularity.sum())]


RNG = np.random.default_rng(0)
KINDS = {
    "ids": (popular_ids(N, 100), "categorical"),
    "few integers": (np.arange(N) % 7, "dense"),
    "two integers": (np.arange(N) % 2, "categorical"),
    "ages": (RNG.normal(45, 12, N).astype(int), "dense"),
    "counts": (np.floor(np.exp(RNG.normal(1, 1.3, N))).astype(int), "dense"),
    "steps of five": (5 * RNG.poisson(20, N), "dense"),
    "seconds": (RNG.integers(10**9, 2 * 10**9, N), "dense"),
    "numbers of rows": (np.arange(N) + 17, "drop"),
    "ids as floats, with gaps": (np.where(np.arange(N) % 9, popular_ids(N, 60), np.nan), "categorical"),
    "numbers with gaps": (np.where(np.arange(N) % 9, RNG.normal(size=N), np.nan), "dense"),
    "zip codes": ([f"{i % 300:05d}" for i in range(N)], "categorical"),
    "beyond 64 bits": ([str(10**25 + i % 90) for i in range(N)], "categorical"),
    "words": (["abc"[i % 3] for i in range(N)], "categorical"),
    "numbers as text": ([f"{x:.3f}" for x in RNG.normal(size=N)], "dense"),
    "exponents": (["1e-3", "2E5", "-.5", "7."] * 100, "dense"),
    "booleans": ([i % 3 == 0 for i in range(N)], "categorical"),
    "genres": (["Drama|War" if i % 5 else "Comedy" for i in range(N)], "bags"),
    "lists with commas": ([",".join(sorted({"pqrstuvw"[i * k % 8] for k in (1, 3, 5)} | {"x"} - {"pqr"[i % 3]}))
                           for i in range(N)], "categorical"),
    "names with commas": ([f"City {i % 50}, Land {i % 50}" for i in range(N)], "categorical"),
    "one text per row": ([f"text {i}" for i in range(N)], "drop"),
    "lists": ([[i % 4, i % 3] for i in range(N)], "bags"),
    "date-times": ([datetime.datetime(2024, 1, 1) + datetime.timedelta(minutes=i) for i in range(N)], "datetimes"),
    "dates": ([datetime.date(2024, 1, 1) + datetime.timedelta(days=i % 99) for i in range(N)], "datetimes"),
    "date-times as text": ([f"2024-02-{i % 28 + 1:02d} {i % 24:02d}:30:00" for i in range(N)], "datetimes"),
    "Unix times by another name": (RNG.integers(10**9, 2 * 10**9, N), "dense"),
    "nothing": ([None] * N, "drop"),
    "structs": ([{"a": i} for i in range(N)], ""),
    "lists of structs": ([[{"a": i}] for i in range(N)], ""),
    "durations": ([datetime.timedelta(seconds=i) for i in range(N)], "dense"),
    "bytes": ([b"\xff\xfe"] * N, ""),
}  # fmt: skip


@pytest.mark.parametrize("what", KINDS)
def test_kinds(what):
    values, expected = KINDS[what]
    assert kind_of(values) == expected


def test_lists_with_commas_need_far_fewer_parts_than_wholes():
    rng = np.random.default_rng(1)
    lists = [",".join(sorted(rng.choice(list("abcdefgh"), rng.integers(1, 4), replace=False))) for _ in range(N)]
    assert judge("tags", pa.chunked_array([pa.array(lists)])).separator == ","
    assert kind_of(lists) == "bags"


def test_ids_by_name():
    values = np.random.default_rng(0).permutation(np.repeat(np.arange(1000), 3))  # uniform: no telling from numbers
    assert kind_of(values, "price") == "dense"
    for name in ("user_id", "movieId", "ITEM_ID", "uid", "zip", "userid", "product code"):
        assert kind_of(values, name) == "categorical", name
    for name in ("paid", "humidity", "idle", "width", "bid", "grid"):
        assert not is_id_name(name), name
    assert kind_of(np.random.default_rng(1).permutation(50_000), "user_id") == "drop", "every row has its own"


def test_unix_times():
    """As a number every later row would lie outside what was trained on: MovieLens-1M in the order of time, AUC 0.70
    instead of 0.75."""
    seconds = np.random.default_rng(0).integers(10**9, 2 * 10**9, N)
    for unit in (1, 1000, 10**6, 10**9):
        assert kind_of(seconds * unit, "timestamp") == "drop"
    assert kind_of(seconds + 0.25, "created_at") == "drop"
    assert kind_of([str(second) for second in seconds], "eventTime") == "drop"
    assert kind_of(seconds % 1000, "time") == "dense"


def test_quantities_and_ids_by_their_frequencies():
    rng = np.random.default_rng(2)
    distances = np.hypot(*rng.integers(0, 60, (2, 10**5))).astype(int)  # on a grid, where some are more frequent
    zeros = rng.geometric(0.05, 10**5) * (rng.random(10**5) < 0.1)
    for values in (rng.poisson(30, 10**5), zeros, rng.integers(0, 360, 10**5), rng.integers(0, 360, 4000), distances):
        assert look_like_ids(*np.unique(values, return_counts=True)) is False
    for seed in range(6):  # distances whose frequencies are few, and vary by the sample
        grid = np.random.default_rng(seed).exponential(30, (2, 30_000)).astype(int)
        found = np.unique((30 * np.hypot(*grid)).astype(int), return_counts=True)
        assert look_like_ids(*found) is False
    popularity = np.exp(rng.normal(0, 0.6, 1000))  # mild differences
    mild = rng.choice(1000, 10**5, p=popularity / popularity.sum())
    for values in (popular_ids(10**5, 2000), popular_ids(3000, 50), mild):
        assert look_like_ids(*np.unique(values, return_counts=True)) is True
    assert look_like_ids(*np.unique(rng.integers(0, 10**6, 10**5), return_counts=True)) is None


def test_one_value_does_not_make_a_number_a_category(tmp_path):
    """0.1 took the whole column for categories, silently; now the row is bad, and the message says why."""
    path = write(tmp_path / "t.csv", {"x": lambda i: "oops" if i == 1500 else i / 7, "z": lambda i: i % 5})
    with pytest.raises(DataError, match=r"line 1502: column x must be a number; got 'oops' \(1 of 3,000 values") as bad:
        prepare(path, tmp_path / "c")
    assert "declare the column to be categorical" in str(bad.value)
    cache = prepare(path, tmp_path / "c", on_error="skip")
    assert cache.schema.dense_names == ("x", "z")
    assert sum(cache.sizes.values()) == N - 1
    assert (
        "warning: column x (dense): 1 of 3,000 values are no numbers, such as 'oops', first in line 1502"
        in cache.report
    )
    declared = prepare(path, tmp_path / "c", columns=Columns.declare(categorical=["x"]), min_frequency=1)
    assert declared.schema.categorical_names == ("x", "z.level")


def test_warnings_where_values_are_mixed_or_foreign(tmp_path):
    columns = {"a": lambda i: "none at all" if i % 20 == 0 else i / 3, "b": lambda i: f'"1,{i % 900 + 100}"'}
    report = prepare(write(tmp_path / "t.csv", columns), tmp_path / "c").report
    assert "warning: column a (categorical): 150 of 3,000 values are no numbers, such as 'none at all'" in report
    assert "b  dense        numbers written with a unit or commas between thousands" in report


def test_the_sample_is_from_all_over_the_file(tmp_path, monkeypatch):
    """A log sorted by user: the first rows alone show few users, and one kind of value."""
    monkeypatch.setattr("fastcross.data.formats.text.FIRST_BYTES", 2000)
    monkeypatch.setattr("fastcross.data.formats.text.PIECE_BYTES", 2000)
    path = write(tmp_path / "t.csv", {"x": lambda i: i % 9 if i < 600 else i + 0.25, "z": lambda i: i % 5})
    cache = prepare(path, tmp_path / "c")
    assert cache.schema.dense_names == ("x", "z"), "the beginning alone has few integers"
    assert re.search(r"columns, by [\d,]+ rows from all over t\.csv:", cache.report)
    path = write(tmp_path / "t.csv", {"x": lambda i: i + 0.5 if i < 2900 else "word", "z": lambda i: i % 5})
    cache = prepare(path, tmp_path / "c")
    assert cache.schema.categorical_names == ("x", "z.level")
    assert "first in line 2902" in cache.report


def test_date_times_become_hour_and_weekday(tmp_path):
    first = datetime.datetime(2024, 1, 1)  # a Monday
    moments = [first + datetime.timedelta(hours=i) for i in range(N)]
    table = pa.table({"label": [i % 2 for i in range(N)], "at": moments})
    pq.write_table(table, tmp_path / "t.parquet")
    pq.write_table(
        table.set_column(1, "at", table["at"].cast(pa.timestamp("ns", "Asia/Tokyo"))), tmp_path / "z.parquet"
    )
    texts = {"at": lambda i: moments[i].isoformat(), "zoned": lambda i: f"{moments[i].isoformat()}Z"}
    texts["unix_time"] = lambda i: f" {moments[i].replace(tzinfo=datetime.UTC).timestamp() * 1000:.0f}"
    write(tmp_path / "t.csv", texts)
    for name in ("t.parquet", "z.parquet", "t.csv"):
        columns = Columns.declare(datetimes=["unix_time"]) if name == "t.csv" else None
        cache = prepare(tmp_path / name, tmp_path / "c", split="time:1,0,0", min_frequency=1, columns=columns)
        assert "at.hour" in cache.schema.categorical_names
        assert cache.schema.cardinalities[:2] == (25, 8)
        ids = next(cache.batches("train", N)).categorical.numpy()
        hours = {(int(h), i % 24) for i, h in enumerate(ids[:, 0])}
        days = {(int(d), i // 24 % 7) for i, d in enumerate(ids[:, 1])}
        assert (len(hours), len(days)) == (24, 7), "one id for each hour of the day and each day of the week"
        (again,) = read_for_prediction(tmp_path / name, cache)
        assert again.categorical[:, :2].numpy().tolist() == ids[:, :2].tolist()
    assert (ids[:, 3:6] == ids[:, :3]).all()
    assert (ids[:, 6:] == ids[:, :3]).all()


def test_declared_and_inferred_together(tmp_path):
    columns = {
        "user": lambda i: i % 900,
        "x": lambda i: i / 3,
        "g": lambda i: "a;b" if i % 3 else "c",
        "n": lambda i: i,
    }
    path = write(tmp_path / "t.csv", columns)
    declared = Columns.declare("label", categorical=["user"], dense=["n"], multi={"g": ";"}, drop=["x"])
    schema = prepare(path, tmp_path / "c", columns=declared, min_frequency=1).schema
    assert (schema.dense_names, schema.categorical_names, schema.bag_names) == (("n",), ("user",), ("g",))
    assert schema.bag_cardinalities == (4,)
    schema = prepare(path, tmp_path / "c", columns=Columns.declare(dense=["n"])).schema
    assert schema.dense_names == ("n", "user", "x")
    with pytest.raises(DataError, match="no column q"):
        prepare(path, tmp_path / "c", columns=Columns.declare(drop=["q"]))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ([1], r"columns must be an object .* got \[1\]"),
        ({"dense": 3}, "dense must be a list of texts; got 3"),
        ({"dense": "x"}, "dense must be a list of texts; got 'x'"),
        ({"label": 5}, "label must be a text; got 5"),
        ({"weights": [1]}, "weights must map texts to texts"),
        ({"classes": ["a", "a"]}, "classes must name at least two different values"),
        ({"integers": "yes"}, "integers .* must be true or false"),
        ({"separators": {"x": ""}}, "the separator of x must not be empty"),
        ({"dense": ["x"], "drop": ["x"]}, "declared twice: x"),
        ({1: 2}, "unknown key in columns: 1"),
    ],
)
def test_declarations_that_make_no_sense(tmp_path, columns, message):
    with pytest.raises(DataError, match=message):
        prepare(write(tmp_path / "t.csv", {"x": lambda i: i / 3}), tmp_path / "c", columns=columns)


def test_columns_that_cannot_be_read(tmp_path):
    structs = pa.array([{"a": i} for i in range(10)])
    pq.write_table(pa.table({"y": [0, 1] * 5, "s": structs, "x": np.arange(10) / 3}), tmp_path / "t.parquet")
    for columns in (None, {"label": "y", "dense": ["s"]}):
        with pytest.raises(DataError, match=r"column s is of type struct<a: int64>, which is no feature; .* drop it"):
            prepare(tmp_path / "t.parquet", tmp_path / "c", columns=columns)
    assert prepare(tmp_path / "t.parquet", tmp_path / "c", columns=Columns.declare(drop=["s"])).schema.dense_names == (
        "x",
    )


def test_the_report_says_what_and_why(tmp_path):
    ids = popular_ids(N, 100)
    columns = {"user": lambda i: ids[i], "city": lambda i: "abc"[i % 3], "row": lambda i: i}
    report = prepare(write(tmp_path / "t.csv", columns), tmp_path / "c").report
    assert "columns, by all 3,000 rows of t.csv:" in report
    assert "user  categorical  integers as frequent as ids are: 100 different in 3,000" in report
    assert "city  categorical  text, 3 different (4 ids)" in report
    assert "row   dropped      another value in every row" in report
    assert "label label: 0 is 0 (1,500 rows), 1 is 1 (1,500 rows)" in report
    assert "split by time: the first 0.8571 of the rows train (in the order of the file" in report


LABELS = 300


def write_labels(path, labels):
    text = "y,x\n" + "".join(f"{label},{i / 7:.3f}\n" for i, label in enumerate(labels))
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def cycle(*labels):
    return [labels[i % len(labels)] for i in range(LABELS)]


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
    path = write_labels(tmp_path / f"t{suffix}", labels)
    cache = prepare(path, tmp_path / "c", split="time:1,0,0")
    assert cache.encoder.classes == classes
    assert cache.schema.num_outputs == (1 if len(classes) == 2 else len(classes))
    (batch,) = cache.batches("train", LABELS)
    assert batch.label.tolist() == [ids[i % len(ids)] for i in range(LABELS)]
    (again,) = read_for_prediction(path, cache, labelled=True)
    assert again.label.equal(batch.label)
    for i, name in enumerate(classes):
        assert f"{name} is {i} (" in cache.report


def test_booleans_of_parquet(tmp_path):
    pq.write_table(pa.table({"y": cycle(True, False), "x": np.arange(LABELS) / 3}), tmp_path / "t.parquet")
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
        ([f"w{i}" for i in range(LABELS)], "300 different ones: a quantity, and no numbers"),
        ([*cycle(0, 1)[:-1], "oops"], r"t\.csv, line 301: the label \(column y\) must be 0 or 1; got oops"),
        ([*cycle(0, 1)[:-1], ""], r"t\.csv, line 301: the label \(column y\) must be 0 or 1; got nothing"),
        ([*cycle("no", "yes")[:-1], 7], r"t\.csv, line 301: .* must be no or yes; got 7"),
        ([0] * 260 + [1] * 40, r"is 0 in all 257 rows of the training part"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_refused(tmp_path, labels, message):
    with pytest.raises(DataError, match=message):
        prepare(write_labels(tmp_path / "t.csv", labels), tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_classes_that_the_first_rows_do_not_show(tmp_path, monkeypatch):
    """A gzip file is sampled at its beginning; classes other than a known pair are then read from all of it."""
    monkeypatch.setattr("fastcross.data.formats.text.FIRST_BYTES", 500)
    labels = ["a"] * 150 + ["b"] * 100 + ["c"] * 50
    cache = prepare(write_labels(tmp_path / "t.csv.gz", labels), tmp_path / "c", split="random:0.6,0.2,0.2")
    assert cache.encoder.classes == ("a", "b", "c")
    cache = prepare(
        write_labels(tmp_path / "t.csv.gz", [0] * 150 + [1] * 150), tmp_path / "c", split="random:0.6,0.2,0.2"
    )
    assert cache.encoder.classes == ("0", "1")


def test_declared_classes_win(tmp_path):
    path = write_labels(tmp_path / "t.csv", cycle("good", "bad"))
    cache = prepare(path, tmp_path / "c", columns={"classes": ["good", "bad"]}, split="time:1,0,0")
    assert next(cache.batches("train", 2)).label.tolist() == [0, 1]


def test_a_part_with_one_class_is_warned_of(tmp_path):
    labels = cycle(0, 1)[:257] + [1] * 43
    report = prepare(write_labels(tmp_path / "t.csv", labels), tmp_path / "c").report
    assert "warning: every row of the test part has the label 1: no AUC can be had from it" in report
