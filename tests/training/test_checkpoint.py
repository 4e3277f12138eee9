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

from fastcross import files
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


def test_paths_that_read_alike_are_kept_apart(tmp_path):
    """In 0.1 the second of two tensors with the path a.b replaced the first."""
    t, u, v = torch.zeros(2), torch.ones(3), torch.full((4,), 2.0)
    state = {
        "a": {"b": t, "b~1": v},
        "a.b": u,
        0: t + 5,
        "0": u + 5,
        "": v + 5,
        "__metadata__": t + 6,
        "\udc80": u + 6,
        "list": [t, {"0": u}],
        "list.0": v,
    }
    checkpoint.save(tmp_path / "c", state)
    assert_same(checkpoint.load(tmp_path / "c"), state)


DTYPES = (torch.bool, torch.uint8, torch.int16, torch.int32, torch.float16, torch.bfloat16, torch.float64)


def test_tensors_of_every_make(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "shared": [base, base, base.view(-1), base[:2], base[1]],
        "transposed": base.T,
        "strided": base[:, ::2],
        "expanded": torch.ones(1).expand(5),
        "empty": [torch.empty(0), torch.empty(0, 3), torch.empty(0, dtype=torch.int64)],
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "parameter": torch.nn.Parameter(base.clone()).detach(),
        "negated": torch.complex(base, -base).imag.neg(),
        "dtypes": [torch.ones(3, dtype=dtype) for dtype in DTYPES],
    }
    checkpoint.save(tmp_path / "c", state)
    assert_same(checkpoint.load(tmp_path / "c"), state)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"model": {"bad": object()}}, r"object at model\.bad"),
        ({"a": {(1, 2): 3}}, r"keys are strings and integers; got \(1, 2\) at a"),
        ({None: 3}, "got None at the top"),
        ({True: 3}, "got True at the top"),
        ({"a": {0.5: torch.zeros(1)}}, r"got 0\.5 at a"),
        ({"a": torch.empty(3, device="meta")}, "on meta at a"),
        ({"a": torch.eye(3).to_sparse()}, "torch.sparse_coo on cpu at a"),
        ({"a": {1, 2}}, "set at a"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(tmp_path, state, message):
    with pytest.raises(TypeError, match=message):
        checkpoint.save(tmp_path / "c", state)
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_contains_itself_is_refused(tmp_path):
    state = {}
    state["self"] = state
    with pytest.raises(TypeError, match="contains itself"):
        checkpoint.save(tmp_path / "c", state)


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
        with files.atomic_with_checksum(path) as temporary:
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


def test_verify_names_the_file_whatever_byte_of_its_header_changed(tmp_path):
    """As a resumed run verifies its best model without loading it."""
    path = tmp_path / "state.safetensors"
    checkpoint.save(path, {"step": 3, "w": torch.ones(2)})
    whole = path.read_bytes()
    checkpoint.verify(path)
    for position in range(8 + int.from_bytes(whole[:8], "little")):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 2]) + whole[position + 1 :])
        with pytest.raises(checkpoint.CheckpointError, match=r"state\.safetensors"):
            checkpoint.verify(path)


def test_a_file_that_is_replaced_while_it_is_read_is_no_damage(tmp_path, monkeypatch):
    """A training goes on saving while somebody looks: the checksum of one file, the values of the next."""
    path, newer = tmp_path / "last.safetensors", iter(range(1, 4))
    checkpoint.save(path, {"step": 0, "w": torch.zeros(3)})
    damage = files.damage

    def look_and_replace(path):
        found = damage(path)
        for step in newer:
            checkpoint.save(path, {"step": step, "w": torch.full((3 + step,), float(step))})
            break
        return found

    monkeypatch.setattr(checkpoint, "damage", look_and_replace)
    found = checkpoint.load(path)
    assert found["step"] == 3
    assert torch.equal(found["w"], torch.full((6,), 3.0))
