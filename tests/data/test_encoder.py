"""The encoder: saved and loaded, known by its content, and every damaged byte noticed."""

import shutil

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow")
from fastcross.data import DataError, Encoder, prepare, read_for_prediction

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
