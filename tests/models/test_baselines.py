"""The models of table 1 by their equations, and all of them on a small log with one planted cross."""

import json
import math

import pytest
import torch
from torch import nn

from fastcross import DCN, optim
from fastcross.models import MODELS
from fastcross.models.base import model_class
from fastcross.models.baselines import DeepCrossing, FactorizationMachine, LogisticRegression, WideDeep

CARDINALITIES, NUM_DENSE = [6, 5, 4], 2


def make_batch(rows=16):
    generator = torch.Generator().manual_seed(3)
    dense = 3 * torch.randn(rows, NUM_DENSE, generator=generator)
    return dense, torch.stack([torch.randint(0, n, (rows,), generator=generator) for n in CARDINALITIES], 1)


def make(kind, **options):
    torch.manual_seed(0)
    model = kind(CARDINALITIES, NUM_DENSE, **options)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


@pytest.mark.parametrize("num_outputs", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_the_same_interface(name, num_outputs):
    options = {"crosses": ((0, 1), (0, 1, 2)), "cross_buckets": 50} if name in ("wide_deep", "lr") else {}
    model = model_class(name)(CARDINALITIES, NUM_DENSE, None, num_outputs=num_outputs, l2=0.5, **options)
    twin = model_class(name).from_config(json.loads(json.dumps(model.config.to_dict())))
    assert twin.config == model.config
    twin.load_state_dict(model.state_dict())
    dense, categorical = make_batch()
    z = model(dense, categorical)
    assert z.shape == ((16,) if num_outputs == 1 else (16, num_outputs))
    assert torch.equal(z, twin(dense, categorical))
    loss = model.loss(z, torch.ones(16))
    weights = sum(float(weight.detach().square().sum()) for weight in model.weights())
    assert float(model.regularization().detach()) == pytest.approx(0.5 * weights, rel=1e-5)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_logistic_regression_is_a_sum_of_weights():
    model, (dense, categorical) = make(LogisticRegression, bin_width=0.5, num_bins=8), make_batch()
    tables, bias = [table.detach() for table in model.one_hot.tables.tables], model.bias.detach()
    for r, z in enumerate(model(dense, categorical).tolist()):
        expected = float(bias) + sum(float(tables[k][categorical[r, k], 0]) for k in range(3))
        for i in range(NUM_DENSE):
            bin = min(max(math.floor(float(dense[r, i]) / 0.5) + 4, 0), 7)
            expected += float(tables[3 + i][bin, 0])
        assert z == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_logistic_regression_has_a_weight_for_each_combination():
    model, (dense, categorical) = make(LogisticRegression, crosses=((0, 1),)), make_batch()
    before = model(dense, categorical)
    number = int(categorical[2, 0] * 5 + categorical[2, 1])
    with torch.no_grad():
        model.one_hot.tables.tables[3][number] += 1.0
    same = categorical[:, 0] * 5 + categorical[:, 1] == number
    torch.testing.assert_close(model(dense, categorical) - before, same.float(), rtol=1e-4, atol=1e-4)


def test_bins_take_every_value():
    model = make(LogisticRegression, bin_width=0.5, num_bins=8)
    dense = torch.tensor([[math.nan, 0.0], [-math.inf, 0.0], [math.inf, 0.0], [1e30, 0.0]])
    z = model(dense, torch.zeros(4, 3, dtype=torch.int64))
    assert bool(z.isfinite().all())
    assert z[0] == z[1] != z[2] == z[3]


@pytest.mark.parametrize("num_outputs", [1, 2])
def test_factorization_machine_sums_all_pairs(num_outputs):
    model, (dense, categorical) = make(FactorizationMachine, embedding_dim=4, num_outputs=num_outputs), make_batch()
    z = model(dense, categorical).view(16, num_outputs)
    rows = model.one_hot(dense, categorical, ()).view(16, 5, num_outputs, 5)
    w, v = rows[..., 0], rows[..., 1:]
    expected = model.bias + w.sum(1) + sum((v[:, i] * v[:, j]).sum(-1) for i in range(5) for j in range(i))
    torch.testing.assert_close(z, expected, rtol=1e-4, atol=1e-4)


def test_deep_crossing_has_residual_units():
    model, (dense, categorical) = make(DeepCrossing, residual_units=2, input_dim=9, cross_dim=6), make_batch()
    h = torch.relu(model.input(model.embedding(dense, categorical)))
    for unit in model.units:
        inner = torch.relu(h @ unit[0].weight.T + unit[0].bias)
        h = torch.relu(h + inner @ unit[2].weight.T + unit[2].bias)
    torch.testing.assert_close(model(dense, categorical), model.logits(h).squeeze(1))
    assert [tuple(unit[0].weight.shape) for unit in model.units] == [(6, 9)] * 2


def test_wide_part_counts_combinations_or_hashes_them():
    categorical = torch.cartesian_prod(*(torch.arange(n) for n in CARDINALITIES))
    model = make(WideDeep, crosses=((0, 2), (0, 1, 2)), cross_buckets=24, deep_layers=(4,))
    assert model.wide.buckets == [24, 24]
    assert torch.equal(model.wide._cross(categorical, 0)[:, 0], categorical[:, 0] * 4 + categorical[:, 2])
    hashed = model.wide._cross(categorical, 1)[:, 0]
    assert hashed.min() >= 0
    assert hashed.max() < 24
    counts = hashed.bincount(minlength=24)  # 120 combinations, 5 for each bucket on average
    assert int((counts > 0).sum()) >= 20
    assert int(counts.max()) <= 15


def test_wide_part_adds_to_the_deep_logits():
    model, (dense, categorical) = make(WideDeep, crosses=((0, 1),), deep_layers=(4,)), make_batch()
    model.eval()
    before = model(dense, categorical)
    number = int(categorical[2, 0] * 5 + categorical[2, 1])
    with torch.no_grad():
        model.wide.tables.tables[3][number] += 1.0
    same = categorical[:, 0] * 5 + categorical[:, 1] == number
    torch.testing.assert_close(model(dense, categorical) - before, same.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cross", [(0,), (1, 1), (0, 3), (-1, 0)])
def test_bad_cross(cross):
    for kind in (WideDeep, LogisticRegression):
        with pytest.raises(ValueError, match="at least two of the 3 categorical features; got"):
            kind(CARDINALITIES, NUM_DENSE, crosses=(cross,))


def test_bad_options():
    for name in ("dnn", "wide_deep"):
        with pytest.raises(TypeError, match="unexpected keyword argument 'cross_layers'"):
            model_class(name)(CARDINALITIES, NUM_DENSE, cross_layers=2)
        config = {"cardinalities": CARDINALITIES, "num_dense": NUM_DENSE, "cross_layers": 2}
        with pytest.raises(TypeError, match="unexpected keyword argument 'cross_layers'"):
            model_class(name).from_config(config)
    with pytest.raises(ValueError, match=r"there must be a deep layer; got deep_layers = \(\)"):
        model_class("dnn")(CARDINALITIES, NUM_DENSE, deep_layers=())
    with pytest.raises(ValueError, match=r"must be at least 1; got \(3, 0, 512\)"):
        DeepCrossing(CARDINALITIES, NUM_DENSE, input_dim=0)
    with pytest.raises(ValueError, match="cross_buckets must be at least 1; got 0"):
        WideDeep(CARDINALITIES, NUM_DENSE, cross_buckets=0)
    with pytest.raises(ValueError, match="one integer for all features of an FM; got"):
        FactorizationMachine(CARDINALITIES, NUM_DENSE, [1, 2, 3])
    for width in (0.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="bin_width must be positive"):
            LogisticRegression(CARDINALITIES, NUM_DENSE, bin_width=width)


@pytest.mark.parametrize("name", ["dnn", "wide_deep"])
def test_a_network_without_cross_layers_is_no_dcn(name):
    model = model_class(name)(CARDINALITIES, NUM_DENSE, deep_layers=(4,))
    assert not isinstance(model, DCN)
    twin = model_class(name).from_config(json.loads(json.dumps(model.config.to_dict())))
    assert twin.config == model.config
    norm = [f"deep.1.{each}" for each in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")]
    tables = [f"embedding.tables.{k}" for k in range(3)]
    wide = [f"wide.tables.tables.{k}" for k in range(5)] if name == "wide_deep" else []
    assert list(model.state_dict()) == [*tables, "deep.0.weight", *norm, "logits.weight", "logits.bias", *wide]


def planted_log(rows, seed):
    """Clicks by one cross: the product of a hidden number per id of features 0 and 1; everything else is noise."""
    hidden = torch.Generator().manual_seed(7)
    factors = [torch.randn(40, generator=hidden) for _ in range(2)]
    generator = torch.Generator().manual_seed(seed)
    categorical = torch.randint(0, 40, (rows, 6), generator=generator)
    dense = torch.randn(rows, 4, generator=generator)
    score = 2 * factors[0][categorical[:, 0]] * factors[1][categorical[:, 1]]
    label = (torch.rand(rows, generator=generator) < torch.sigmoid(score)).float()
    return dense, categorical, label, score


PLANTED = {
    "dcn": {"cross_layers": 2, "deep_layers": (32,)},
    "dnn": {"deep_layers": (32,)},
    "lr": {},
    "fm": {},
    "deep_crossing": {"residual_units": 2, "input_dim": 32, "cross_dim": 32},
    "wide_deep": {"deep_layers": (32,), "crosses": ((0, 1),)},
}


def train_planted(name, seed):
    """Three passes over 20,000 rows; the log loss on as many others."""
    torch.manual_seed(seed)
    model = model_class(name)([40] * 6, 4, 8, **PLANTED[name])
    optimizer = optim.configure(model, lr=0.01)
    dense, categorical, label, _ = planted_log(20_000, seed=0)
    for epoch in range(3):
        for rows in torch.randperm(20_000, generator=torch.Generator().manual_seed(epoch)).split(256):
            optimizer.zero_grad()
            model.loss(model(dense[rows], categorical[rows]), label[rows]).backward()
            optimizer.step()
    dense, categorical, label, _ = planted_log(20_000, seed=1)
    model.eval()
    with torch.no_grad():
        return float(model.loss(model(dense, categorical), label))


def test_dcn_finds_a_planted_cross_and_beats_lr_and_dnn():
    *_, label, score = planted_log(20_000, seed=1)
    optimum = float(nn.functional.binary_cross_entropy_with_logits(score, label))
    runs = {name: [train_planted(name, seed) for seed in range(2)] for name in ("dcn", "dnn", "lr")}
    dcn, dnn, lr = (sum(runs[name]) / 2 for name in ("dcn", "dnn", "lr"))
    assert optimum < dcn < optimum + 0.03
    assert dcn < dnn
    assert dcn < lr - 0.1


@pytest.mark.parametrize("name", ["fm", "deep_crossing", "wide_deep"])
def test_every_baseline_that_can_learn_the_cross_does(name):
    assert train_planted(name, seed=0) < 0.62  # no model without the cross is below log 2 = 0.693
