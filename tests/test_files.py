"""Files and folders that stand whole or not at all."""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from fastcross import files
from fastcross.files import atomic_with_checksum, building, damage, read_checked_json, write_checked_json


def test_a_failed_build_leaves_what_was_there(tmp_path):
    for content in ("old", "new"):
        with building(tmp_path / "folder") as folder:
            (folder / "file").write_text(content)
    with pytest.raises(ZeroDivisionError), building(tmp_path / "folder") as folder:
        (folder / "file").write_text(f"half, and then {1 / 0}")
    assert (tmp_path / "folder" / "file").read_text() == "new"
    assert os.listdir(tmp_path) == ["folder"]
    assert os.listdir(tmp_path / "folder") == ["file"]


def test_leftovers_of_killed_processes_are_removed(tmp_path):
    for name in (".folder.building-1-2", ".folder.replaced-1-2", ".other.building-1-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    with building(tmp_path / "folder"):
        pass
    assert sorted(os.listdir(tmp_path)) == [".other.building-1-2", "folder"]


def test_many_at_once(tmp_path):
    """Every one of them ends well, none removes what another is building, and the last one stands."""
    errors = []

    def build(name):
        try:
            for i in range(20):
                with building(tmp_path / "folder") as folder:
                    (folder / "file").write_text(f"{name} {i}")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=build, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert (tmp_path / "folder" / "file").read_text().split()[1] == "19"
    with building(tmp_path / "folder"):
        pass
    assert os.listdir(tmp_path) == ["folder"]


def test_checked_json(tmp_path):
    path = tmp_path / "file.json"
    content = {"number": 0.1 + 0.2, "large": 2**63, "text": "ü\n", "list": [1, None, True], "object": {"b": 1, "a": 2}}
    write_checked_json(path, content)
    assert read_checked_json(path) == content
    assert json.loads(path.read_text())["sha256"]
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        with pytest.raises(ValueError, match=r"file\.json: the file is damaged"):
            read_checked_json(path)


def test_a_file_beside_its_checksum(tmp_path):
    path = tmp_path / "file"
    for content in ("first", "second"):
        with atomic_with_checksum(path) as temporary:
            temporary.write_text(content)
        assert path.read_text() == content
        assert damage(path) is None
        assert (tmp_path / "file.checksum").read_text() == files.checksum(path) + "\n"
    path.write_text("first")  # was replaced: its checksum has gone
    assert "its checksum is" in damage(path)
    with pytest.raises(ZeroDivisionError), atomic_with_checksum(path) as temporary:
        temporary.write_text(f"half {1 / 0}")
    assert sorted(os.listdir(tmp_path)) == ["file", "file.checksum"]


WRITE = """
import importlib.util, os, signal, sys
spec = importlib.util.spec_from_file_location("files", sys.argv[1])
files = importlib.util.module_from_spec(spec)
spec.loader.exec_module(files)
replace, left = os.replace, [int(sys.argv[4])]
def count(source, target):
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    replace(source, target)
os.replace = count
with files.atomic_with_checksum(sys.argv[2]) as temporary:
    temporary.write_text(sys.argv[3])
"""


def killed_after(renames, path, content):
    """Three renames make a write: the checksums, the file, the checksum alone. The process dies before the next one."""
    process = subprocess.run([sys.executable, "-c", WRITE, files.__file__, str(path), content, str(renames)])
    assert process.returncode == (0 if renames == 3 else -signal.SIGKILL)


def test_killed_between_a_file_and_its_checksum_again_and_again(tmp_path):
    path, number, kept = tmp_path / "file", itertools.count(), ""
    for kills in itertools.product(range(3), repeat=2):
        for renames in (3, *kills):
            content = f"content {next(number)}"
            killed_after(renames, path, content)
            kept = kept if renames < 2 else content
            assert path.read_text() == kept
            assert damage(path) is None, kills
            path.write_text(kept[:-1])
            assert damage(path)
            path.write_text(kept)


def test_killed_before_the_first_file(tmp_path):
    path = tmp_path / "file"
    for renames in (0, 1):
        killed_after(renames, path, "content")
        assert not path.exists()
    with atomic_with_checksum(path) as temporary:
        temporary.write_text("content")
    assert damage(path) is None
