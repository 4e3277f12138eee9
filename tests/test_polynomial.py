"""Theorem 3.1: coefficients against a brute-force expansion, the network itself, and the paper's own example."""

import itertools
import math
import time

import pytest
import torch

from fastcross import polynomial, reference


def network(
    seed: int, d: int, layers: int, bias: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(layers, d, generator=generator, dtype=torch.float64)
    b = torch.randn(layers, d, generator=generator, dtype=torch.float64) if bias else None
    return weight, b, torch.randn(d, generator=generator, dtype=torch.float64)


def expand(weight, bias, head) -> dict[tuple[int, ...], float]:
    """Every coefficient of x_Lᵀ v by multiplying out eq. 3, layer by layer: monomials are exponents by feature."""
    layers, d = weight.shape
    unit = [tuple(int(i == j) for j in range(d)) for i in range(d)]
    x = [{unit[i]: 1.0} for i in range(d)]
    for layer in range(layers):
        dot: dict[tuple[int, ...], float] = {}
        for i in range(d):
            for monomial, value in x[i].items():
                dot[monomial] = dot.get(monomial, 0.0) + float(weight[layer, i]) * value
        for i in range(d):
            out = dict(x[i])
            for monomial, value in dot.items():
                raised = tuple(a + b for a, b in zip(monomial, unit[i], strict=True))
                out[raised] = out.get(raised, 0.0) + value
            if bias is not None:
                out[(0,) * d] = out.get((0,) * d, 0.0) + float(bias[layer, i])
            x[i] = out
    logit: dict[tuple[int, ...], float] = {}
    for i in range(d):
        for monomial, value in x[i].items():
            logit[monomial] = logit.get(monomial, 0.0) + float(head[i]) * value
    return logit


@pytest.mark.parametrize(
    ("d", "layers", "bias"), [(1, 1, True), (2, 3, True), (3, 4, True), (3, 4, False), (4, 2, True)]
)
def test_every_coefficient_is_that_of_the_expansion(d, layers, bias):
    parameters = network(0, d, layers, bias)
    expected = expand(*parameters)
    for alpha in itertools.product(range(layers + 3), repeat=d):
        if sum(alpha) <= layers + 2:
            found = polynomial.coefficient(*parameters, dict(enumerate(alpha)))
            assert found == pytest.approx(expected.get(alpha, 0.0), rel=1e-12, abs=1e-12), alpha


def test_the_coefficients_sum_to_the_networks_output():
    weight, bias, head = network(1, 3, 4)
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    total = torch.zeros(5, dtype=torch.float64)
    for alpha in itertools.product(range(6), repeat=3):
        if sum(alpha) <= 5:
            power = torch.tensor(alpha)
            total += polynomial.coefficient(weight, bias, head, dict(enumerate(alpha))) * (x**power).prod(1)
    expected = reference.cross_logits(x, weight, bias, head[None])[:, 0]
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)


def test_the_papers_example():
    """Section 3: x1 x2 x3 in x_lᵀ w_l sums over all orders i, j, k and, for l = 3, over the layers before it."""
    weight, _, _ = network(3, 3, 4, bias=False)

    def by_hand(*layers: int) -> float:
        orders = itertools.permutations(range(3))
        return sum(math.prod(float(weight[at, i]) for at, i in zip(layers, order, strict=True)) for order in orders)

    # x_lᵀ w_l is the logit of a network of l layers with the head w_l.
    cross = {0: 1, 1: 1, 2: 1}
    assert polynomial.coefficient(weight[:2], None, weight[2], cross) == pytest.approx(by_hand(0, 1, 2), rel=1e-12)
    third = by_hand(0, 1, 3) + by_hand(0, 2, 3) + by_hand(1, 2, 3)
    assert polynomial.coefficient(weight[:3], None, weight[3], cross) == pytest.approx(third, rel=1e-12)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("d", "layers"), [(1, 3), (3, 4), (5, 3), (6, 2)])
def test_the_largest_terms_are_those_of_the_expansion(d, layers, bias):
    for seed in range(5):
        parameters = network(seed, d, layers, bias)
        expected = expand(*parameters)
        for degree in range(layers + 3):
            values = sorted((abs(value) for alpha, value in expected.items() if sum(alpha) == degree), reverse=True)
            found = polynomial.terms(*parameters, degree, top=7)
            nonzero = [value for value in values[:7] if value > 1e-12]
            assert [abs(term.coefficient) for term in found][: len(nonzero)] == pytest.approx(nonzero, rel=1e-10)
            for term in found:
                assert sum(term.alpha.values()) == degree
                key = tuple(term.alpha.get(i, 0) for i in range(d))
                assert term.coefficient == pytest.approx(expected[key], rel=1e-10, abs=1e-12)
            assert len({tuple(sorted(term.alpha.items())) for term in found}) == len(found)


def test_terms_of_a_wide_network_are_found_without_enumeration():
    weight, bias, head = (t.clone() for t in network(4, 1026, 6))
    weight *= (1026 * 6) ** -0.5
    bias *= 0.01
    planted = (17, 400, 1001)
    for layer, feature in zip((0, 3, 5), planted, strict=True):
        weight[layer, feature] = 1.5
    head[planted[0]] = 3.0
    started = time.perf_counter()
    best = polynomial.terms(weight, bias, head, 3, top=3)
    assert time.perf_counter() - started < 30, "1026³/6 is 1.8e8 monomials: branch and bound must see far fewer"
    assert set(planted) == set(best[0].alpha)
    assert best[0].coefficient == pytest.approx(polynomial.coefficient(weight, bias, head, best[0].alpha), rel=1e-9)


def test_bad_input_is_named():
    weight, bias, head = network(0, 3, 2)
    with pytest.raises(ValueError, match=r"features 0 to 2 .* got 3: 1"):
        polynomial.coefficient(weight, bias, head, {3: 1})
    with pytest.raises(ValueError, match=r"head must be \(3,\).* got \(4,\)"):
        polynomial.coefficient(weight, bias, torch.ones(4), {})
    with pytest.raises(ValueError, match=r"bias must be shaped as weight; got \(1, 3\) and \(2, 3\)"):
        polynomial.terms(weight, bias[:1], head, 1)
    with pytest.raises(ValueError, match="top at least 1; got degree = 1 and top = 0"):
        polynomial.terms(weight, bias, head, 1, top=0)
    assert math.isclose(polynomial.coefficient(weight, None, head, {}), 0.0)
