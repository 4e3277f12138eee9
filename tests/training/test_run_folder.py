"""A run folder: every byte that is read is verified."""

import shutil

import pytest

from fastcross.data import DataError
from fastcross.files import write_checked_json
from fastcross.training import Experiment, load_model
from fastcross.training.checkpoint import CheckpointError
from fastcross.training.run_folder import Run
from tests.training.helpers import tiny_experiment


@pytest.fixture(scope="module")
def finished(cache, tmp_path_factory):
    path = tmp_path_factory.mktemp("finished") / "run"
    tiny_experiment(cache).run(path)
    return path


def read_all(path):
    """Everything that evaluate, predict, export, info and compare read."""
    run = Run(path)
    Experiment.load(path)
    assert run.result is not None
    assert run.history
    return load_model(path, "cpu").encoder


@pytest.mark.parametrize(
    "name",
    ["config.json", "result.json", "metrics.csv", "metrics.csv.checksum", "encoder/encoder.json", "best.safetensors"],
)
def test_a_flipped_byte_anywhere_is_an_error_that_names_the_file(finished, tmp_path, name):
    """0.1 read all of these as they came: exit code 0 and other numbers."""
    shutil.copytree(finished, tmp_path / "run")
    file = tmp_path / "run" / name
    whole = file.read_bytes()
    for position in range(0, len(whole), 1 + len(whole) // 150):
        for change in (1 << (position % 8), 0x80):
            damaged = bytearray(whole)
            damaged[position] ^= change
            file.write_bytes(damaged)
            with pytest.raises((CheckpointError, DataError), match=file.name):
                read_all(tmp_path / "run")
    for damaged in (whole[:-1], whole[: len(whole) // 2], b"", whole + b" ", b"[]", b"{}", b"[" * 100_000):
        file.write_bytes(damaged)
        with pytest.raises((CheckpointError, DataError), match=file.name):
            read_all(tmp_path / "run")
    file.write_bytes(whole)
    read_all(tmp_path / "run")


def test_an_absent_file_is_named(finished, tmp_path):
    for name in (
        "metrics.csv.checksum",
        "best.safetensors.checksum",
        "best.safetensors",
        "encoder/encoder.json",
        "encoder/categorical3.arrow",
    ):
        copy = tmp_path / name.replace("/", "-")
        shutil.copytree(finished, copy)
        (copy / name).unlink()
        with pytest.raises((ValueError, OSError), match=r"\.checksum, is not there|holds no model yet|encoder"):
            read_all(copy)


def test_the_encoder_of_another_run_is_refused(finished, unvalidated, tmp_path):
    tiny_experiment(unvalidated).run(tmp_path / "other")
    shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "encoder")
    shutil.copytree(tmp_path / "other" / "encoder", tmp_path / "run" / "encoder")
    expected, found = (Run(path).config["encoder"][:12] for path in (finished, tmp_path / "other"))
    with pytest.raises(CheckpointError, match=f"not the encoder of this run; expected {expected}, got {found}"):
        read_all(tmp_path / "run")


NAMES = "model", "options", "cache", "fingerprint", "encoder", "device", "threads"


@pytest.mark.parametrize(
    ("content", "message"),
    [({}, "no 'model'"), ({"model": "dcn"}, "no 'options'"), (dict.fromkeys(NAMES) | {"training": 3}, "config")],
)
def test_a_configuration_that_is_none(finished, tmp_path, content, message):
    shutil.copytree(finished, tmp_path / "run")
    write_checked_json(tmp_path / "run" / "config.json", content)
    with pytest.raises(CheckpointError, match=rf"config\.json.*{message}"):
        Experiment.load(tmp_path / "run")
