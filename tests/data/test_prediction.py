"""Rows to predict: numbers, ids and progress beside the batches; files that break off; logs that are not in order."""

import gzip

import numpy as np
import pytest

pytest.importorskip("pyarrow")
import pyarrow as pa
import pyarrow.parquet as pq

from fastcross.data import Columns, DataError, prepare, read_for_prediction

N = 500


def lines(rows=N):
    return ["key,y,c,x", *(f"k{i},{i % 2},{'abc'[i % 3]},{i / 7:.3f}" for i in range(rows))]


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("\n".join(lines()) + "\n")
    return path


@pytest.fixture
def cache(table, tmp_path):
    return prepare(table, tmp_path / "cache", min_frequency=1, columns=Columns.declare(drop=["key"]))


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_skipped_rows_keep_the_others_in_place(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr("fastcross.data.formats.parquet.PARQUET_ROWS", 64)
    x = [str(i / 7) for i in range(N)]
    keys = [f"k{i}" for i in range(N)]
    whole = pa.table({"key": keys, "y": [i % 2 for i in range(N)], "x": x})
    bad = [0, 3, 64, 65, 130, N - 1]
    spoilt = whole.set_column(2, "x", pa.array(["?!" if i in bad else text for i, text in enumerate(x)]))
    for name, content in (("whole", whole), ("spoilt", spoilt)):
        if suffix == "parquet":
            pq.write_table(content, tmp_path / f"{name}.parquet")
        else:
            rows = [",".join(map(str, row.values())) for row in content.to_pylist()]
            (tmp_path / f"{name}.csv").write_text("\n\n".join(["key,y,x", *rows]) + "\n")  # blank lines are no rows
    columns = {"label": "y", "dense": ["x"]}
    cache = prepare(tmp_path / f"whole.{suffix}", tmp_path / "cache", columns=columns)
    rows = read_for_prediction(tmp_path / f"spoilt.{suffix}", cache, on_error="skip", id_column="key", batch_size=50)
    dense = np.concatenate([batch.dense.numpy() for batch in rows])
    assert rows.skipped == bad
    assert rows.rows == len(dense) == N - len(bad)
    assert rows.numbers.tolist() == [i for i in range(N) if i not in bad]
    assert rows.ids == [keys[i] for i in rows.numbers]
    expected = np.concatenate(
        [batch.dense.numpy() for batch in read_for_prediction(tmp_path / f"whole.{suffix}", cache)]
    )
    np.testing.assert_array_equal(dense, expected[rows.numbers])


def test_numbers_run_over_all_files(table, cache, tmp_path):
    spoilt = lines(20)
    spoilt[5] = "bad"
    (tmp_path / "other.csv").write_text("\n".join(spoilt))
    rows = read_for_prediction([table, tmp_path / "other.csv"], cache, on_error="skip", id_column="key")
    assert sum(map(len, rows)) == N + 19
    assert rows.skipped == [N + 4]
    assert rows.ids[N : N + 5] == ["k0", "k1", "k2", "k3", "k5"]


def test_an_id_may_be_a_feature_and_must_exist(table, cache):
    for name in ("c", "x", "y", "key"):
        rows = read_for_prediction(table, cache, id_column=name)
        (batch,) = rows
        assert rows.ids[:3] == [
            dict(zip(lines()[0].split(","), line.split(","), strict=True))[name] for line in lines()[1:4]
        ]
        (without,) = read_for_prediction(table, cache)
        assert batch.dense.equal(without.dense)
    with pytest.raises(DataError, match="no column nowhere; the columns are key, y, c, x"):
        list(read_for_prediction(table, cache, id_column="nowhere"))


def test_progress_reaches_the_end(table, cache, tmp_path):
    seen = []
    list(read_for_prediction(table, cache, progress=lambda *step: seen.append(step)))
    size = table.stat().st_size
    assert seen[-1] == ("predict", size, size)
    stages = []
    prepare(table, tmp_path / "again", progress=lambda *step: stages.append(step))
    assert {stage for stage, _, _ in stages} >= {"read", "count", "write"}
    for stage in ("read", "write"):
        steps = [(done, total) for name, done, total in stages if name == stage]
        assert steps == sorted(steps)
        assert steps[-1][0] == steps[-1][1]


def test_a_file_that_breaks_off_is_said_to(cache, tmp_path):
    text = "\n".join(lines(20_000)).encode()
    whole = gzip.compress(text)
    damaged = bytearray(whole)
    damaged[len(whole) // 2 : len(whole) // 2 + 40] = bytes(40)
    for name, content in (("cut", whole[: len(whole) // 2]), ("damaged", bytes(damaged))):
        path = tmp_path / f"{name}.csv.gz"
        path.write_bytes(content)
        # Damage shows in the rows before the stream notices it.
        with pytest.raises(DataError, match=r"cut.*gzip stream" if name == "cut" else r"damaged\.csv\.gz, line \d+: "):
            list(read_for_prediction(path, cache))
        rows = read_for_prediction(path, cache, on_error="skip")
        count = sum(map(len, rows))
        (message,) = rows.problems.truncated
        assert f"{name}.csv.gz, line " in message
        # All that comes before the damage is read: about half of the rows.
        assert 8_000 < count < 12_500
    rows = read_for_prediction(tmp_path / "t.csv", cache, on_error="skip")
    list(rows)
    assert rows.problems.truncated == []
    made = prepare(tmp_path / "cut.csv.gz", tmp_path / "c", on_error="skip")
    assert made.manifest["skipped"]["truncated"]
    assert "all from here on is lost" in made.report


@pytest.mark.parametrize("kind", ["numbers", "texts", "parquet"])
def test_split_by_a_time_column(tmp_path, kind):
    order = np.random.default_rng(0).permutation(N)
    moments = np.datetime64("2024-01-01T00:00:00") + order.astype("timedelta64[m]")
    time = order * 10 if kind == "numbers" else moments
    path = tmp_path / ("t.parquet" if kind == "parquet" else "t.csv")
    if kind == "parquet":
        pq.write_table(pa.table({"ts": time, "y": order % 2, "x": order / 7}), path)
    else:
        rows = (f"{t},{i % 2},{i / 7}" for t, i in zip(time, order, strict=True))
        path.write_text("ts,y,x\n" + "\n".join(rows))
    cache = prepare(path, tmp_path / "c", split="time", time_column="ts", columns={"transform": "none"})
    assert cache.sizes == {"train": 429, "validation": 36, "test": 35}
    earlier = next(cache.batches("train", N)).dense[:, 0].numpy() * 7
    np.testing.assert_allclose(np.sort(earlier), np.arange(429), atol=1e-3)
    assert "by column ts" in cache.report
    assert "ts" not in cache.schema.dense_names
    assert cache.schema.categorical_names == (() if kind == "numbers" else ("ts.hour", "ts.weekday"))
    if kind == "numbers":  # rows to predict need no time
        (tmp_path / "new.csv").write_text("y,x\n1,0.5\n")
        (new,) = read_for_prediction(tmp_path / "new.csv", cache, labelled=True)
        assert new.dense.tolist() == [[0.5]]
    without = prepare(path, tmp_path / "d", split="time", columns={"transform": "none"})
    assert "ts" in without.schema.dense_names or "ts.hour" in without.schema.categorical_names


def test_bad_time_columns(table, tmp_path):
    with pytest.raises(DataError, match="no column when"):
        prepare(table, tmp_path / "c", time_column="when")
    with pytest.raises(DataError, match=r"the time \(column c\) must hold numbers or date-times"):
        prepare(table, tmp_path / "c", time_column="c")
    with pytest.raises(ValueError, match="time_column orders the rows"):
        prepare(table, tmp_path / "c", time_column="x", split="random")
    spoilt = lines()
    spoilt[7] = "k,1,a,"
    table.write_text("\n".join(spoilt))
    with pytest.raises(DataError, match=r"line 8: the time \(column x\) must be given; got nothing"):
        prepare(table, tmp_path / "c", time_column="x")
