"""A checkpoint comes back bit for bit, runs no code, and is never half written."""

import math
import os
import pickle
import signal
import stat
import subprocess
import sys
import time

import pytest
import torch

from fastcross.training import checkpoint


def test_round_trip_of_everything(tmp_path):
    table = torch.randn(4, 6)
    state = {
        "model": {
            "table": table,
            "half": torch.randn(3).bfloat16(),
            "count": torch.tensor(7),
            "none": torch.empty(0, 3),
        },
        "views": [table[:, 1], table[1:3], table],
        "optimiser": {"state": {0: {"step": 3, "m": torch.randn(2, dtype=torch.float64)}}, "betas": (0.9, 0.999)},
        "numbers": [None, True, 1, 0.1, math.inf, "text with ünïcode", {}],
        "rng": torch.get_rng_state(),
    }
    checkpoint.save(tmp_path / "c.safetensors", state)
    loaded = checkpoint.load(tmp_path / "c.safetensors")
    assert_same(loaded, state)


def assert_same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


def test_adam_state_round_trips(tmp_path):
    weight = torch.nn.Parameter(torch.randn(5))
    optimiser = torch.optim.Adam([weight])
    weight.sum().backward()
    optimiser.step()
    checkpoint.save(tmp_path / "c", optimiser.state_dict())
    optimiser.load_state_dict(checkpoint.load(tmp_path / "c"))
    assert_same(checkpoint.load(tmp_path / "c"), optimiser.state_dict())


def test_objects_are_refused_by_name(tmp_path):
    with pytest.raises(TypeError, match=r"object at model\.bad"):
        checkpoint.save(tmp_path / "c", {"model": {"bad": object()}})
    assert list(tmp_path.iterdir()) == []


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("ran",)


@pytest.mark.parametrize("damage", ["truncated", "empty", "text", "pickle", "foreign"])
def test_damaged_files_say_so_and_run_nothing(tmp_path, monkeypatch, damage):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "c.safetensors"
    checkpoint.save(path, {"w": torch.zeros(1000)})
    whole = path.read_bytes()
    if damage == "foreign":
        from safetensors.torch import save_file

        save_file({"w": torch.zeros(3)}, path)
    else:
        path.write_bytes(
            {"truncated": whole[:-100], "empty": b"", "text": b"not a checkpoint", "pickle": pickle.dumps(Malicious())}[
                damage
            ]
        )
    with pytest.raises(checkpoint.CheckpointError, match=r"c\.safetensors"):
        checkpoint.load(path)
    assert not (tmp_path / "ran").exists()


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def fail_half_way():
        with checkpoint.atomic(path) as temporary:
            temporary.write_text("half of the n")
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        fail_half_way()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_others_may_read_what_the_umask_allows(tmp_path):
    old = os.umask(0o022)
    try:
        checkpoint.save(tmp_path / "c", {"w": torch.zeros(1)})
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == 0o644


WRITER = """
import sys, torch
from fastcross.training import checkpoint
for n in range(100_000):
    checkpoint.save(sys.argv[1], {"n": n, "w": torch.full((300_000,), float(n))})
    print(n, flush=True)
"""


def test_killed_while_writing_the_file_is_whole(tmp_path):
    """SIGKILL at an arbitrary moment of a stream of writes: what is on disk is one complete version."""
    path = tmp_path / "c.safetensors"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    for _ in range(3):
        written = int(writer.stdout.readline())
    time.sleep(0.0123)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    state = checkpoint.load(path)
    assert state["n"] >= written
    assert torch.equal(state["w"], torch.full((300_000,), float(state["n"])))
