"""What a search chooses from: the paper's space, a file's, and what cannot be one."""

import json

import pytest

from fastcross.models import MODELS
from fastcross.training.experiment import Experiment
from fastcross.tuning.space import BY_PRESET, PAPER, check_space, chosen, grid, parse_space, read_spaces, without


def test_the_papers_space():
    """Section 4.2: 2 to 5 hidden layers of 32 to 1024, 1 to 6 cross layers, ten rates."""
    assert set(PAPER) == set(MODELS)
    points = grid(parse_space("dcn", PAPER["dcn"]))
    assert len(points) == 4 * 6 * 6 * 10
    assert {point["lr"] for point in points} == {round(1e-4 * i, 4) for i in range(1, 11)}
    assert len(grid(parse_space("dnn", PAPER["dnn"]))) == 4 * 6 * 10
    for model in MODELS:
        check_space(Experiment(model=model), parse_space(model, PAPER[model]))


def test_without_a_preset_dropout_and_batch_size_are_searched():
    for model in MODELS:
        check_space(Experiment(model=model), parse_space(model, BY_PRESET["data"][model]))
        assert "batch_size" in BY_PRESET["data"][model]
    names = {model for model in MODELS if "dropout" in BY_PRESET["data"][model]}
    assert names == {"dcn", "dnn", "wide_deep"}
    points = parse_space("dcn", BY_PRESET["data"]["dcn"])
    dropout, batch = (next(p for p in points if p.name == name) for name in ("dropout", "batch_size"))
    assert (dropout.low, dropout.high) == (0.0, 0.5)
    assert batch.choices == (32, 64, 128, 256, 512), "all that the defaults may be"


def test_parameters_become_an_experiment():
    base = Experiment(options={"embedding_dim": 3, "cross_layers": 1})
    plan = chosen(
        base, {"hidden_layers": 3, "hidden_size": 16, "cross_layers": 4, "lr": 0.02, "batch_size": 64}, seed=7
    )
    assert plan.options == {"embedding_dim": 3, "cross_layers": 4, "deep_layers": [16, 16, 16]}
    assert plan.training == {"lr": 0.02, "batch_size": 64, "seed": 7}
    assert base.options == {"embedding_dim": 3, "cross_layers": 1}


def test_what_the_user_gives_is_not_searched():
    assert set(without(PAPER["dcn"], ["deep_layers", "epochs"])) == {"cross_layers", "lr"}
    assert set(without(PAPER["dcn"], ["lr", "cross_layers"])) == {"hidden_layers", "hidden_size"}


def test_ranges():
    (layers,) = parse_space("dcn", {"cross_layers": {"low": 2, "high": 4}})
    assert layers.grid == (2, 3, 4)
    (rate,) = parse_space("dcn", {"lr": {"low": 1e-4, "high": 1e-3, "log": True}})
    with pytest.raises(ValueError, match="a full grid needs values for lr"):
        grid((rate,))


BAD = {
    '{"dcn": {"wings": [1, 2]}}': "the space of dcn names wings",
    '{"dnn": {"cross_layers": [1]}}': "the space of dnn names cross_layers",
    '{"lr": {"hidden_layers": [1], "hidden_size": [2]}}': "the space of lr names hidden_layers",
    '{"dcn": {"hidden_layers": [1]}}': "hidden_layers and hidden_size together",
    '{"dcn": {"lr": []}}': "must be a list of numbers or names",
    '{"dcn": {"lr": 0.1}}': "must be a list, or a range",
    '{"dcn": {"lr": {"low": 1}}}': "must be a list, or a range",
    '{"dcn": {"lr": {"low": 1, "high": 0.1}}}': "from low up to high; got 1 and 0.1",
    '{"dcn": {"lr": {"low": "a", "high": "b"}}}': "from low up to high",
    '{"dcn": {"lr": {"low": 0, "high": 1, "log": true}}}': "must be positive; got 0",
    '{"xgboost": {"lr": [1]}}': "there is no model 'xgboost'",
    "[1]": "must hold a space for each model",
    "{": "is not JSON",
}


@pytest.mark.parametrize("text", BAD)
def test_bad_spaces(text, tmp_path):
    (tmp_path / "space.json").write_text(text)
    with pytest.raises(ValueError, match=r".") as error:
        read_spaces(tmp_path / "space.json")
    assert BAD[text] in str(error.value)


def test_a_good_space_is_read(tmp_path):
    content = {"dcn": {"lr": [0.1, 0.2], "dropout": {"low": 0.0, "high": 0.5}}}
    (tmp_path / "space.json").write_text(json.dumps(content))
    assert read_spaces(tmp_path / "space.json") == content


def test_values_that_a_model_refuses_are_found_at_once():
    with pytest.raises(ValueError, match="dropout"):
        check_space(Experiment(), parse_space("dcn", {"dropout": {"low": 0.0, "high": 1.5}}))
    with pytest.raises(ValueError, match="lr must be positive"):
        check_space(Experiment(), parse_space("dcn", {"lr": [0.1, -1]}))
