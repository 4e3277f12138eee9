"""Checkpoints from shards to one file and back, bit for bit."""

import os

import pytest
import torch

from fastcross.cli.main import main
from fastcross.training import checkpoint, load_model, resume
from fastcross.training.checkpoint import newest, read_whole
from fastcross.training.loop import Interrupted
from fastcross.training.run_folder import Run
from tests.distributed.helpers import (
    QUIET,
    assert_same_curve,
    curve,
    experiment,
    interrupt,
)

pytest.importorskip("torchrec")
from fastcross.distributed.sharding import convert_run, join

pytestmark = QUIET


@pytest.mark.parametrize("name", ["adam-clipped", "sgd-row"])
def test_conversion_there_and_back_is_bit_for_bit(name, trained, tmp_path, capsys):
    single, sharded, again = tmp_path / "single", tmp_path / "sharded", tmp_path / "again"
    assert main(["convert", str(trained / name), str(single), "--to", "single"]) == 0
    assert main(["convert", str(single), str(sharded), "--to", "sharded"]) == 0
    assert main(["convert", str(sharded), str(again), "--to", "single"]) == 0
    for kept in ("best", "last"):
        first, second = (checkpoint.load(folder / f"{kept}.safetensors") for folder in (single, again))
        assert_equal(first, second)
        assert_equal(read_whole(newest(sharded, kept)), read_whole(newest(trained / name, kept)))
    assert load_model(single).model.state_dict().keys() == load_model(sharded).model.state_dict().keys()
    assert Run(single).result == Run(trained / name).result
    assert main(["convert", str(single), str(tmp_path / "other"), "--to", "single"]) == 2
    (part,) = newest(sharded, "best").glob("*.distcp")
    os.truncate(part, part.stat().st_size // 2)
    assert main(["convert", str(sharded), str(tmp_path / "other"), "--to", "single"]) == 2
    assert "is not a whole checkpoint" in capsys.readouterr().err


def assert_equal(a, b):
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        for first, second in zip(a, b, strict=True):
            assert_equal(first, second)
    else:
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_converted_run_goes_on_where_the_sharded_one_stopped(optimizer, cache, tmp_path):
    """One process each, TorchRec's first: half of an epoch, converted, then to the end on fastcross's own tables."""
    with join("cpu") as processes, pytest.raises(Interrupted, match="step 13 of 26"):
        experiment(cache, optimizer=optimizer).run(tmp_path / "sharded", show=interrupt, processes=processes)
    assert convert_run(Run(tmp_path / "sharded"), "single", tmp_path / "single") == ["best", "last"]
    resume(tmp_path / "single")
    experiment(cache, sharded=False, optimizer=optimizer).run(tmp_path / "whole")
    assert_same_curve(curve(tmp_path / "single", "validation_ece"), curve(tmp_path / "whole", "validation_ece"))
