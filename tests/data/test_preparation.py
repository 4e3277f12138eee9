"""From tables to a cache: CSV and Parquet, declared and inferred columns, bags, bad input; labels that are quantities,
weights of rows and groups of them."""

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow")
import pyarrow as pa
import pyarrow.parquet as pq

from fastcross.data import Cache, Columns, DataError, prepare, read_for_prediction

N = 400


def frame():
    rng = np.random.default_rng(0)
    return pa.table(
        {
            "age": pa.array([None if i % 50 == 0 else 20 + i % 37 for i in range(N)], pa.int64()),
            "income": rng.normal(1e4, 1e3, N),
            "level": [i % 3 for i in range(N)],
            "city": [None if i % 40 == 0 else ("Zürich", "Oslo, N", 'a "b"')[i % 3] for i in range(N)],
            "tags": [[f"t{j}" for j in range(i % 4)] for i in range(N)],
            "tag_weights": [[0.5 * (j + 1) for j in range(i % 4)] for i in range(N)],
            "label": [int(x) for x in rng.random(N) < 0.4],
        }
    )


def write_csv(path, table):
    def cell(value):
        if value is None:
            return ""
        text = "|".join(map(str, value)) if isinstance(value, list) else str(value)
        return '"' + text.replace('"', '""') + '"' if '"' in text or "," in text else text

    rows = [",".join(table.column_names)]
    rows += [",".join(cell(v) for v in row.values()) for row in table.to_pylist()]
    path.write_text("\n".join(rows) + "\n")
    return path


@pytest.fixture
def csv_path(tmp_path):
    return write_csv(tmp_path / "table.csv", frame())


DECLARED = Columns(
    "label", ("age", "income"), ("level", "city"), ("tags",), {"tags": "tag_weights"}, transform=("log", "standard")
)


def everything(cache, part="train"):
    return next(cache.batches(part, max(cache.sizes[part], 1)))


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_declared_columns(tmp_path, csv_path, kind, monkeypatch):
    monkeypatch.setattr("fastcross.data.formats.text.BLOCK_BYTES", 2000)
    monkeypatch.setattr("fastcross.data.formats.parquet.PARQUET_ROWS", 64)
    if kind == "parquet":
        pq.write_table(frame(), tmp_path / "table.parquet")
    cache = prepare(
        tmp_path / f"table.{kind}", tmp_path / "cache", columns=DECLARED, split=(0.5, 0.25, 0.25), min_frequency=1
    )
    assert cache.schema.dense_names == ("age", "income", "age.missing")
    assert cache.schema.categorical_names == ("level", "city")
    assert cache.schema.cardinalities == (4, 5)  # three values, the missing city, and id 0
    assert cache.schema.bag_cardinalities == (4,)
    rows = frame().to_pylist()
    batch = everything(cache)
    mean, scale = cache.encoder.numbers.mean[1], cache.encoder.numbers.scale[1]
    # Match rows by the standardised income, which is unique.
    values = np.array([r["income"] for r in rows])
    found = np.abs(batch.dense[:, 1].numpy()[:, None] - ((values - mean) * scale)[None]).argmin(axis=1)
    assert len(set(found.tolist())) == 200
    train = values[found]
    np.testing.assert_allclose([mean, scale], [train.mean(), 1 / train.std()], rtol=1e-9)
    np.testing.assert_allclose(batch.dense[:, 1].mean(), 0, atol=1e-5)
    ages = np.array([np.nan if rows[r]["age"] is None else np.log1p(rows[r]["age"]) for r in found])
    ages = (ages - np.nanmean(ages)) / np.nanstd(ages)
    np.testing.assert_array_equal(batch.dense[:, 2], np.isnan(ages))
    np.testing.assert_allclose(batch.dense[:, 0], np.nan_to_num(ages, nan=0), rtol=1e-5, atol=1e-6)
    bag = batch.bags[0]
    ends = [*bag.offsets[1:].tolist(), len(bag.values)]
    for i, r in enumerate(found):
        assert batch.label[i].item() == rows[r]["label"]
        mine = slice(int(bag.offsets[i]), ends[i])
        assert bag.weights[mine].tolist() == rows[r]["tag_weights"]
        assert bag.values[mine].tolist() == list(range(1, 1 + len(rows[r]["tags"])))  # t0 is the most frequent


