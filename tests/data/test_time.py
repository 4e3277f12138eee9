"""Times: which column orders the rows of a split by time, and what a date says."""

import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fastcross.batch import Batch
from fastcross.cli.main import main
from fastcross.data import Cache, Columns, Encoder, prepare, read_for_prediction
from fastcross.data.blocks import to_block
from fastcross.data.encoder import Vocabulary
from fastcross.data.numbers import Numbers
from fastcross.data.prediction import RowEncoder

ROWS = 300
FIRST = datetime.datetime(2023, 11, 5, 10)


def write(path, **columns):
    rng = np.random.default_rng(0)
    pq.write_table(pa.table({"x": rng.normal(size=ROWS), **columns, "label": rng.integers(0, 2, ROWS)}), path)
    return path


def shuffled(step=datetime.timedelta(hours=7)):
    return [FIRST + int(i) * step for i in np.random.default_rng(1).permutation(ROWS)]


@pytest.mark.parametrize("kind", ["times", "unix"])
def test_a_split_by_time_takes_the_one_column_of_times(tmp_path, kind):
    moments = shuffled()
    seen = moments if kind == "times" else [int(m.replace(tzinfo=datetime.UTC).timestamp()) for m in moments]
    place = [str(m >= FIRST + 257 * datetime.timedelta(hours=7)) for m in moments]  # the last seventh
    cache = prepare(write(tmp_path / "t.parquet", seen_at=seen, late=place), tmp_path / "c", min_frequency=1)
    assert "split by time: the first 0.8571 of the rows train (by column seen_at)" in cache.report
    assert cache.warnings == []
    (late,) = (i for i, name in enumerate(cache.schema.categorical_names) if name == "late")
    assert cache.schema.cardinalities[late] == 2, "no late row trains"


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({}, "no column of times was recognised"),
        ({"a": shuffled(), "b": shuffled()}, "several columns hold times: a, b"),
        ({"a": [None, *shuffled()[1:]]}, "a has gaps"),
    ],
    ids=["none", "two", "gaps"],
)
def test_the_order_of_the_file_is_not_taken_for_time_in_silence(tmp_path, capsys, columns, said):
    write(tmp_path / "t.parquet", **columns)
    assert main(["prepare", str(tmp_path / "t.parquet"), "--cache", str(tmp_path / "c")]) == 0
    message = f"the split by time takes the rows in the order they stand in, for {said}; name the column that orders"
    assert f"warning: {message}" in capsys.readouterr().out
    (warning,) = Cache.open(tmp_path / "c").warnings
    assert "--time-column" in warning
    assert prepare(tmp_path / "t.parquet", tmp_path / "c", split="random").warnings == []


def values_of(cache: Cache, batch: Batch) -> list[dict[str, object]]:
    """Of each row, what the features stand for."""
    schema, encoder = cache.schema, cache.encoder
    rows = []
    for dense, categorical in zip(batch.dense.tolist(), batch.categorical.tolist(), strict=True):
        row: dict[str, object] = {
            n: round(encoder.numbers.undone(i, dense[i])) for i, n in enumerate(schema.dense_names)
        }
        for name, ids, i in zip(schema.categorical_names, encoder.categorical, categorical, strict=True):
            row[name] = ids.values[i - 1].as_py() if i else "?"
        rows.append(row)
    return rows


def test_a_date_is_told_in_full(tmp_path):
    """Across leap years, before 1970, and in rows that come later as Python has them."""
    moments = [datetime.datetime(1955, 12, 30, 23) + i * datetime.timedelta(days=97, hours=5) for i in range(ROWS)]
    cache = prepare(write(tmp_path / "t.parquet", at=moments), tmp_path / "c", min_frequency=1, split="time:1,0,0")
    expected = [
        {
            "at.hour": str(m.hour),
            "at.weekday": f"{m:%A}",
            "at.month": str(m.month),
            "at.day": m.day,
            "at.year": m.year,
            "at.days": (m.date() - datetime.date(1970, 1, 1)).days,
        }
        for m in moments
    ]
    whole = next(cache.batches("train", ROWS))
    told = [{name: value for name, value in row.items() if name != "x"} for row in values_of(cache, whole)]
    assert told == expected
    days = whole.dense[:, cache.schema.dense_names.index("at.days")]
    since = np.array([(m.date() - moments[0].date()).days for m in moments])
    np.testing.assert_allclose(days, (since - since.mean()) / since.std(), atol=1e-5, err_msg="since the first date")
    rows = [{"x": 0.0, "at": m.isoformat()} for m in (*moments, datetime.datetime(2300, 1, 1))] + [
        {"x": 0.0, "at": None}
    ]
    batch, _ = RowEncoder(cache.encoder)(rows)
    assert batch.dense[:ROWS, 1:].equal(whole.dense[:, 1:])
    assert batch.categorical[:ROWS].equal(whole.categorical)
    later, missing = batch.dense[-2:, 1:].tolist()
    assert later[2] == pytest.approx(days.max().item()), "later than training: as its last day"
    assert missing == [0, 0, 0]


