"""The configuration of a training: its learning rates, and every value that it refuses."""

import math

import pytest

from fastcross.training.config import TrainingConfig, learning_rate


def test_learning_rates():
    constant = TrainingConfig(lr=1.0, warmup_steps=4)
    assert [learning_rate(constant, step, 100) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    cosine = TrainingConfig(lr=1.0, schedule="cosine", warmup_steps=2)
    assert [learning_rate(cosine, step, 10) for step in (1, 2, 6)] == pytest.approx([1, 1, 0.5])
    assert 0 < learning_rate(cosine, 9, 10) < 0.05
    plateau = TrainingConfig(lr=1.0, schedule="plateau")
    assert learning_rate(plateau, 50, 100, decays=2) == pytest.approx(0.09)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0}, "lr must be positive and finite; got 0"),
        ({"lr": math.nan}, "got nan"),
        ({"schedule": "linear"}, "constant, plateau, cosine; got 'linear'"),
        ({"batch_size": 0}, "batch_size must be at least 1; got 0"),
        ({"patience": -1}, "patience must not be negative; got -1"),
        ({"optimizer": "lion"}, "optimizer must be one of adam, adamw, adagrad, rowwise_adagrad, sgd; got 'lion'"),
        ({"graph": "on"}, "graph must be one of auto, off; got 'on'"),
        ({"clip_norm": math.nan}, "clip_norm must not be negative; got nan"),
        ({"checkpoint_seconds": math.nan}, "checkpoint_seconds must not be negative; got nan"),
        ({"max_loss": math.nan}, "max_loss must be positive; got nan"),
        ({"lr": math.inf}, "lr must be positive and finite; got inf"),
        ({"seed": -1}, "seed must not be negative; got -1"),
        ({"seed": 1 << 63}, r"seed must be below 2\^63; got 9223372036854775808"),
    ],
)
def test_bad_configurations(options, message):
    with pytest.raises(ValueError, match=message):
        TrainingConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bf16": "no"}, "bf16 must be True, False or None; got 'no'"),
        ({"bf16": 1}, "bf16 must be True, False or None; got 1"),
        ({"epochs": 1.5}, r"epochs must be an integer; got 1\.5"),
        ({"epochs": True}, "epochs must be an integer; got True"),
        ({"max_steps": "9"}, "max_steps must be an integer or None; got '9'"),
        ({"lr": "fast"}, "lr must be a number; got 'fast'"),
        ({"lr": None}, "lr must be a number; got None"),
        ({"schedule": 3}, "schedule must be a string; got 3"),
        ({"graph": None}, "graph must be a string; got None"),
        ({"seed": 0.0}, r"seed must be an integer; got 0\.0"),
    ],
)
def test_values_of_another_type(options, message):
    with pytest.raises(TypeError, match=message):
        TrainingConfig(**options)


def test_a_whole_number_is_a_number():
    assert TrainingConfig(lr=1, clip_norm=0, max_loss=10).lr == 1
