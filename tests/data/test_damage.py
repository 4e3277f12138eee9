"""Damage: every changed byte of every file of a cache is noticed before it is used, and the file is named."""

import json
import shutil

import numpy as np
import pytest

pytest.importorskip("pyarrow")
from fastcross.data import Cache, DataError, prepare


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("damage") / "table.csv"
    rng = np.random.default_rng(0)
    with open(path, "w") as file:
        file.write("y,x,city,tags\n")
        for i in range(300):
            file.write(f"{i % 2},{rng.normal():.5f},{'abc'[rng.integers(3)]},{'p|q' if i % 3 else 'r'}\n")
    return path


@pytest.fixture
def cache(table, tmp_path):
    return prepare(table, tmp_path / "cache", min_frequency=1)


def use_all(path):
    """What training, evaluation and prediction read."""
    cache = Cache.open(path)
    for part in cache.sizes:
        list(cache.batches(part, 100))
    return cache.encoder


def files_of(cache):
    return sorted(path for path in cache.path.rglob("*") if path.is_file())


def test_every_file_is_covered(cache):
    names = {str(path.relative_to(cache.path)) for path in files_of(cache)}
    assert {"manifest.json", "encoder/encoder.json", "encoder/bag0.arrow", "train/dense.npy"} < names
    rng = np.random.default_rng(3)
    for path in files_of(cache):
        whole = path.read_bytes()
        name = "manifest" if path.name == "manifest.json" else path.name
        for position in {0, len(whole) - 1, *rng.integers(0, len(whole), 8).tolist()}:
            changed = bytearray(whole)
            changed[position] ^= 1 << int(rng.integers(8))
            path.write_bytes(changed)
            with pytest.raises(DataError, match=name):
                use_all(cache.path)
        path.write_bytes(whole)
    use_all(cache.path)


def test_opening_reads_no_array(cache, monkeypatch):
    monkeypatch.setattr("fastcross.data.cache.check_content", lambda *_: pytest.fail("an array was read"))
    assert Cache.open(cache.path).schema == cache.schema


def test_only_the_part_that_is_used_is_read(cache):
    file = cache.path / "test" / "dense.npy"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    opened = Cache.open(cache.path)
    list(opened.batches("train", 100))
    with pytest.raises(DataError, match=r"test/dense\.npy: the cache is damaged; expected checksum \w{8}, got \w{8}"):
        list(opened.batches("test", 100))


def test_prepare_mends_a_damaged_cache(cache, table):
    """A damaged cache must not be reused, though fingerprint and sizes are right: the error says to prepare again."""
    for file in (cache.path / "train" / "label.npy", cache.path / "encoder" / "categorical0.arrow"):
        whole = file.read_bytes()
        file.write_bytes(whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:])
        prepare(table, cache.path, min_frequency=1)
        assert file.read_bytes() == whole


def test_an_encoder_of_another_cache_is_noticed(cache, table, tmp_path):
    """Whole in itself, but not the one that made these arrays."""
    other = prepare(table, tmp_path / "other", min_frequency=200)
    shutil.rmtree(cache.path / "encoder")
    shutil.copytree(other.path / "encoder", cache.path / "encoder")
    with pytest.raises(DataError, match="another encoder"):
        _ = Cache.open(cache.path).encoder


@pytest.mark.parametrize("content", [b"", b"[]", b"7", b"{}", b"\xff\xfe", b'{"format_version": 3}', b"[" * 100_000])
def test_what_is_no_manifest(cache, content):
    (cache.path / "manifest.json").write_bytes(content)
    with pytest.raises(DataError, match=r"manifest\.json"):
        Cache.open(cache.path)


def test_a_forged_manifest_is_refused(cache):
    file = cache.path / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["sizes"]["train"] -= 1
    file.write_text(json.dumps(manifest, indent=1) + "\n")
    with pytest.raises(DataError, match=r"manifest\.json: the file is damaged"):
        Cache.open(cache.path)