def test_csv_and_parquet_agree(tmp_path, csv_path):
    pq.write_table(frame(), tmp_path / "table.parquet")
    caches = [prepare(tmp_path / f"table.{k}", tmp_path / k, columns=DECLARED) for k in ("csv", "parquet")]
    for part in ("train", "validation", "test"):
        a, b = (everything(cache, part) for cache in caches)
        assert a.dense.equal(b.dense)
        assert a.categorical.equal(b.categorical)
        assert a.bags[0].values.equal(b.bags[0].values)
        assert a.bags[0].offsets.equal(b.bags[0].offsets)


def test_shuffled_bags_follow_their_rows(tmp_path, csv_path):
    cache = prepare(csv_path, tmp_path / "cache", columns=DECLARED, min_frequency=1)

    def rows(batches):
        for batch in batches:
            bag = batch.bags[0]
            ends = [*bag.offsets[1:].tolist(), len(bag.values)]
            for i in range(len(batch)):
                mine = slice(int(bag.offsets[i]), ends[i])
                yield batch.dense[i, 1].item(), bag.values[mine].tolist(), bag.weights[mine].tolist()

    assert sorted(rows(cache.batches("train", 33, shuffle=True))) == sorted(rows(cache.batches("train", 1000)))


def test_inferred_columns(tmp_path, csv_path):
    pq.write_table(frame(), tmp_path / "table.parquet")
    parquet = prepare(tmp_path / "table.parquet", tmp_path / "a", columns={"weights": {"tags": "tag_weights"}})
    assert parquet.schema.dense_names == ("age", "income", "level", "age.missing")
    assert parquet.schema.categorical_names == ("city", "level.level")  # integers, but three of them: both
    assert parquet.schema.bag_names == ("tags",)
    text = prepare(csv_path, tmp_path / "b", columns="label")
    assert text.schema.dense_names == parquet.schema.dense_names
    assert text.schema.categorical_names == parquet.schema.categorical_names
    assert text.schema.bag_names == ("tags", "tag_weights")  # the bars say that they are lists


def test_classes(tmp_path):
    (tmp_path / "iris.csv").write_text("x;kind\n" + "".join(f"{i}.5;{'abc'[i % 3]}\n" for i in range(60)))
    cache = prepare(tmp_path / "iris.csv", tmp_path / "cache", columns={"label": "kind", "classes": ["a", "b", "c"]})
    assert cache.schema.num_outputs == 3
    assert cache.schema.task == "multiclass"
    assert everything(cache).label.tolist() == [i % 3 for i in range(51)]
    assert everything(cache).label.dtype == torch.int64


def spoil(path, line, old, new):
    lines = path.read_bytes().split(b"\n")
    assert old in lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(old, new, 1)
    path.write_bytes(b"\n".join(lines))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b",", b"", "expected 7 columns, got 6"),
        (b"2", b"x2", "column age must be a number; got 'x2"),
        (b"2", b"1e999", "column age must be finite"),
        (b"2", b"inf", "column age must be "),
        (b"O", b"\xc3", "bytes that are not UTF-8"),
        (b",0.5", b",0.5|1|1|1|1", "column tag_weights must have a weight for each value of column tags"),
        (b'"', b"", "expected 7 columns, got 8"),
    ],
)
def test_bad_csv_rows(tmp_path, csv_path, old, new, message):
    spoil(csv_path, 303, old, new)
    with pytest.raises(DataError, match=rf"table\.csv, line 303: .*{message}"):
        prepare(csv_path, tmp_path / "cache", columns=DECLARED)
    cache = prepare(csv_path, tmp_path / "cache", columns=DECLARED, on_error="skip")
    assert cache.manifest["skipped"]["rows"] == 1
    assert sum(cache.sizes.values()) == N - 1


def test_open_quote_is_an_error_not_a_wrong_row(tmp_path, csv_path):
    spoil(csv_path, 303, b'Oslo, N"', b"Oslo, N")
    with pytest.raises(DataError, match="line 303: "):
        prepare(csv_path, tmp_path / "cache", columns=DECLARED)


