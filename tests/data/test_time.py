"""Times: which column orders the rows of a split by time, and what a date says."""

import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fastcross.cli.main import main
from fastcross.data import Cache, prepare

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
