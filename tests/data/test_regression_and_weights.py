"""Labels that are quantities, weights of rows and groups of them: inferred, declared, cached, refused."""

import numpy as np
import pytest

pytest.importorskip("pyarrow")
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from fastcross.data import Cache, DataError, prepare, read_for_prediction
from fastcross.data.preparation import prepare_table

N = 300


def write(path, **columns):
    names = list(columns)
    lines = [",".join(str(columns[name][i]) for name in names) for i in range(N)]
    path.write_text("\n".join([",".join(names), *lines, ""]))
    return path


X = [f"{i / 7:.3f}" for i in range(N)]


@pytest.mark.parametrize("labels", [[i / 7 for i in range(N)], list(range(N))], ids=["decimals", "integers"])
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_numbers_of_which_many_differ_are_a_quantity(tmp_path, labels, suffix):
    path = tmp_path / f"t{suffix}"
    if suffix == ".csv":
        write(path, y=labels, x=X)
    else:
        pq.write_table(pa.table({"y": labels, "x": np.arange(N) / 3}), path)
    cache = prepare(path, tmp_path / "c", split="time:0.5,0.5,0")
    assert (cache.schema.task, cache.schema.num_outputs, cache.encoder.classes) == ("regression", 1, ())
    (batch,) = cache.batches("train", N)
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
    path = write(tmp_path / "t.csv", y=[i % 5 for i in range(N)], x=X)
    assert prepare(path, tmp_path / "a").schema.task == "multiclass"
    assert prepare(path, tmp_path / "b", columns={"label": "y", "task": "regression"}).schema.task == "regression"
    path = write(tmp_path / "u.csv", y=[i / 7 for i in range(N)], x=X)
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
    path = write(tmp_path / "t.csv", y=[value if i == 6 else i / 7 for i in range(N)], x=X)
    with pytest.raises(DataError, match=message):
        prepare(path, tmp_path / "c", columns={"label": "y", "task": "regression"})
    assert not (tmp_path / "c").exists()


def test_a_constant_quantity_is_refused(tmp_path):
    path = write(tmp_path / "t.csv", y=[2.5] * N, x=X)
    with pytest.raises(DataError, match=r"the label \(column y\) is 2.5 in all rows: there is nothing to tell apart"):
        prepare(path, tmp_path / "c", columns={"label": "y", "task": "regression"})


WEIGHTS = [0.5 * (i % 4) for i in range(N)]
USERS = [f"u{i % 9}" for i in range(N)]
DECLARED = {"label": "y", "sample_weight": "w", "group": "user", "infer_rest": True}


def test_weights_and_groups_are_in_the_cache(tmp_path):
    y = [i % 2 for i in range(N)]
    path = write(tmp_path / "t.csv", y=y, x=X, w=WEIGHTS, user=USERS)
    cache = prepare(path, tmp_path / "c", columns=DECLARED, split="time:0.5,0.5,0")
    assert "w" not in cache.schema.names
    assert "user" in cache.schema.names
    (batch,) = cache.batches("train", N)
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
    unweighted = write(tmp_path / "u.csv", y=y, x=X, user=USERS)
    assert len(next(iter(read_for_prediction(unweighted, cache)))) == N
    with pytest.raises(DataError, match=r"u\.csv: no column w"):
        list(read_for_prediction(unweighted, cache, labelled=True))


@pytest.mark.parametrize(("value", "shown"), [("-1", "-1"), ("", "nothing"), ("nan", "nothing"), ("inf", "inf")])
def test_a_bad_weight_is_named_with_its_line(tmp_path, value, shown):
    weights = [value if i == 6 else 1 for i in range(N)]
    path = write(tmp_path / "t.csv", y=[i % 2 for i in range(N)], x=X, w=weights, user=USERS)
    message = rf"t\.csv, line 8: the weight \(column w\) must be finite and at least 0; got {shown}"
    with pytest.raises(DataError, match=message):
        prepare(path, tmp_path / "c", columns=DECLARED)


def test_weights_that_are_all_0_are_refused(tmp_path):
    path = write(tmp_path / "t.csv", y=[i % 2 for i in range(N)], x=X, w=[0] * N, user=USERS)
    with pytest.raises(DataError, match=r"the weight \(column w\) is zero in all 257 rows of the training part"):
        prepare(path, tmp_path / "c", columns=DECLARED)


def test_a_declaration_without_these_is_saved_as_before():
    """So that encoders of caches and runs that were made before keep their fingerprint."""
    from fastcross.data import Columns

    assert not {"task", "sample_weight", "group"} & Columns.make("y").to_dict().keys()
    assert Columns.make(Columns.make(DECLARED).to_dict()) == Columns.make(DECLARED)


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
    memory = prepare_table([table], tmp_path / "b", **options)
    assert memory.encoder_fingerprint == file.encoder_fingerprint
    assert memory.manifest["files"] == file.manifest["files"]  # checksums of every array
    (ours,) = list(read_for_prediction(table.slice(0, 100), memory))
    pq.write_table(table.slice(0, 100), tmp_path / "few.parquet")
    (theirs,) = list(read_for_prediction(tmp_path / "few.parquet", file))
    assert ours.dense.equal(theirs.dense)
    assert ours.categorical.equal(theirs.categorical)


def test_of_two_tables_the_second_validates(tmp_path):
    table = pa.table({"y": [0, 1] * 50, "x": np.arange(100) / 7})
    cache = prepare_table([table, table.slice(0, 30)], tmp_path / "c")
    assert cache.sizes == {"train": 100, "validation": 30, "test": 0}
    assert next(cache.batches("validation", 30)).label.tolist() == [0, 1] * 15
    with pytest.raises(DataError, match="the table of eval_set: no column x; the columns are y"):
        prepare_table([table, table.select(["y"])], tmp_path / "d")