def test_what_is_the_same_in_all_training_rows_is_no_feature(tmp_path):
    """Dates have no hour, those of one month no month; validation may have what training has not."""
    first = datetime.date(2024, 3, 1)
    dates = [first + datetime.timedelta(days=i * 30 // 250) for i in range(ROWS)]  # the last rows lie in April
    gaps = [None if i % 3 else first for i in range(ROWS)]
    columns = {"on": dates, "once": gaps, "at": [FIRST + i * datetime.timedelta(hours=1) for i in range(ROWS)]}
    path = write(tmp_path / "t.parquet", **columns)
    cache = prepare(path, tmp_path / "c", split="time:0.8,0.2,0", min_frequency=1, time_column="on")
    assert cache.schema.categorical_names == ("on.weekday", "once.weekday", "at.hour", "at.weekday")
    assert cache.schema.dense_names == ("x", "on.day", "on.days", "at.day", "at.days")
    assert cache.encoder.categorical[1].cardinality == 3, "a missing date is a value of the weekday"
    again = next(iter(read_for_prediction(path, cache, labelled=True)))
    assert again.dense[:240].equal(next(cache.batches("train", ROWS)).dense)
    hashed = prepare(path, tmp_path / "c", split="time:0.8,0.2,0", hash_buckets=100, time_column="on")
    assert "on.hour" in hashed.schema.categorical_names
    assert "on.year" not in hashed.schema.dense_names


def test_a_column_that_has_the_name_of_a_part_is_itself(tmp_path):
    moments, months = shuffled(), [f"m{i % 7}" for i in range(ROWS)]
    path = write(tmp_path / "t.parquet", **{"at": moments, "at.month": months})
    cache = prepare(path, tmp_path / "c", split="random", min_frequency=1)
    assert cache.schema.categorical_names == ("at.month", "at.hour", "at.weekday")
    assert cache.encoder.categorical[0].cardinality == 8


def test_encoders_of_before_have_hour_and_weekday(tmp_path):
    """Their file names no parts, and their fingerprint stays; new rows extend what they have."""
    columns = Columns("label", ("x",), (), (), datetimes=("at",), classes=("0", "1"), transform="none")
    known = Vocabulary(pa.array(["10", "17"])), Vocabulary(pa.array(["Sunday", None]))
    Encoder("parquet", columns, Numbers.from_list([{}]), known, ()).save(tmp_path / "e")
    assert "parts" not in (tmp_path / "e/encoder.json").read_text()
    encoder = Encoder.load(tmp_path / "e")
    table = pa.table({"x": [1.0, 2.0], "at": [FIRST, None], "label": [0, 1]})
    batch, _ = encoder.encode(to_block(table, encoder.columns, labelled=False))
    assert (batch.dense.tolist(), batch.categorical.tolist()) == ([[1], [2]], [[1, 1], [0, 2]])
    path = write(tmp_path / "t.parquet", at=shuffled())
    grown = prepare(path, tmp_path / "c", split="time:1,0,0", min_frequency=1, grow=tmp_path / "e").encoder
    assert grown.schema.dense_names == ("x",)
    assert grown.schema.categorical_names == ("at.hour", "at.weekday")
    assert grown.schema.cardinalities == (25, 9)


def test_dates_beyond_nanoseconds_order_rows(tmp_path):
    """9999-12-31 stands for "never" in many a table."""
    moments = [datetime.datetime(9999, 12, 31), *shuffled()[1:]]
    cache = prepare(write(tmp_path / "t.parquet", until=pa.array(moments, pa.timestamp("us"))), tmp_path / "c")
    assert "by column until" in cache.report
    train = {row["until.year"] for row in values_of(cache, next(cache.batches("train", ROWS)))}
    assert train == {2023, 2024}
