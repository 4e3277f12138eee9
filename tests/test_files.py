"""Files and folders that stand whole or not at all."""

import json
import os
import threading

import pytest

from fastcross.files import building, read_checked_json, write_checked_json


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