def test_bad_tables(tmp_path, csv_path):
    cases = [
        ("x,y\n", {}, "a header, but no rows"),
        ("x,z\n1,2\n", {}, "name the label column; the columns are x, z"),
        ("x,x,y\n1,2,1\n", {}, "the header names a column twice: x"),
        ("x,y\n1,1\n", {"columns": "click"}, "no column click; the columns are x, y"),
        ("x,y\n1,1\n", {"columns": {"label": "y", "dense": ["x", "w"]}}, "no column w"),
        ("x,y\n1,1\n", {"columns": {"label": "y", "colour": 1}}, "unknown key in columns: colour"),
        ("y\n1\n", {}, "no feature columns beside the label y"),
        ("x,y\n1,3\n", {}, r"the label \(column y\) is 3 in all 1 rows: there is nothing to tell apart"),
        ("x,y\n1,3\n", {"columns": {"classes": ["0", "1"]}}, r"line 2: the label \(column y\) must be 0 or 1; got 3"),
    ]
    for text, arguments, message in cases:
        (tmp_path / "bad.csv").write_text(text)
        with pytest.raises(DataError, match=message):
            prepare(tmp_path / "bad.csv", tmp_path / "cache", format="csv", **arguments)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(DataError, match=r"bad\.parquet: not a readable Parquet file"):
        prepare(tmp_path / "bad.parquet", tmp_path / "cache")
    (tmp_path / "second.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match=r"second\.csv, line 1: the header must be that of the first file; got a,b"):
        prepare([csv_path, tmp_path / "second.csv"], tmp_path / "cache", columns=DECLARED)


def test_bad_parquet_row(tmp_path):
    table = frame()
    label = table["label"].to_pylist()
    label[250] = 7
    table = table.set_column(table.column_names.index("label"), "label", pa.array(label))
    pq.write_table(table, tmp_path / "table.parquet")
    with pytest.raises(DataError, match=r"table\.parquet, row 251: the label .* must be 0 or 1; got 7"):
        prepare(tmp_path / "table.parquet", tmp_path / "cache", columns=DECLARED)
    cache = prepare(tmp_path / "table.parquet", tmp_path / "cache", columns=DECLARED, on_error="skip")
    assert sum(cache.sizes.values()) == N - 1


def test_prediction_of_a_table_without_label(tmp_path, csv_path):
    cache = prepare(csv_path, tmp_path / "cache", columns=DECLARED, split="time:1,0,0", min_frequency=1)
    table = frame().drop_columns(["label"]).select(["tags", "tag_weights", "city", "level", "age", "income"])
    new = write_csv(tmp_path / "new.csv", table)  # other order of columns
    spoil(new, 3, b"Oslo, N", b"Bergen")
    rows = read_for_prediction(new, cache, batch_size=150)
    batches = list(rows)
    assert [len(b) for b in batches] == [150, 150, 100]
    assert rows.unknown == {"level": 0, "city": 1, "tags": 0}
    whole = everything(cache)
    assert torch.cat([b.dense for b in batches]).equal(whole.dense)
    ids = torch.cat([b.categorical for b in batches])
    assert ids[1, 1] == 0
    ids[1, 1] = whole.categorical[1, 1]
    assert ids.equal(whole.categorical)
    assert torch.cat([b.bags[0].values for b in batches]).equal(whole.bags[0].values)
    assert (batches[1].bags[0].offsets + whole.bags[0].offsets[150]).equal(whole.bags[0].offsets[150:300])
    new.write_text("city,age\nOslo,3\n")
    with pytest.raises(DataError, match="no column income, level, tag_weights, tags"):
        next(iter(read_for_prediction(new, cache)))


ROWS = 300


def write_columns(path, **columns):
    names = list(columns)
    lines = [",".join(str(columns[name][i]) for name in names) for i in range(ROWS)]
    path.write_text("\n".join([",".join(names), *lines, ""]))
    return path


X = [f"{i / 7:.3f}" for i in range(ROWS)]


@pytest.mark.parametrize("labels", [[i / 7 for i in range(ROWS)], list(range(ROWS))], ids=["decimals", "integers"])
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_numbers_of_which_many_differ_are_a_quantity(tmp_path, labels, suffix):
    path = tmp_path / f"t{suffix}"
    if suffix == ".csv":
        write_columns(path, y=labels, x=X)
    else:
        pq.write_table(pa.table({"y": labels, "x": np.arange(ROWS) / 3}), path)
    cache = prepare(path, tmp_path / "c", split="time:0.5,0.5,0")
    assert (cache.schema.task, cache.schema.num_outputs, cache.encoder.classes) == ("regression", 1, ())
    (batch,) = cache.batches("train", ROWS)
    assert batch.label.tolist() == labels[:150]
    assert batch.label.dtype == torch.float64
    mean, deviation = cache.label_scale
    assert mean == pytest.approx(np.mean(labels[:150]))
    assert deviation == pytest.approx(np.std(labels[:150]))
    assert "label y: a quantity (regression), mean" in cache.report
    (again,) = read_for_prediction(path, cache, labelled=True)
    assert again.label.tolist() == labels
    assert Cache.open(tmp_path / "c").encoder.columns.task == "regression"


def test_the_task_can_be_declared(tmp_path):
    path = write_columns(tmp_path / "t.csv", y=[i % 5 for i in range(ROWS)], x=X)
    assert prepare(path, tmp_path / "a").schema.task == "multiclass"
    assert prepare(path, tmp_path / "b", columns={"label": "y", "task": "regression"}).schema.task == "regression"
    path = write_columns(tmp_path / "u.csv", y=[i / 7 for i in range(ROWS)], x=X)
    with pytest.raises(DataError, match="300 different ones: a quantity, where classes are needed"):
        prepare(path, tmp_path / "c", columns={"label": "y", "task": "classification"})
    with pytest.raises(DataError, match="task must be one of auto, classification, regression; got 'ranking'"):
        prepare(path, tmp_path / "c", columns={"task": "ranking"})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("oops", r"t\.csv, line 8: column y must be a number; got 'oops'"),
        ("", r"t\.csv, line 8: the label \(column y\) must be a finite number; got nothing"),
        ("inf", r"t\.csv, line 8: the label \(column y\) must be a finite number; got inf"),
    ],
)
def test_a_bad_quantity_is_named_with_its_line(tmp_path, value, message):
    path = write_columns(tmp_path / "t.csv", y=[value if i == 6 else i / 7 for i in range(ROWS)], x=X)
    with pytest.raises(DataError, match=message):
        prepare(path, tmp_path / "c", columns={"label": "y", "task": "regression"})
    assert not (tmp_path / "c").exists()


