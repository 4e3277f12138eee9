"""Vocabularies and hashing."""

from collections import Counter

import numpy as np
import pytest

pytest.importorskip("pyarrow")
import pyarrow as pa

from fastcross.data import encoder, prepare, read_for_prediction
from fastcross.data.blocks import hash_strings
from fastcross.data.encoder import Hashing, Vocabulary, count_values
from fastcross.data.generate import write_click_log


def test_min_frequency_order_and_missing():
    pairs = [(pa.array(["b", "a", None]), np.array([3, 1, 2])), (pa.array(["a", "c", "d"]), np.array([1, 9, 0]))]
    words = count_values(pairs, 2)
    assert words.values.to_pylist() == ["c", "b", "a", None]  # by count; at equal counts by text, missing last
    assert words.cardinality == 5
    assert words.ids(pa.array(["a", "x", None, "c"])).tolist() == [3, 0, 4, 1]
    assert count_values(pairs, 3).ids(pa.array(["a", None, "b"])).tolist() == [0, 0, 2]
    assert count_values([(pa.array(["y", "x", "z"]), np.array([2, 2, 2]))], 1).values.to_pylist() == ["x", "y", "z"]
    assert count_values(pairs, 0).cardinality == 5, "a value that the training part does not have gets no id"


def test_merging_in_pieces_changes_nothing(monkeypatch):
    rng = np.random.default_rng(0)
    pairs = [(pa.array([f"{i:x}" for i in rng.integers(0, 300, 50)]), rng.integers(0, 4, 50)) for _ in range(40)]
    expected = Counter()
    for values, counts in pairs:
        for value, count in zip(values.to_pylist(), counts.tolist(), strict=True):
            expected[value] += count
    whole = count_values(pairs, 5)
    monkeypatch.setattr(encoder, "MERGE_AT", 64)
    assert count_values(pairs, 5).values.equals(whole.values)
    assert set(whole.values.to_pylist()) == {value for value, count in expected.items() if count >= 5}


def test_saved_and_loaded(tmp_path):
    words = Vocabulary(pa.array(["ü", None, "x" * 1000]))
    checksum = words.save(tmp_path / "words.arrow")
    loaded = Vocabulary.load(tmp_path / "words.arrow", {"words.arrow": checksum})
    assert loaded.values.equals(words.values)
    assert loaded.digest() == words.digest()


def test_the_digest_is_that_of_the_values():
    words = pa.array(["a", "bc", None, ""])
    digest = Vocabulary(words).digest()
    assert Vocabulary(pa.array(["x", "a", "bc", None, "", "y"])[1:5]).digest() == digest, "a slice has an offset"
    for other in (["ab", "c", None, ""], ["a", "bc", "", None], ["a", "bc", None], ["a", "bd", None, ""], []):
        assert Vocabulary(pa.array(other, pa.string())).digest() != digest


def test_hash_is_fnv_1a_and_spreads():
    def fnv(text):
        h = 0xCBF29CE484222325
        for byte in text.encode():
            h = (h ^ byte) * 0x100000001B3 % 2**64
        return h ^ (h >> 32)

    texts = ["", "a", "foobar", "ü", "68fd1e64"]
    assert hash_strings(pa.array(texts)).tolist() == [fnv(text) for text in texts]
    assert hash_strings(pa.array(["xx", *texts])[1:]).tolist() == [fnv(text) for text in texts], "a slice has an offset"
    ids = Hashing(50).ids(pa.array([f"{i:08x}" for i in range(50_000)] + [None]))
    assert ids[-1] == 0
    counts = np.bincount(ids[:-1], minlength=51)
    assert counts[0] == 0
    assert counts[1:].min() > 850
    assert counts[1:].max() < 1150


def test_hashed_cache(tmp_path):
    write_click_log(tmp_path / "log.tsv", 500)
    cache = prepare(tmp_path / "log.tsv", tmp_path / "cache", hash_buckets=100)
    assert cache.schema.cardinalities == (101,) * 26
    batch = next(cache.batches("train", 429))
    assert batch.categorical.max() <= 100
    predicted = next(iter(read_for_prediction(tmp_path / "log.tsv", cache, batch_size=429)))
    assert predicted.categorical.equal(batch.categorical)
    with pytest.raises(ValueError, match="hash_buckets"):
        prepare(tmp_path / "log.tsv", tmp_path / "cache", hash_buckets=0)
