"""The encoder: saved and loaded, known by its content, every damaged byte noticed; its vocabularies and hashes."""

import shutil
from collections import Counter

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow")
import pyarrow as pa

from fastcross.data import DataError, Encoder, encoder, prepare, read_for_prediction
from fastcross.data.blocks import hash_strings
from fastcross.data.encoder import Hashing, Vocabulary, count_values
from fastcross.data.generate import write_click_log

COLUMNS = {"label": "y", "dense": ["x"], "categorical": ["city"], "bags": ["tags"]}


def write_table(path, rows=300, seed=0, cities=("Rome", "Oslo", "Bern")):
    rng = np.random.default_rng(seed)
    with open(path, "w") as file:
        file.write("y,x,city,tags\n")
        for i in range(rows):
            file.write(f"{i % 2},{rng.normal():.6f},{cities[rng.integers(len(cities))]},{'a|b' if i % 3 else 'c'}\n")
    return path


@pytest.fixture
def cache(tmp_path):
    table = write_table(tmp_path / "table.csv")
    return prepare(table, tmp_path / "cache", columns=COLUMNS, min_frequency=1, split="time:1,0,0")


def test_a_copy_does_what_the_original_did(cache, tmp_path):
    cache.encoder.save(tmp_path / "copy")
    copy = Encoder.load(tmp_path / "copy")
    assert copy.fingerprint == cache.encoder.fingerprint == cache.encoder_fingerprint
    assert copy.schema == cache.schema
    assert copy.classes == ("0", "1")
    shutil.rmtree(cache.path)
    for source in (copy, tmp_path / "copy"):
        (batch,) = read_for_prediction(tmp_path / "table.csv", source)
        assert batch.categorical.min() > 0
        assert batch.dense.mean().abs() < 1e-6
        assert len(batch.bags[0].values) == 500


def test_a_block_is_cut_into_batches(cache, tmp_path):
    whole = next(cache.batches("train", 300))
    batches = list(read_for_prediction(tmp_path / "table.csv", cache, batch_size=77, labelled=True))
    assert [len(batch) for batch in batches] == [77, 77, 77, 69]
    for name in ("dense", "categorical", "label"):
        assert torch.cat([getattr(batch, name) for batch in batches]).equal(getattr(whole, name))
    assert torch.cat([batch.bags[0].values for batch in batches]).equal(whole.bags[0].values)
    starts = [batch.bags[0].offsets[0].item() for batch in batches]
    assert starts == [0, 0, 0, 0]
    assert batches[1].bags[0].offsets.equal(whole.bags[0].offsets[77:154] - whole.bags[0].offsets[77])


def test_the_fingerprint_is_that_of_the_content(cache, tmp_path):
    def made(name, seed=0, **options):
        path = write_table(tmp_path / f"{name}.csv", seed=seed)
        arguments = {"columns": COLUMNS, "min_frequency": 1, "split": "time:1,0,0"} | options
        return prepare(path, tmp_path / name, **arguments).encoder_fingerprint

    assert made("again") == cache.encoder_fingerprint, "places and times do not count"
    assert made("numbers", seed=1) != cache.encoder_fingerprint, "other means, though the schema is the same"
    assert made("hashed", hash_buckets=7) != made("hashed8", hash_buckets=8)


def test_a_cache_of_another_encoder_is_refused(cache, tmp_path):
    """Same names, same cardinalities, other cities: a model that is fed with it is silently wrong."""
    table = write_table(tmp_path / "other.csv", cities=("Lima", "Kyiv", "Nuuk"))
    other = prepare(table, tmp_path / "other", columns=COLUMNS, min_frequency=1, split="time:1,0,0")
    assert other.schema == cache.schema
    cache.check_encoder(cache.encoder.fingerprint)
    with pytest.raises(DataError, match="another encoder") as refused:
        other.check_encoder(cache.encoder.fingerprint)
    assert cache.encoder_fingerprint[:12] in str(refused.value)
    assert other.encoder_fingerprint[:12] in str(refused.value)


@pytest.mark.parametrize("name", ["encoder.json", "categorical0.arrow", "bag0.arrow"])
def test_every_changed_byte_is_noticed(cache, tmp_path, name):
    file = cache.path / "encoder" / name
    whole = file.read_bytes()
    rng = np.random.default_rng(1)
    for position in rng.choice(len(whole), 100, replace=False):
        changed = bytearray(whole)
        changed[position] ^= int(rng.integers(1, 256))
        file.write_bytes(changed)
        with pytest.raises(DataError, match=name.replace(".", r"\.")):
            Encoder.load(cache.path / "encoder")
    for cut in (b"", whole[:-1], whole + b"\n"):
        file.write_bytes(cut)
        with pytest.raises(DataError, match=name.replace(".", r"\.")):
            Encoder.load(cache.path / "encoder")
    file.unlink()
    with pytest.raises(DataError, match=name.replace(".", r"\.")):
        Encoder.load(cache.path / "encoder")


def test_encoders_of_other_versions_are_named(cache):
    from fastcross.files import read_checked_json, write_checked_json

    path = cache.path / "encoder" / "encoder.json"
    write_checked_json(path, read_checked_json(path) | {"encoder_version": 77})
    with pytest.raises(DataError, match="encoder version 77"):
        Encoder.load(path.parent)


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
