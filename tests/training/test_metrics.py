"""Metrics against definitions that a person can check: pairs counted one by one, bins filled by hand."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcross.training import metrics


def pairwise_auc(score, label):
    """The definition: the share of (positive, negative) pairs in the right order, ties counting half."""
    positive = [s for s, y in zip(score, label, strict=True) if y]
    negative = [s for s, y in zip(score, label, strict=True) if not y]
    wins = sum((p > n) + 0.5 * (p == n) for p, n in itertools.product(positive, negative))
    return wins / (len(positive) * len(negative))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=40))
def test_auc_counts_pairs_ties_as_half(rows):
    score = torch.tensor([float(s) for s, _ in rows])
    label = torch.tensor([float(y) for _, y in rows])
    if label.min() == label.max():
        assert math.isnan(metrics.auc(score, label))
    else:
        assert metrics.auc(score, label) == pytest.approx(pairwise_auc(score.tolist(), label.tolist()), abs=1e-12)


def test_auc_is_exact_on_many_rows():
    """Float32 ranks above 2²⁴ would round: 20 million rows, the positives on top but for one swapped pair."""
    n = 20_000_000
    score = torch.arange(n, dtype=torch.float64)
    label = (score >= n // 2).float()
    label[0], label[-1] = 1, 0
    half = n // 2
    assert metrics.auc(score, label) == 1 - (2 * half - 1) / (half * half)


def test_auc_refuses_nan():
    with pytest.raises(ValueError, match="1 NaN of 3"):
        metrics.auc(torch.tensor([0.1, float("nan"), 0.3]), torch.tensor([0.0, 1.0, 1.0]))


def test_binary_by_hand():
    p = torch.tensor([0.9, 0.2, 0.6, 0.4], dtype=torch.float64)
    label = torch.tensor([1.0, 0.0, 0.0, 1.0])
    found = metrics.summarise(torch.logit(p), label)
    assert found["logloss"] == pytest.approx(-math.log(0.9 * 0.8 * 0.4 * 0.4) / 4)
    assert found["accuracy"] == 0.5
    assert found["auc"] == 0.75
    assert found["calibration"] == pytest.approx(2.1 / 2)
    # Four bins of width 0.05 with one row each: 0.1, 0.2, 0.6 and 0.6 off.
    assert found["ece"] == pytest.approx((0.1 + 0.2 + 0.6 + 0.6) / 4)


def test_ece_of_a_shared_bin_compares_means():
    assert metrics.expected_calibration_error(torch.full((4,), 0.25), torch.tensor([1, 0, 0, 0])) == 0
    assert metrics.expected_calibration_error(torch.tensor([1.0, 1.0]), torch.tensor([1, 0])) == 0.5


def test_classes_by_hand():
    p = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]])
    found = metrics.summarise(p.log(), torch.tensor([0, 1]))
    assert set(found) == {"logloss", "accuracy", "ece"}
    assert found["logloss"] == pytest.approx(-math.log(0.7 * 0.3) / 2)
    assert found["accuracy"] == 0.5
    assert found["ece"] == pytest.approx((0.3 + 0.6) / 2)


def test_logloss_of_a_sure_mistake_is_not_clipped():
    assert metrics.logloss(torch.tensor([-1000.0]), torch.tensor([1.0])) == 1000


@pytest.mark.parametrize(("rows", "labels"), [(0, 0), (3, 2)])
def test_bad_sizes(rows, labels):
    with pytest.raises(ValueError, match=str(labels)):
        metrics.summarise(torch.zeros(rows), torch.zeros(labels))
