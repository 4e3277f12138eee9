"""What was planted is found: the pairs of a generated log, and a coefficient within its standard error."""

import pytest
import torch

from fastcross import DCN, polynomial, reference
from fastcross.data import prepare
from fastcross.data.generate import FIELDS_U, FIELDS_V, write_click_log
from fastcross.explain.explanation import explain
from fastcross.training.config import TrainingConfig
from fastcross.training.loop import Trainer


@pytest.mark.parametrize("seed", range(5))
def test_the_strongest_pairs_are_the_planted_ones(seed, tmp_path):
    """The logit has u v with u, v sums over four fields each: sixteen pairs of 741."""
    log = tmp_path / "clicks.txt"
    write_click_log(log, 100_000, seed, degree_2=2.0, degree_3=0.5, largest_vocabulary=20)
    cache = prepare(log, tmp_path / "cache")
    names = [*cache.schema.categorical_names, *cache.schema.dense_names]
    torch.manual_seed(seed)
    model = DCN(cache.schema.cardinalities, len(cache.schema.dense_names), 8, cross_layers=2, deep_layers=())
    Trainer(model, cache, TrainingConfig(epochs=4, lr=0.02, schedule="cosine", patience=0)).fit()
    found = explain(
        model,
        lambda: cache.batches("validation", 1024),
        training=lambda: cache.batches("train", 1024),
        names=names,
    )
    planted = {(names[u], names[v]) for u in FIELDS_U for v in FIELDS_V}
    assert {cross.fields for cross in found.strongest(len(planted))} == planted


def test_a_planted_coefficient_is_recovered_within_its_standard_error():
    """Clicks drawn from z = b + (1 + w·x)(v·x); the standard error is that of maximum likelihood (delta method)."""
    torch.manual_seed(0)
    w, v, rows = torch.tensor([1.2, 0.0, -0.5]).double(), torch.tensor([0.2, 0.8, 0.0]).double(), 40_000
    x = torch.randn(rows, 3).double()
    label = (torch.rand(rows).double() < torch.sigmoid(-0.3 + (1 + x @ w) * (x @ v))).double()
    weight, head, bias = (torch.full(shape, 0.1).double().requires_grad_() for shape in ((1, 3), (1, 3), (1,)))
    optimizer = torch.optim.LBFGS([weight, head, bias], max_iter=500, line_search_fn="strong_wolfe")

    def logits(weight, head, bias):
        return reference.cross_logits(x, weight, None, head)[:, 0] + bias

    def closure():
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits(weight, head, bias), label)
        loss.backward()
        return loss

    optimizer.step(closure)

    def cross(weight, head, bias):
        return weight[0, 0] * head[0, 1] + weight[0, 1] * head[0, 0]

    values = tuple(p.detach() for p in (weight, head, bias))
    jacobian = torch.cat([j.flatten(1) for j in torch.func.jacfwd(logits, argnums=(0, 1, 2))(*values)], dim=1)
    probability = torch.sigmoid(logits(*values))
    information = jacobian.T @ (jacobian * (probability * (1 - probability))[:, None])
    slope = torch.cat([g.flatten() for g in torch.func.grad(cross, argnums=(0, 1, 2))(*values)])
    error = float((slope @ torch.linalg.solve(information, slope)).sqrt())
    found = polynomial.coefficient(weight, None, head[0], {0: 1, 1: 1})
    planted = float(w[0] * v[1] + w[1] * v[0])
    assert 0 < error < 0.03
    assert abs(found - planted) < 2 * error, (found, planted, error)
