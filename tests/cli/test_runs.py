"""A run folder and a cache as a user meets them: moved, outlived by their data, mixed up, damaged."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from fastcross.cli.main import main
from fastcross.data import Cache, Encoder
from tests.cli.helpers import SMALL


def write_colours(path, names):
    """600 rows whose label is known by the colour; the names of the colours are all that differs between files."""
    with open(path, "w") as file:
        file.write("colour,label\n")
        file.writelines(f"{names[i * 7 % 5]},{int(i * 7 % 5 < 2)}\n" for i in range(600))


@pytest.fixture
def colours():
    """Two files whose caches have the same columns and cardinalities, and a run on the first."""
    options = ["--split", "random", "--batch-size", "32", "--lr", "0.05", "--epochs", "5"]
    write_colours("first.csv", "abcde")
    write_colours("second.csv", "edcba")
    assert main(["prepare", "second.csv", "--split", "random", "--cache", "second.cache"]) == 0
    assert main(["train", "--data", "first.csv", "--cache", "first.cache", "--run", "run", *SMALL, *options]) == 0
    assert Cache.open("first.cache").schema == Cache.open("second.cache").schema


@pytest.mark.parametrize(
    "command",
    [
        ("evaluate", "run", "--data", "second.cache"),
        ("evaluate", "run", "--cache", "second.cache"),
        ("evaluate", "run", "--data", "first.csv", "--cache", "second.cache"),
        ("predict", "run", "first.csv", "--output", "p.csv", "--cache", "second.cache"),
    ],
    ids=lambda command: " ".join(command),
)
def test_a_cache_of_another_encoder_is_refused_with_both_fingerprints(colours, command, fails):
    """Names and cardinalities agree, but an id means another colour: 0.1.0 evaluated it, and was wrong."""
    expected, found = (Encoder.load(folder).fingerprint[:12] for folder in ("run/encoder", "second.cache/encoder"))
    assert expected != found
    assert f"expected encoder {expected}, got {found}" in fails(*command)
    assert not Path("p.csv").exists()


def test_a_cache_of_the_same_encoder_is_taken(colours, capsys):
    shutil.move("first.cache", "moved.cache")
    for options in (["--data", "moved.cache"], ["--cache", "moved.cache"]):
        assert main(["evaluate", "run", *options]) == 0
        assert "accuracy 1.0000" in capsys.readouterr().out
    assert main(["predict", "run", "first.csv", "--output", "p.csv", "--cache", "moved.cache"]) == 0


def test_a_run_that_has_moved_does_without_its_cache(colours, capsys, fails):
    assert main(["predict", "run", "first.csv", "--output", "before.npy"]) == 0
    shutil.move("run", "elsewhere")
    shutil.rmtree("first.cache")
    shutil.rmtree("user", ignore_errors=True)
    assert main(["predict", "elsewhere", "first.csv", "--output", "after.npy"]) == 0
    np.testing.assert_array_equal(np.load("before.npy"), np.load("after.npy"))
    assert main(["evaluate", "elsewhere", "--data", "first.csv"]) == 0
    assert "accuracy 1.0000" in capsys.readouterr().out
    assert main(["info", "elsewhere"]) == 0
    assert "first.cache: no cache here" in fails("evaluate", "elsewhere")


def test_training_on_an_updated_file_leaves_older_runs_as_they_were(colours, capsys):
    assert main(["predict", "run", "first.csv", "--output", "before.npy"]) == 0
    shutil.copy("first.csv", "old.csv")
    write_colours("first.csv", "vwxyz")
    command = ["train", "--data", "first.csv", "--cache", "first.cache", "--run", "newer", "--split", "random", *SMALL]
    assert main(command) == 0
    assert main(["predict", "run", "old.csv", "--output", "after.npy"]) == 0
    np.testing.assert_array_equal(np.load("before.npy"), np.load("after.npy"))
    assert main(["evaluate", "run", "--data", "old.csv"]) == 0
    assert "accuracy 1.0000" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["[]", "{}", "3", '{"model": "dcn"}', "{", ""], ids=lambda text: text or "empty")
def test_a_config_that_is_none(run, log, fails, text):
    shutil.copytree(run, "damaged")
    Path("damaged/config.json").write_text(text)
    for command in (
        ("evaluate", "damaged"),
        ("predict", "damaged", log, "--output", "p.csv"),
        ("export", "damaged", "--output", "m.onnx"),
        ("info", "damaged"),
        ("train", "--resume", "damaged"),
        ("convert", "damaged", "out", "--to", "sharded"),
    ):
        message = fails(*command)
        assert "damaged/config.json" in message
        assert "defect" not in message
    assert not Path("out").exists()


def flip(path, at):
    content = bytearray(Path(path).read_bytes())
    content[at % len(content)] ^= 1
    Path(path).write_bytes(content)


@pytest.mark.parametrize("file", ["train/label.npy", "validation/dense.npy", "train/categorical.npy", "manifest.json"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_cache(cache, fails, file, damage):
    shutil.copytree(cache, "c")
    if damage == "flipped":
        flip(f"c/{file}", -1000)
    elif damage == "cut":
        Path("c", file).write_bytes(Path("c", file).read_bytes()[:-7])
    else:
        Path("c", file).unlink()
    message = fails("train", "--data", "c", "--run", "r", *SMALL)
    assert Path(file).name in message
    assert "defect" not in message
    assert not Path("r").exists()


@pytest.mark.parametrize("file", ["best.safetensors", "encoder/categorical3.arrow", "encoder/encoder.json"])
def test_a_damaged_run(run, log, fails, file):
    shutil.copytree(run, "damaged")
    flip(f"damaged/{file}", -50)
    message = fails("predict", "damaged", log, "--output", "p.csv")
    assert f"damaged/{file}" in message
    assert "defect" not in message
    assert not Path("p.csv").exists()