def test_a_constant_quantity_is_refused(tmp_path):
    path = write_columns(tmp_path / "t.csv", y=[2.5] * ROWS, x=X)
    with pytest.raises(DataError, match=r"the label \(column y\) is 2.5 in all rows: there is nothing to tell apart"):
        prepare(path, tmp_path / "c", columns={"label": "y", "task": "regression"})


WEIGHTS = [0.5 * (i % 4) for i in range(ROWS)]
USERS = [f"u{i % 9}" for i in range(ROWS)]
WEIGHTED = {"label": "y", "sample_weight": "w", "group": "user", "infer_rest": True}


def test_weights_and_groups_are_in_the_cache(tmp_path):
    y = [i % 2 for i in range(ROWS)]
    path = write_columns(tmp_path / "t.csv", y=y, x=X, w=WEIGHTS, user=USERS)
    cache = prepare(path, tmp_path / "c", columns=WEIGHTED, split="time:0.5,0.5,0")
    assert "w" not in cache.schema.names
    assert "user" in cache.schema.names
    (batch,) = cache.batches("train", ROWS)
    assert batch.weight.tolist() == WEIGHTS[:150]
    assert cache.mean_weight == pytest.approx(np.mean(WEIGHTS[:150]))
    same = [[a == b for a in USERS[:150]] for b in USERS[:150]]
    assert (batch.group[:, None] == batch.group).tolist() == same
    assert "w     weight       how much each row counts; no feature" in cache.report
    first, second = cache.batches("train", 75)
    assert [*first.weight.tolist(), *second.weight.tolist()] == WEIGHTS[:150]
    assert batch.row(3).weight.tolist() == WEIGHTS[3:4]
    assert batch.to("cpu").group.equal(batch.group)
    rows = list(read_for_prediction(path, cache, labelled=True, batch_size=100))
    assert torch.cat([each.weight for each in rows]).tolist() == WEIGHTS
    (features,) = read_for_prediction(path, cache)
    assert (features.label, features.weight, features.group) == (None, None, None)
    unweighted = write_columns(tmp_path / "u.csv", y=y, x=X, user=USERS)
    assert len(next(iter(read_for_prediction(unweighted, cache)))) == ROWS
    with pytest.raises(DataError, match=r"u\.csv: no column w"):
        list(read_for_prediction(unweighted, cache, labelled=True))


