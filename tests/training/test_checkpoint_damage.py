"""Any change to any byte of a checkpoint is a CheckpointError that names the file; nothing else ever comes out."""

import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastcross.files import atomic_with_checksum
from fastcross.training import checkpoint
from fastcross.training.checkpoint import CheckpointError

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
