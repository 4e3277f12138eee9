"""The logit by field: the parts add up to what the model says, and are the polynomial's own monomials."""

import itertools

import pytest
import torch

from fastcross import DCN, polynomial
from fastcross.batch import Bag, Batch
from fastcross.explain.decomposition import CrossLogit, main_effects, pair_effects, pairs_of, set_effects


@pytest.fixture(params=["mean", "sum"])
def model(request):
    torch.manual_seed(0)
    built = DCN([5, 7], 2, 3, bag_cardinalities=[6], bag_pooling=request.param, cross_layers=3, deep_layers=())
    with torch.no_grad():
        built.cross.bias.normal_()
        built.logits.bias.normal_()
    return built.double().eval()


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randint(0, n, (9,), generator=generator) for n in (5, 7)], 1)
    bag = Bag(
        torch.randint(0, 6, (12,), generator=generator),
        torch.tensor([0, 2, 2, 3, 5, 6, 8, 8, 11]),  # the second and the seventh row have no values
        torch.rand(12, generator=generator, dtype=torch.float64) + 0.5,
    )
    return Batch(torch.randn(9, 2, generator=generator, dtype=torch.float64), ids, (bag,))


def baseline_of(t, kind):
    return t.mean(0) if kind == "mean" else torch.zeros_like(t[0])


@pytest.mark.parametrize("kind", ["mean", "zero"])
def test_the_parts_of_all_orders_add_up_to_the_logit(model, batch, kind):
    logit = CrossLogit(model)
    t = logit.projections(batch)
    expected = model(batch.dense, batch.categorical, batch.bags)
    torch.testing.assert_close(logit(t.sum(1)), expected, rtol=1e-12, atol=1e-12)
    baseline = baseline_of(t, kind)
    torch.testing.assert_close(logit.degrees(t, baseline).sum(1), expected, rtol=1e-12, atol=1e-12)
    constant, main = main_effects(logit, t, baseline)
    total = constant + main.sum(1)
    for size in range(2, logit.fields + 1):
        total = total + set_effects(logit, t, baseline, torch.combinations(torch.arange(logit.fields), size)).sum(1)
    torch.testing.assert_close(total, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kind", ["mean", "zero"])
def test_pairs_at_once_are_pairs_one_by_one(model, batch, kind):
    logit = CrossLogit(model)
    t = logit.projections(batch)
    baseline = baseline_of(t, kind)
    constant, main = main_effects(logit, t, baseline)
    found = pair_effects(logit, t, baseline, main, constant)
    torch.testing.assert_close(found.T, set_effects(logit, t, baseline, pairs_of(logit.fields)), rtol=1e-11, atol=1e-11)


def test_at_baseline_0_a_part_is_the_sum_of_its_monomials():
    torch.manual_seed(2)
    model = DCN([], 3, cross_layers=3, deep_layers=(), logits_bias=False).double().eval()
    torch.nn.init.normal_(model.cross.bias)
    x = torch.randn(4, 3, dtype=torch.float64)
    logit = CrossLogit(model)
    t = logit.projections(Batch(x, torch.empty((4, 0), dtype=torch.int64)))
    parameters = model.cross.weight, model.cross.bias, model.logits.weight[0]

    def monomials(fields):
        total = torch.zeros(4, dtype=torch.float64)
        for alpha in itertools.product(range(1, 5), repeat=len(fields)):
            if sum(alpha) <= 4:
                value = polynomial.coefficient(*parameters, dict(zip(fields, alpha, strict=True)))
                total += value * (x[:, fields] ** torch.tensor(alpha)).prod(1)
        return total

    constant, main = main_effects(logit, t, torch.zeros_like(t[0]))
    assert float(constant) == pytest.approx(polynomial.coefficient(*parameters, {}), rel=1e-12)
    for f in range(3):
        torch.testing.assert_close(main[:, f], monomials([f]), rtol=1e-11, atol=1e-11)
    pairs = set_effects(logit, t, torch.zeros_like(t[0]), pairs_of(3))
    for i, pair in enumerate(pairs_of(3).tolist()):
        torch.testing.assert_close(pairs[:, i], monomials(pair), rtol=1e-11, atol=1e-11)


def test_a_model_without_a_cross_logit_is_refused():
    with pytest.raises(ValueError, match="structure = 'stacked'"):
        CrossLogit(DCN([4], 1, 2, cross_layers=2, deep_layers=(4,), structure="stacked"))
    with pytest.raises(ValueError, match="output must be one of 1, from 0; got 1"):
        CrossLogit(DCN([4], 1, 2, cross_layers=2, deep_layers=()), output=1)