@pytest.mark.parametrize(("value", "shown"), [("-1", "-1"), ("", "nothing"), ("nan", "nothing"), ("inf", "inf")])
def test_a_bad_weight_is_named_with_its_line(tmp_path, value, shown):
    weights = [value if i == 6 else 1 for i in range(ROWS)]
    path = write_columns(tmp_path / "t.csv", y=[i % 2 for i in range(ROWS)], x=X, w=weights, user=USERS)
    message = rf"t\.csv, line 8: the weight \(column w\) must be finite and at least 0; got {shown}"
    with pytest.raises(DataError, match=message):
        prepare(path, tmp_path / "c", columns=WEIGHTED)


def test_weights_that_are_all_0_are_refused(tmp_path):
    path = write_columns(tmp_path / "t.csv", y=[i % 2 for i in range(ROWS)], x=X, w=[0] * ROWS, user=USERS)
    with pytest.raises(DataError, match=r"the weight \(column w\) is zero in all 257 rows of the training part"):
        prepare(path, tmp_path / "c", columns=WEIGHTED)


def test_a_declaration_without_these_is_saved_as_before():
    """So that encoders of caches and runs that were made before keep their fingerprint."""
    from fastcross.data import Columns

    assert not {"task", "sample_weight", "group"} & Columns.make("y").to_dict().keys()
    assert Columns.make(Columns.make(WEIGHTED).to_dict()) == Columns.make(WEIGHTED)


def test_a_table_in_memory_is_its_parquet_file(tmp_path):
    generator = np.random.default_rng(0)
    table = pa.table(
        {
            "y": generator.integers(0, 2, 70_000),
            "age": generator.normal(size=70_000),
            "city": pa.array([None if i % 50 == 0 else f"c{i % 30}" for i in range(70_000)]),
            "tags": pa.array([["a", "b"][: i % 3] for i in range(70_000)]),
        }
    )
    pq.write_table(table, tmp_path / "t.parquet")
    options = {"split": "random:0.8,0.1,0.1", "seed": 3}
    file = prepare(tmp_path / "t.parquet", tmp_path / "a", **options)
    memory = prepare([table], tmp_path / "b", **options)
    assert memory.encoder_fingerprint == file.encoder_fingerprint
    assert memory.manifest["files"] == file.manifest["files"]  # checksums of every array
    (ours,) = list(read_for_prediction(table.slice(0, 100), memory))
    pq.write_table(table.slice(0, 100), tmp_path / "few.parquet")
    (theirs,) = list(read_for_prediction(tmp_path / "few.parquet", file))
    assert ours.dense.equal(theirs.dense)
    assert ours.categorical.equal(theirs.categorical)


def test_of_two_tables_the_second_validates(tmp_path):
    table = pa.table({"y": [0, 1] * 50, "x": np.arange(100) / 7})
    cache = prepare([table, table.slice(0, 30)], tmp_path / "c")
    assert cache.sizes == {"train": 100, "validation": 30, "test": 0}
    assert next(cache.batches("validation", 30)).label.tolist() == [0, 1] * 15
    with pytest.raises(DataError, match="the table of eval_set: no column x; the columns are y"):
        prepare([table, table.select(["y"])], tmp_path / "d")
