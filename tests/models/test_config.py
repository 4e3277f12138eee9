"""Configurations take values of the types they say, and nothing that only looks like one."""

import inspect
import json
import subprocess
import sys
from dataclasses import dataclass, fields

import numpy as np
import pytest
import torch

from fastcross import DCN, DCNConfig
from fastcross.fields import check_types
from fastcross.models import MODELS
from fastcross.models.base import model_class

NOT_A = {
    "cardinalities": ["57", 5, {5: 1}, [5, "7"], [5, 7.0], [True], None],
    "num_dense": ["1", 1.0, True, None],
    "embedding_dim": ["4", 4.0, True, [4, "4"]],
    "bag_cardinalities": ["9", 9, [9.5], None],
    "bag_pooling": [1, None, ["mean"]],
    "num_outputs": ["1", 1.5, True, None],
    "regression": ["yes", 1, None],
    "label_mean": ["0", True, None],
    "label_deviation": ["1", True, None],
    "l2": ["0.1", True, None, 1j],
    "sparse_gradients": ["no", 0, 1, None],
    "backend": [1, None],
    "embedding_std": ["0.1", True],
    "deep_start": ["0", True, None],
    "deep_layers": ["wide", 16, [16, None], [16.0]],
    "batch_norm": ["no", "False", 0, 1.0, None],
    "dropout": ["0.5", True, None],
    "logits_bias": ["yes", 1, None],
    "cross_layers": ["3", 3.0, True, None],
    "cross_type": [0, None],
    "rank": ["3", 3.0, True],
    "experts": ["3", 3.0, None],
    "structure": [0, None],
    "bin_width": ["0.25", None, True],
    "num_bins": ["8", 8.0, True],
    "residual_units": ["3", 3.0],
    "input_dim": ["8", True],
    "cross_dim": ["8", None],
    "crosses": ["01", [0, 1], [["0", "1"]], [0.5], None],
    "cross_buckets": ["8", 1e6, None],
}


@pytest.mark.parametrize("name", MODELS)
def test_every_field_is_checked(name):
    config = model_class(name).Config
    for entry in fields(config):
        for value in NOT_A[entry.name]:
            values = {"cardinalities": [5, 7], "num_dense": 1, entry.name: value}
            with pytest.raises(TypeError, match=f"{entry.name} must be .*; got ") as raised:
                config(**values)
            assert str(raised.value).endswith(f"got {value!r}")


def test_what_means_the_same_is_taken():
    config = DCNConfig(
        np.array([5, 7]),
        np.int64(1),
        torch.Size([3, 4]),
        l2=0,
        dropout=np.float32(0.5),
        deep_layers=range(3, 5),
        cross_layers=torch.tensor(2),
    )
    assert config == DCNConfig((5, 7), 1, (3, 4), l2=0.0, dropout=0.5, deep_layers=(3, 4), cross_layers=2)
    assert DCNConfig(**json.loads(json.dumps(config.to_dict()))) == config
    assert hash(config) == hash(DCNConfig(**json.loads(json.dumps(config.to_dict()))))
    assert type(config.num_dense) is int
    assert type(config.l2) is float


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.1])
def test_numbers_out_of_range(value):
    with pytest.raises(ValueError, match=f"l2 must be at least 0; got {value}"):
        DCNConfig([5], 1, l2=value)
    with pytest.raises(ValueError, match=rf"dropout must be in \[0, 1\); got {value}"):
        DCNConfig([5], 1, dropout=value)


def test_unions_and_nested_sequences_say_what_they_want():
    @dataclass
    class Config:
        number: int | None = None
        pairs: tuple[tuple[int, ...], ...] = ()

        def __post_init__(self):
            check_types(self)

    assert Config(3, [[1, 2], (3,)]) == Config(3, ((1, 2), (3,)))
    with pytest.raises(TypeError, match="number must be an integer or None; got 'a'"):
        Config("a")
    with pytest.raises(TypeError, match="pairs must be a sequence of a sequence of integers; got 3"):
        Config(pairs=3)


@pytest.mark.parametrize("name", MODELS)
def test_a_models_signature_shows_its_options(name):
    kind = model_class(name)
    shown = inspect.signature(kind).parameters
    assert list(shown) == [entry.name for entry in fields(kind.Config)]
    assert shown["l2"].default == 0.0
    assert shown["l2"].kind is inspect.Parameter.KEYWORD_ONLY


def test_a_type_checker_sees_a_models_options(tmp_path):
    pytest.importorskip("mypy")
    source = tmp_path / "use.py"
    source.write_text(
        "from fastcross import DCN\n"
        "DCN([1, 2], 3, cross_layers=2, deep_layers=[4])\n"
        "DCN([1], 3, cros_layers=2)\n"
        'DCN([1], 3, batch_norm="no")\n'
        "reveal_type(DCN([1], 3).config.cross_layers)\n"
    )
    command = [sys.executable, "-m", "mypy", "--ignore-missing-imports", "--follow-imports=silent", str(source)]
    found = subprocess.run(command, capture_output=True, text=True).stdout
    lines = [line.split(":", 2)[1:] for line in found.splitlines() if "use.py" in line]
    assert [int(number) for number, _ in lines if "error" in _] == [3, 4], found
    assert any(number == "5" and '"int"' in text for number, text in lines), found
    assert DCN([1], 3).config.cross_layers == 6
