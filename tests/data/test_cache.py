"""The cache: batches, order, reuse, atomic writing."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow")
from fastcross.data import Cache, DataError, prepare
from fastcross.data.cache import RowOrder, Split, assign_parts
from fastcross.data.generate import write_click_log


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_click_log(folder / "log.tsv", 3000, seed=1)
    return prepare(folder / "log.tsv", folder / "cache", min_frequency=2)


def rows_of(batches):
    return torch.cat([torch.cat([b.dense, b.categorical, b.label[:, None]], dim=1) for b in batches])


def test_types(cache):
    batch = next(cache.batches("train", 64))
    assert batch.dense.shape == (64, len(cache.schema.dense_names))
    assert batch.dense.dtype == torch.float32
    assert batch.categorical.shape == (64, 26)
    assert batch.categorical.dtype == torch.int64
    assert batch.label.dtype == torch.float32
    assert batch.bags == ()
    batch.dense.add_(1)  # a copy: writing to it must not reach the file
    assert not batch.dense.equal(next(cache.batches("train", 64)).dense)


def test_in_order_covers_the_part(cache):
    whole = rows_of(cache.batches("train", 10_000))
    assert len(whole) == cache.sizes["train"]
    assert rows_of(cache.batches("train", 100)).equal(whole)
    assert cache.num_batches("train", 100) == 26
    assert cache.num_batches("train", 100, drop_last=True) == 25
    assert len(rows_of(cache.batches("train", 100, drop_last=True))) == 2500


def test_shuffle_is_a_permutation_given_by_seed_and_epoch(cache):
    whole = rows_of(cache.batches("train", 10_000))
    first = rows_of(cache.batches("train", 100, shuffle=True, seed=5, epoch=2))
    assert rows_of(cache.batches("train", 100, shuffle=True, seed=5, epoch=2)).equal(first)
    assert not rows_of(cache.batches("train", 100, shuffle=True, seed=5, epoch=3)).equal(first)
    assert not rows_of(cache.batches("train", 100, shuffle=True, seed=6, epoch=2)).equal(first)
    assert not first.equal(whole)
    assert sorted(map(tuple, first.tolist())) == sorted(map(tuple, whole.tolist()))


@pytest.mark.parametrize("shuffle", [False, True])
def test_start_resumes(cache, shuffle):
    whole = list(cache.batches("train", 100, shuffle=shuffle, epoch=1))
    rest = list(cache.batches("train", 100, shuffle=shuffle, epoch=1, start=7))
    assert len(rest) == len(whole) - 7
    assert rows_of(rest).equal(rows_of(whole[7:]))


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_every_row(cache, world_size):
    ranks = [list(cache.batches("train", 64, shuffle=True, rank=r, world_size=world_size)) for r in range(world_size)]
    assert {len(batches) for batches in ranks} == {cache.num_batches("train", 64)}
    for shares, whole in zip(zip(*ranks, strict=True), cache.batches("train", 64, shuffle=True), strict=True):
        assert rows_of(shares).equal(rows_of([whole]))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_bad_arguments(cache):
    with pytest.raises(ValueError, match="part must be one of train, validation, test; got 'valid'"):
        next(cache.batches("valid", 10))
    with pytest.raises(ValueError, match="rank < world_size; got 10, 2, 2"):
        next(cache.batches("train", 10, rank=2, world_size=2))


@pytest.mark.parametrize(("size", "window", "block"), [(1000, 128, 16), (1003, 128, 16), (5, 128, 16), (0, 128, 16)])
def test_row_order_by_windows(size, window, block):
    order = RowOrder(size, 1, 2, window=window, block=block)
    whole = np.concatenate([np.empty(0, np.int64), *(order.rows(lo, min(lo + 37, size)) for lo in range(0, size, 37))])
    np.testing.assert_array_equal(np.sort(whole), np.arange(size))
    if size > 100:
        np.testing.assert_array_equal(RowOrder(size, 1, 2, window=window, block=block).rows(500, 600), whole[500:600])
        # A batch must mix rows from all over the file: a window holds 8 of about 63 blocks.
        assert len(np.unique(whole[:64] // block)) >= 7
        assert abs(np.corrcoef(np.arange(size), whole)[0, 1]) < 0.5


def test_splits():
    part = assign_parts(1000, Split.parse("time"), 0)
    assert np.bincount(part).tolist() == [857, 71, 72]
    assert (part[:857] == 0).all()
    assert len(set(part[857:900].tolist())) == 2, "the last seventh is dealt at random"
    assert np.bincount(assign_parts(1000, Split.parse((0.9, 0, 0.1)), 0), minlength=3).tolist() == [900, 0, 100]
    random = assign_parts(1000, Split.parse("random:0.5,0.25,0.25"), 3)
    assert np.bincount(random).tolist() == [500, 250, 250]
    assert 200 < (random[:500] == 0).sum() < 300
    assert not np.array_equal(random, assign_parts(1000, Split.parse("random:0.5,0.25,0.25"), 4))
    assert np.bincount(assign_parts(30, Split.parse("files"), 0, [10, 10, 10])).tolist() == [18, 2, 10]
    for bad in ("weekly", "random:1,2", "random:a,b,c", (0.5, 0.5), (1, 1, -1), ""):
        with pytest.raises(ValueError, match="split must be"):
            Split.parse(bad)


def test_reused_until_input_or_configuration_changes(tmp_path):
    log, folder = tmp_path / "log.tsv", tmp_path / "cache"
    write_click_log(log, 500, seed=1)
    first = prepare(log, folder)
    born = (folder / "manifest.json").stat().st_mtime_ns
    assert prepare(log, folder).fingerprint == first.fingerprint
    assert (folder / "manifest.json").stat().st_mtime_ns == born
    other = prepare(log, folder, min_frequency=3)
    assert other.fingerprint != first.fingerprint
    with pytest.raises(DataError, match="made from other data or with another configuration"):
        Cache.open(folder, fingerprint=first.fingerprint)
    write_click_log(log, 600, seed=1)
    assert sum(prepare(log, folder, min_frequency=3).sizes.values()) == 600
    log.rename(tmp_path / "moved.tsv")  # its place is no part of its identity
    born = (folder / "manifest.json").stat().st_mtime_ns
    prepare(tmp_path / "moved.tsv", folder, min_frequency=3)
    assert (folder / "manifest.json").stat().st_mtime_ns == born


def test_open_refuses_what_is_not_a_whole_cache(tmp_path):
    with pytest.raises(DataError, match="no cache here"):
        Cache.open(tmp_path / "nothing")
    log, folder = tmp_path / "log.tsv", tmp_path / "cache"
    write_click_log(log, 500, seed=1)
    prepare(log, folder)
    with open(folder / "train" / "dense.npy", "ab") as file:
        file.truncate(1000)
    with pytest.raises(DataError, match=r"dense\.npy: the cache is damaged; expected \d+ bytes, got 1000"):
        Cache.open(folder)
    prepare(log, folder)  # rebuilds it
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format_version": 3', '"format_version": 99'))
    with pytest.raises(DataError, match="cache format 99"):
        Cache.open(folder)
    manifest.write_text("{")
    with pytest.raises(DataError, match=r"manifest\.json: the file is damaged"):
        Cache.open(folder)


def test_a_folder_that_is_not_a_cache_is_left_alone(tmp_path):
    write_click_log(tmp_path / "log.tsv", 100)
    with pytest.raises(DataError, match="exists and is not a cache"):
        prepare(tmp_path / "log.tsv", tmp_path)
    assert (tmp_path / "log.tsv").exists()


def test_killed_in_the_middle_leaves_nothing_half_written(tmp_path):
    log, folder = tmp_path / "log.tsv", tmp_path / "cache"
    write_click_log(log, 500, seed=1)
    prepare(log, folder)
    code = (
        "import sys, time; from fastcross.data import prepare\n"
        "def slow(stage, done, total):\n"
        "    print(stage, flush=True)\n"
        "    if stage == 'write': time.sleep(60)\n"
        "prepare(sys.argv[1], sys.argv[2], min_frequency=3, progress=slow)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, log, folder], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while process.stdout.readline().strip() != "write":
        assert process.poll() is None
    assert Cache.open(folder).manifest["configuration"]["min_frequency"] == 10
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert Cache.open(folder).manifest["configuration"]["min_frequency"] == 10
    assert len([p for p in tmp_path.iterdir() if "building" in p.name]) == 1
    prepare(log, folder, min_frequency=3)
    assert Cache.open(folder).manifest["configuration"]["min_frequency"] == 3
    assert sorted(os.listdir(tmp_path)) == ["cache", "log.tsv", "log.tsv.info.json"], "the next one tidies up"
