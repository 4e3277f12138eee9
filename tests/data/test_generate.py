"""The generated click log: its format, its truth, and that the crosses are where it says."""

import gzip
import re

import numpy as np
import pytest

pytest.importorskip("pyarrow")
from fastcross.data import DataError, prepare, read_for_prediction
from fastcross.data.generate import read_info, write_click_log

LINE = re.compile(rb"[01](\t(-?\d+)?){13}(\t([0-9a-f]{8})?){26}\n")


def test_format_and_seed(tmp_path):
    info = write_click_log(tmp_path / "a.tsv", 1000, seed=1)
    lines = (tmp_path / "a.tsv").read_bytes().splitlines(keepends=True)
    assert len(lines) == 1000
    assert all(LINE.fullmatch(line) for line in lines)
    assert any(b"\t\t" in line for line in lines), "some values are missing"
    assert any(b"\t-" in line for line in lines), "some integers are negative"
    assert write_click_log(tmp_path / "b.tsv.gz", 1000, seed=1) == info
    assert gzip.decompress((tmp_path / "b.tsv.gz").read_bytes()) == (tmp_path / "a.tsv").read_bytes()
    write_click_log(tmp_path / "c.tsv", 1000, seed=2)
    assert (tmp_path / "c.tsv").read_bytes() != (tmp_path / "a.tsv").read_bytes()
    assert read_info(tmp_path / "a.tsv") == info
    assert read_info(tmp_path / "other.tsv") is None


def test_optimum(tmp_path):
    info = write_click_log(tmp_path / "a.tsv", 50_000)
    assert info.bayes_logloss < info.linear_logloss - 0.05 < info.base_logloss - 0.05
    parts = info.bayes_logloss_parts
    mixed = (parts["train"] * 42857 + parts["validation"] * 3571 + parts["test"] * 3572) / 50_000
    assert mixed == pytest.approx(info.bayes_logloss, rel=1e-9)
    clicks = sum(line.startswith(b"1") for line in (tmp_path / "a.tsv").read_bytes().splitlines())
    assert info.click_rate == clicks / 50_000
    p = info.click_rate
    assert info.base_logloss == pytest.approx(-p * np.log(p) - (1 - p) * np.log(1 - p))
    plain = write_click_log(tmp_path / "b.tsv", 50_000, degree_2=0.0, degree_3=0.0)
    assert plain.bayes_logloss == pytest.approx(plain.linear_logloss, abs=1e-6), (
        "without crosses nothing is left to find"
    )


def test_a_cross_is_seen_in_pairs_and_hardly_in_single_fields(tmp_path):
    write_click_log(tmp_path / "a.tsv", 60_000, degree_3=0.0, degree_2=3.0)
    cache = prepare(tmp_path / "a.tsv", tmp_path / "cache", split="time:1,0,0")
    batch = next(cache.batches("train", 60_000))
    label = batch.label.numpy()

    def explained(*fields):
        """The share of the label's variance that the click rates of the groups explain, less what chance would."""
        ids = batch.categorical.numpy()
        _, group = np.unique(sum(ids[:, f] * 100**i for i, f in enumerate(fields)), return_inverse=True)
        counts = np.bincount(group)
        rates = np.bincount(group, label) / counts
        between = (counts * (rates - label.mean()) ** 2).sum() / len(label)
        return between / label.var() - (len(counts) - 1) / len(label)

    single = max(explained(f) for f in (0, 4))
    assert explained(0, 4) > 10 * single, "C1 x C5, one from u and one from v"
    assert explained(0, 1) < explained(0, 4) / 3, "C1 x C2, both from u"


def test_prediction_of_a_log_without_labels(tmp_path):
    write_click_log(tmp_path / "a.tsv", 2000)
    cache = prepare(tmp_path / "a.tsv", tmp_path / "cache", split="time:1,0,0", min_frequency=5)
    whole = next(cache.batches("train", 2000))
    lines = (tmp_path / "a.tsv").read_bytes().splitlines()
    new = tmp_path / "new.tsv"
    new.write_bytes(b"".join(line.split(b"\t", 1)[1] + b"\n" for line in lines))
    for source in (new, tmp_path / "a.tsv"):  # labels absent, labels ignored
        rows = read_for_prediction(source, tmp_path / "cache", batch_size=2000)
        (batch,) = rows
        assert batch.label is None
        assert batch.dense.equal(whole.dense)
        assert batch.categorical.equal(whole.categorical)
        rare = (whole.categorical[:, 25] == 0).sum().item()
        assert 0 < rows.unknown["C26"] <= rare
        assert rows.unknown["C1"] <= (whole.categorical[:, 0] == 0).sum().item()
        assert rows.rows == 2000
    fields = new.read_bytes().splitlines()
    fields[6] = fields[6].rsplit(b"\t", 1)[0]
    new.write_bytes(b"\n".join(fields))
    with pytest.raises(DataError, match=r"new\.tsv, line 7: expected 39 columns, got 38"):
        list(read_for_prediction(new, cache))
    rows = read_for_prediction(new, cache, on_error="skip")
    assert sum(len(batch) for batch in rows) == 1999
    assert rows.problems.places == [(str(new), 7)]
