"""A checkpoint comes back bit for bit and runs no code; any change to any byte is an error that names the file."""

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
from safetensors.torch import load_file, save_file

from fastcross import files
from fastcross.files import atomic_with_checksum
from fastcross.training import checkpoint
from fastcross.training.checkpoint import CheckpointError


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


STATE = {"step": 3, "model": {"w": torch.arange(6.0), "n": torch.tensor(7)}, "betas": (0.9, 0.999)}


@pytest.fixture
def path(tmp_path):
    checkpoint.save(tmp_path / "c.safetensors", STATE)
    return tmp_path / "c.safetensors"


def refused(path):
    with pytest.raises(CheckpointError, match=r"c\.safetensors"):
        checkpoint.load(path)
    return True


def test_every_byte(path):
    """safetensors itself notices fewer than half of these: not values, names, dtypes of one size, or spaces."""
    whole = path.read_bytes()
    assert all(checkpoint.load(path)["model"]["w"] == STATE["model"]["w"])
    for position in range(len(whole)):
        for change in (1 << (position % 8), 0x20):  # 0x20 turns small letters into capitals
            damaged = bytearray(whole)
            damaged[position] ^= change
            path.write_bytes(damaged)
            assert refused(path), (position, change)


def test_lengths(path):
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert refused(path)
    for more in (b"\0", b" " * 8, whole):
        path.write_bytes(whole + more)
        assert refused(path)


def test_a_hole_in_a_large_file(tmp_path):
    """A copy that lost blocks: they read as zeros, and the length is right."""
    path = tmp_path / "c.safetensors"
    checkpoint.save(path, {"table": torch.ones(5_000_000)})  # 20 MB, three pieces
    whole = path.read_bytes()
    for start in (1 << 20, 8 << 20, len(whole) - 4096):
        with open(path, "r+b") as file:
            file.seek(start)
            file.write(b"\0" * 4096)
        assert refused(path)
        path.write_bytes(whole)
    pieces = bytearray(whole)
    first = int.from_bytes(whole[:8], "little") + 8
    pieces[first : first + 64], pieces[-64:] = b"\1" * 64, b"\2" * 64
    path.write_bytes(pieces)
    assert refused(path)


def forge(path, state, **metadata):
    """A file whose checksum is right, with any text as its structure."""
    with atomic_with_checksum(path) as temporary:
        save_file({"w": torch.zeros(2)}, temporary, metadata={"format": checkpoint.FORMAT, "state": state} | metadata)


@pytest.mark.parametrize(
    "state",
    [
        "",
        "[",
        "[]",
        "3",
        '"text"',
        "{}",
        '{"tensor": "missing"}',
        '{"tensor": ["w"]}',
        '{"tensor": {}}',
        '{"dict": 3}',
        '{"dict": [[1]]}',
        '{"dict": [[[1], 2]]}',
        '{"dict": [[{}, 2]]}',
        '{"list": null}',
        '{"tuple": 1.5}',
        '{"set": []}',
        '{"dict": [], "list": []}',
        '{"list": ' * 5000 + "[]" + "}" * 5000,
        "[" * 200_000,
        '{"dict": [["a", 1' + "0" * 5000 + "]]}",
    ],
)
def test_structures_that_nobody_wrote(tmp_path, state):
    """0.1 leaked KeyError, ValueError, TypeError, AttributeError and RecursionError."""
    path = tmp_path / "c.safetensors"
    forge(path, state)
    assert refused(path)


def test_headers_that_nobody_wrote(tmp_path):
    path = tmp_path / "c.safetensors"
    forge(path, "{}", format="another")
    with pytest.raises(CheckpointError, match="it has format 'another'"):
        checkpoint.load(path)
    with atomic_with_checksum(path) as temporary:
        save_file({"w": torch.zeros(2)}, temporary)
    assert refused(path)
    for header in (b"[]", b"{}", b'{"__metadata__": 3}', b"null", b"\xff\xff", b"[" * 100_000):
        with atomic_with_checksum(path) as temporary:
            temporary.write_bytes(len(header).to_bytes(8, "little") + header)
        assert refused(path)


def test_a_checksum_that_is_missing_or_another(path):
    beside = path.with_name("c.safetensors.checksum")
    whole = beside.read_bytes()
    for position in range(len(whole)):
        beside.write_bytes(whole[:position] + bytes([whole[position] ^ 0x20]) + whole[position + 1 :])
        with pytest.raises(CheckpointError, match=r"c\.safetensors is not .* checksum"):
            checkpoint.load(path)
    beside.write_bytes(b"0" * 64 + b"\n")
    with pytest.raises(CheckpointError, match=r"its checksum is [0-9a-f]{12}, in c\.safetensors\.checksum it is 0{12}"):
        checkpoint.load(path)
    for damaged in (b"", whole[:-1], whole + b" ", whole[:30], b"\xff" * 65):
        beside.write_bytes(damaged)
        assert refused(path)
    beside.unlink()
    with pytest.raises(CheckpointError, match=r"its checksum, c\.safetensors\.checksum, is not there"):
        checkpoint.load(path)


def test_other_tools_read_the_tensors(path):
    tensors = load_file(path)
    assert torch.equal(tensors["model.w"], STATE["model"]["w"])


def test_a_file_that_is_not_there_says_so(tmp_path):
    with pytest.raises(FileNotFoundError):
        checkpoint.load(tmp_path / "absent")
    os.mkdir(tmp_path / "folder")
    with pytest.raises(IsADirectoryError):
        checkpoint.load(tmp_path / "folder")
