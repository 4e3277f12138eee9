"""Regression, weights of rows and of the positive class, the monitored metric: learned, weighted, chosen, refused."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn import metrics as sklearn_metrics

from fastcross.data import prepare
from fastcross.models import MODELS
from fastcross.training import Dataset, Experiment, TrainingConfig, load_model, metrics
from fastcross.training.experiment import build
from fastcross.training.loop import Trainer
from fastcross.training.metrics import evaluate

ROWS = 1500
SMALL = {"cross_layers": 1, "deep_layers": [8], "embedding_dim": 2}


def table(folder, **columns):
    names = list(columns)
    lines = [",".join(str(columns[name][i]) for name in names) for i in range(ROWS)]
    (folder / "t.csv").write_text("\n".join([",".join(names), *lines, ""]))
    return folder / "t.csv"


@pytest.fixture(scope="module")
def quantities(tmp_path_factory):
    """A price of about a million: a network that did not scale it would need days to come near."""
    generator = np.random.default_rng(0)
    size, city = generator.normal(size=ROWS), generator.integers(0, 5, ROWS)
    price = 1e6 + 2e5 * size + 1e5 * np.array([0, 1, -1, 2, 0])[city] + 1e3 * generator.normal(size=ROWS)
    folder = tmp_path_factory.mktemp("quantities")
    path = table(folder, price=price, size=size, city=[f"c{c}" for c in city])
    return prepare(path, folder / "cache", columns={"label": "price", "infer_rest": True}, split="random:0.8,0.1,0.1")


def experiment(cache, model="dcn", options=SMALL, **training):
    config = TrainingConfig(**{"batch_size": 64, "epochs": 8, "lr": 0.03, "patience": 0, **training})
    return Experiment(Dataset(str(cache.path)), model, options, config, threads=1)


def test_regression_learns_and_predicts_in_the_label_s_unit(quantities, tmp_path):
    result = experiment(quantities).run(tmp_path / "run")
    assert result["test"]["r2"] > 0.97
    assert set(result["test"]) == {"rmse", "mae", "r2"}
    trained = load_model(tmp_path / "run")
    batch = next(quantities.batches("test", 100))
    with torch.no_grad():
        predicted = trained.model(batch.dense, batch.categorical, batch.bags)
    assert 5e5 < float(predicted.mean()) < 1.5e6
    assert float((predicted - batch.label).square().mean().sqrt()) < 5e4
    assert trained.schema.task == "regression"


@pytest.mark.parametrize("model", list(MODELS))
def test_every_model_regresses(quantities, model, tmp_path):
    result = experiment(quantities, model, {}, lr=1e-3, max_steps=2).run(tmp_path / "run")
    assert 0 < result["test"]["rmse"] < 1e6


def test_metrics_are_scikit_learn_s_weighted_and_not():
    generator = np.random.default_rng(1)
    y, w = generator.normal(size=200), generator.integers(0, 4, 200) / 2
    p = y + generator.normal(size=200)
    for weight in (None, w):
        found = metrics.summarise(
            torch.tensor(p), torch.tensor(y), regression=True, weight=None if weight is None else torch.tensor(weight)
        )
        assert found["rmse"] ** 2 == pytest.approx(sklearn_metrics.mean_squared_error(y, p, sample_weight=weight))
        assert found["mae"] == pytest.approx(sklearn_metrics.mean_absolute_error(y, p, sample_weight=weight))
        assert found["r2"] == pytest.approx(sklearn_metrics.r2_score(y, p, sample_weight=weight))
    label, logits = (y > 0.3).astype(float), np.round(p, 1)  # many ties
    found = metrics.summarise(torch.tensor(logits), torch.tensor(label), weight=torch.tensor(w))
    probability = 1 / (1 + np.exp(-logits))
    assert found["auc"] == pytest.approx(sklearn_metrics.roc_auc_score(label, logits, sample_weight=w))
    assert found["logloss"] == pytest.approx(sklearn_metrics.log_loss(label, probability, sample_weight=w))
    assert found["accuracy"] == pytest.approx(sklearn_metrics.accuracy_score(label, logits > 0, sample_weight=w))
    classes = torch.tensor(generator.integers(0, 3, 200))
    several = metrics.summarise(torch.tensor(generator.normal(size=(200, 3))), classes, weight=torch.tensor(w))
    doubled = torch.tensor(generator.normal(size=(200, 3)))
    assert several.keys() == {"logloss", "accuracy", "ece"}
    whole = metrics.summarise(doubled, classes, weight=torch.full((200,), 2.0))
    assert whole == pytest.approx(metrics.summarise(doubled, classes))


def test_a_weight_of_two_is_a_row_twice():
    generator = np.random.default_rng(2)
    logits, label = torch.tensor(generator.normal(size=60)), torch.tensor(generator.integers(0, 2, 60)).float()
    w, group = torch.tensor(generator.integers(0, 3, 60)), torch.tensor(generator.integers(0, 7, 60))
    repeated = torch.repeat_interleave(torch.arange(60), w)
    weighted = metrics.summarise(logits, label, weight=w.float(), group=group)
    twice = metrics.summarise(logits[repeated], label[repeated], group=group[repeated])
    assert weighted == pytest.approx(twice)


def test_grouped_auc_is_the_mean_of_the_groups_own():
    generator = np.random.default_rng(3)
    score, label = np.round(generator.normal(size=400), 1), generator.integers(0, 2, 400)
    group = generator.integers(-20, 20, 400)
    label[group == 5] = 1  # has no AUC, and does not count
    total = rows = 0
    for g in np.unique(group):
        chosen = group == g
        if len(set(label[chosen])) == 2:
            total += chosen.sum() * sklearn_metrics.roc_auc_score(label[chosen], score[chosen])
            rows += chosen.sum()
    found = metrics.grouped_auc(torch.tensor(score), torch.tensor(label), torch.tensor(group))
    assert found == pytest.approx(total / rows)
    alone = torch.arange(400)
    assert np.isnan(metrics.grouped_auc(torch.tensor(score), torch.tensor(label), alone))


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
    generator = np.random.default_rng(4)
    x, user = generator.normal(size=ROWS), generator.integers(0, 30, ROWS)
    label = (x + generator.normal(size=ROWS) > 1).astype(int)
    folder = tmp_path_factory.mktemp("weighted")
    weight = generator.integers(0, 3, ROWS)
    path = table(folder, label=label, x=x, user=[f"u{u}" for u in user], w=weight)
    columns = {"label": "label", "sample_weight": "w", "group": "user", "infer_rest": True}
    return prepare(path, folder / "cache", columns=columns, split="random:0.8,0.1,0.1")


def test_loss_and_metrics_are_weighted(clicks):
    model = build("dcn", SMALL, clicks.schema)
    batch = next(clicks.batches("train", 500))
    logits = model(batch.dense, batch.categorical, batch.bags)
    each = F.binary_cross_entropy_with_logits(logits, batch.label, reduction="none")
    torch.testing.assert_close(model.loss(logits, batch.label, batch.weight), (each * batch.weight).mean())
    with pytest.raises(ValueError, match=r"weight must be \(500,\), as logits; got \(3,\)"):
        model.loss(logits, batch.label, batch.weight[:3])
    (validation,) = clicks.batches("validation", ROWS)
    with torch.no_grad():
        z = model.eval()(validation.dense, validation.categorical, validation.bags)
    expected = metrics.summarise(z, validation.label, weight=validation.weight, group=validation.group)
    assert evaluate(model, clicks, "validation") == pytest.approx(expected)
    assert "gauc" in expected


def test_training_follows_the_weights(clicks, tmp_path):
    """A step with weights is the step on the loss weighted in proportion to their mean; positives count for more."""
    config = TrainingConfig(batch_size=64, max_steps=1, lr=0.1, optimizer="sgd", clip_norm=0, positive_weight=3.0)
    torch.manual_seed(0)
    trainer = Trainer(build("lr", {}, clicks.schema), clicks, config)
    torch.manual_seed(0)
    twin = build("lr", {}, clicks.schema)
    batch = next(clicks.batches("train", 64, shuffle=True, seed=0))
    logits = twin(batch.dense, batch.categorical, batch.bags)
    weight = batch.weight / clicks.mean_weight * torch.where(batch.label > 0, 3.0, 1.0)
    (F.binary_cross_entropy_with_logits(logits, batch.label, reduction="none") * weight).mean().backward()
    expected = twin.bias - 0.1 * twin.bias.grad
    trainer.fit()
    torch.testing.assert_close(trainer.model.bias, expected)


@pytest.mark.parametrize("monitor", ["auc", "gauc", "ece", "logloss"])
def test_the_best_model_is_that_of_the_monitored_metric(clicks, monitor, tmp_path):
    plan = experiment(clicks, lr=0.3, monitor=monitor, evaluate_every=3, max_steps=30, epochs=3)
    result = plan.run(tmp_path / "run")
    best = max if monitor in ("auc", "gauc") else min
    from fastcross.training.run_folder import Run

    history = Run(tmp_path / "run").history
    values = [row[f"validation_{monitor}"] for row in history]
    assert result["validation"][monitor] == pytest.approx(best(values), abs=1e-9)
    assert result["best_step"] == history[values.index(best(values))]["step"]


def test_early_stopping_follows_the_monitored_metric(clicks, tmp_path):
    result = experiment(clicks, lr=0.5, monitor="auc", evaluate_every=2, patience=2, epochs=30).run(tmp_path / "run")
    assert result["stopped_early"]
    assert result["steps"] == result["best_step"] + 4


def refuses(cache, tmp_path, message, **training):
    with pytest.raises(ValueError, match=message):
        experiment(cache, **training).run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_the_data_has_not_is_refused_before_anything_is_written(cache, quantities, clicks, unvalidated, tmp_path):
    message = "there is no auc to monitor: a regression label has rmse, mae, r2"
    refuses(quantities, tmp_path, message, monitor="auc")
    refuses(
        clicks,
        tmp_path,
        "there is no rmse to monitor: a binary label has logloss, auc, accuracy, ece, gauc",
        monitor="rmse",
    )
    refuses(cache, tmp_path, r"there is no gauc to monitor: .*; gauc takes a column of groups", monitor="gauc")
    refuses(unvalidated, tmp_path, "monitor auc needs validation rows", monitor="auc")
    refuses(quantities, tmp_path, "positive_weight is for a label of two classes; .* regression", positive_weight=2.0)
    with pytest.raises(ValueError, match=r"monitor must be one of logloss, auc, .*; got 'loss'"):
        TrainingConfig(monitor="loss")
    with pytest.raises(ValueError, match="positive_weight must be positive and finite; got 0"):
        TrainingConfig(positive_weight=0)


def test_validation_rows_of_one_class_have_no_auc_to_monitor(tmp_path):
    path = table(tmp_path, label=[i % 2 if i < 1300 else 0 for i in range(ROWS)], x=np.arange(ROWS) / 7)
    cache = prepare(path, tmp_path / "cache", split="time:0.9,0.1,0")
    refuses(cache, tmp_path, "no auc to monitor: the validation rows have logloss, accuracy, ece", monitor="auc")
