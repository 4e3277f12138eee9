"""What a model and its training are by the data: the arithmetic, who wins over it, and where it is kept."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning

from fastcross import DCNClassifier
from fastcross.cli.main import main
from fastcross.data import prepare
from fastcross.data.generate import write_click_log
from fastcross.defaults import LARGE, defaults, least_frequency
from fastcross.models import MODELS
from fastcross.models.dcn import DCN
from fastcross.training.config import TrainingConfig
from fastcross.training.experiment import Dataset, Experiment, build, model_options
from fastcross.training.run_folder import Run

FEW = {"epochs": 1, "max_steps": 2}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("defaults")
    write_click_log(folder / "clicks.txt", 2000, largest_vocabulary=20)
    return prepare(folder / "clicks.txt", folder / "cache")


def test_large_logs_are_the_papers():
    """From five million rows on nothing is chosen; just below it the deep sizes and the steps are the same already."""
    assert defaults("dcn", LARGE, [10]) == {}
    assert least_frequency(LARGE) == least_frequency(LARGE - 1) == 10
    below = defaults("dcn", LARGE - 1, [10])
    paper = DCN.Config([10], 0)
    assert tuple(below["deep_layers"]) == paper.deep_layers
    assert (below["batch_size"], below["epochs"]) == (TrainingConfig().batch_size, TrainingConfig().epochs)


@pytest.mark.parametrize(
    ("rows", "width", "layers", "batch", "epochs", "dims", "frequency"),
    [
        (1, 32, 1, 32, 100, [6, 8], 3),
        (1_000, 32, 1, 32, 100, [6, 8], 3),
        (30_000, 64, 1, 512, 100, [6, 8], 3),
        (100_000, 128, 2, 512, 100, [6, 8], 3),
        (1_000_000, 512, 3, 512, 50, [6, 25], 10),
    ],
)
def test_the_arithmetic(rows, width, layers, batch, epochs, dims, frequency):
    found = defaults("dcn", rows, [1, 10_000])
    assert found["deep_layers"] == [width, width]
    assert (found["cross_layers"], found["batch_size"], found["epochs"]) == (layers, batch, epochs)
    assert found["embedding_dim"] == dims
    assert least_frequency(rows) == frequency


@pytest.mark.parametrize("model", MODELS)
def test_every_model_can_be_built_with_them(model, cache):
    plan, chosen = Experiment(Dataset(str(cache.path)), model).filled(cache)
    assert chosen
    build(model, plan.options, cache.schema)
    assert {name for name in chosen if name not in model_options(model)} <= {*TrainingConfig.__dataclass_fields__}


def test_what_is_given_wins_and_the_rest_is_kept(cache, tmp_path):
    lines = []
    given = {"deep_layers": [8], "batch_norm": True}
    plan = Experiment(Dataset(str(cache.path)), "dcn", given, {**FEW, "lr": 0.02}, threads=1)
    plan.run(tmp_path / "run", show=lines.append)
    config = Run(tmp_path / "run").config
    assert {name: config["options"][name] for name in given} == given
    assert (config["training"]["lr"], config["training"]["epochs"]) == (0.02, 1)
    chosen = config["by_the_data"]
    assert chosen == {
        **{"cross_layers": 1, "dropout": 0.1, "embedding_dim": chosen["embedding_dim"], "embedding_std": 0.1},
        **{"deep_start": 0.0, "batch_size": 42, "patience": 8},
    }
    assert config["options"] | config["training"] == {**config["options"], **config["training"], **chosen}
    assert any(line.startswith("by the 1,714 training rows: cross_layers 1, dropout 0.1") for line in lines)


def test_the_paper_is_a_preset(cache, tmp_path):
    whole = Experiment(Dataset(str(cache.path)), "dcn", preset="paper").filled(cache)
    assert whole[1] == {}
    assert whole[0].training == TrainingConfig()
    assert main(["train", "--data", str(cache.path), "--preset", "paper", "--run", str(tmp_path / "run"), *SMALL]) == 0
    config = Run(tmp_path / "run").config
    assert config["by_the_data"] == {}
    assert config["training"]["batch_size"] == 512
    assert config["preset"] == "paper"
    with pytest.raises(ValueError, match="preset must be one of data, paper; got 'grid'"):
        Experiment(preset="grid")


SMALL = ["--deep-layers", "8", "--cross-layers", "1", "--embedding-dim", "2", "--epochs", "1", "--threads", "1"]


def rows(count=300):
    generator = np.random.default_rng(0)
    x = generator.normal(size=count)
    return pd.DataFrame({"x": x, "kind": generator.choice([*"abc"], count), "label": (x > 0).astype(int)})


def test_an_estimator_follows_the_data():
    estimator = DCNClassifier(threads=1, random_state=0, max_steps=30).fit(rows(), "label")
    assert estimator.chosen_["deep_layers"] == [32, 32]
    assert estimator.run_.trained.model.config.deep_layers == (32, 32)
    assert estimator.get_params()["deep_layers"] is None
    paper = DCNClassifier(preset="paper", deep_layers=[4], threads=1, max_steps=2).fit(rows(), "label")
    assert paper.chosen_ == {}
    assert paper.run_.trained.model.config.batch_norm


def test_a_best_step_that_is_the_last_says_so(cache, tmp_path, capsys):
    with pytest.warns(ConvergenceWarning, match="the best step, 5, is the last one"):
        DCNClassifier(threads=1, random_state=0, max_steps=5, lr=0.01).fit(rows(), "label")
    assert main(["train", "--data", str(cache.path), "--run", str(tmp_path / "run"), *SMALL]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["best_step"] == result["steps"]
    assert f"the best step, {result['steps']}, is the last one" in capsys.readouterr().err


def test_the_cross_network_comes_first():
    """With deep_start 0 the untrained logits are the cross network's alone, and a step gives the deep one its part."""
    torch.manual_seed(0)
    model = DCN([5, 7], 3, 4, cross_layers=2, deep_layers=[16], batch_norm=False, deep_start=0.0, embedding_std=0.1)
    dense, categorical = torch.randn(64, 3), torch.randint(5, (64, 2))
    x0 = model.embedding(dense, categorical)
    d = x0.shape[1]
    bias = model.logits.bias
    torch.testing.assert_close(
        model(dense, categorical), (model.cross(x0) @ model.logits.weight[:, :d].T + bias).squeeze(1)
    )
    assert float(torch.cat([table.flatten() for table in model.embedding.tables]).detach().std()) < 0.2
    model.loss(model(dense, categorical), (dense[:, 0] > 0).float()).backward()
    assert model.logits.weight.grad[:, d:].abs().max() > 0


def test_a_comparison_gives_each_model_its_own(cache, tmp_path, capsys):
    """A logistic regression takes larger steps, and more of them, than a network: it is not stopped before its time."""
    common = ["--data", str(cache.path), "--models", "lr,dcn", "--max-steps", "3", "--threads", "1"]
    assert main(["compare", *common, "--output", str(tmp_path / "both")]) == 0
    linear, network = (Run(tmp_path / "both" / f"{name}-0").config["training"] for name in ("lr", "dcn"))
    assert (linear["lr"], linear["epochs"]) == (0.01, 300)
    assert (network["lr"], network["epochs"]) == (0.001, 100)
