"""Theorem 3.1 as code: exact coefficients of the polynomial that a cross network with a head computes.

A cross network of L layers with a head v computes, for an input x, a polynomial of degree L + 1 in x_1, …, x_d:

    z = α_L q + β_L·v,   q = v·x,   p_l = w_l·x
    α_0 = 1,  α_{l+1} = α_l (1 + p_l) + c_l,   c_l = β_l·w_l,   β_l = b_0 + … + b_{l-1}

Its d^(L+1) coefficients are never listed. One coefficient needs the recurrence on polynomials in its own variables
only, truncated at its exponents: Π (α_i + 1) numbers. Branch and bound finds the largest ones of a degree. All
computation is in float64 on the CPU.
"""

import heapq
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.float64]


class Term(NamedTuple):
    """One monomial, as {feature: exponent}, and its coefficient."""

    alpha: dict[int, int]
    coefficient: float


def coefficient(weight: Tensor, bias: Tensor | None, head: Tensor, alpha: Mapping[int, int]) -> float:
    """The coefficient of ``x^alpha`` in the logit ``z = x_Lᵀ v``, biases included: O(L |alpha| Π (alpha_i + 1)).

    Args:
        weight, bias: (L, d) each; the bias may be None.
        head: v, (d,).
        alpha: the monomial, a dict from feature to exponent; {} is the constant term.
    """
    network = _Network(weight, bias, head)
    features, exponents = _monomial(alpha, network.columns.shape[1])
    return network.coefficient(features, exponents)


def terms(weight: Tensor, bias: Tensor | None, head: Tensor, degree: int, top: int = 10) -> list[Term]:
    """The ``top`` monomials of one degree whose coefficients are largest in absolute value, largest first.

    Branch and bound builds monomials feature by feature, and prunes a prefix if no completion can reach the ``top``
    best so far. Zero terms are left out. Ties go to the lower features.

    Args:
        weight, bias, head: as for :func:`coefficient`.
        degree: 0 to L + 1, the polynomial's degree.
        top: number of terms.
    """
    network = _Network(weight, bias, head)
    if degree < 0 or top < 1:
        raise ValueError(f"degree must be at least 0 and top at least 1; got degree = {degree} and top = {top}")
    if degree > len(network.c) + 1:
        return []
    if degree == 0:
        constant = network.coefficient((), ())
        return [Term({}, constant)] if constant else []
    return _Search(network, degree, top).run()


class _Network:
    """The network's parameters in float64: ``columns`` is (L + 1, d), the layers' w_l and then v."""

    def __init__(self, weight: Tensor, bias: Tensor | None, head: Tensor) -> None:
        if weight.dim() != 2 or weight.numel() == 0:
            raise ValueError(f"weight must be (L, d), none of them 0; got {tuple(weight.shape)}")
        if bias is not None and bias.shape != weight.shape:
            raise ValueError(f"bias must be shaped as weight; got {tuple(bias.shape)} and {tuple(weight.shape)}")
        if head.shape != weight.shape[1:]:
            raise ValueError(f"head must be ({weight.shape[1]},), as weight's rows; got {tuple(head.shape)}")
        w, v = _array(weight), _array(head)
        b = np.zeros_like(w) if bias is None else _array(bias)
        beta = np.concatenate((np.zeros((1, w.shape[1])), np.cumsum(b, axis=0)))
        self.columns = np.concatenate((w, v[None]))
        self.c = (beta[:-1] * w).sum(axis=1)
        self.constant = float(beta[-1] @ v)
        # α_l's constant term: the factor of the first of a term's layers.
        self.starts = 1 + np.concatenate(([0.0], np.cumsum(self.c)))

    def coefficient(self, features: tuple[int, ...], exponents: tuple[int, ...]) -> float:
        if not features:
            return self.constant
        alpha = _alphas(self.columns[:-1, features], self.starts, exponents)[-1]
        return float(_times(alpha, self.columns[-1, features])[exponents])


class _Search:
    """Best-first branch and bound over multisets of features, each built in one fixed order of the features."""

    def __init__(self, network: _Network, degree: int, top: int) -> None:
        self.degree, self.top, self.starts = degree, top, network.starts
        strength = np.abs(network.columns).max(axis=0)
        self.order = np.argsort(-strength, kind="stable")  # strong features first, so that bounds fall quickly
        self.columns = np.ascontiguousarray(network.columns[:, self.order])
        self.absolute = np.abs(self.columns)
        # largest[:, i]: the largest of each layer over the features from position i on.
        self.largest = np.maximum.accumulate(self.absolute[:, ::-1], axis=1)[:, ::-1]
        self.found: list[tuple[float, tuple[int, ...], float]] = []  # a heap of the best, the smallest on top

    def run(self) -> list[Term]:
        queue: list[tuple[float, tuple[int, ...]]] = [(-math.inf, ())]
        while queue:
            bound, chosen = heapq.heappop(queue)
            if -bound < self._threshold():
                break
            if len(chosen) == self.degree - 1:
                self._finish(chosen)
                continue
            first = chosen[-1] if chosen else 0
            bounds = self._bounds(chosen, first)
            for i in np.flatnonzero((bounds >= self._threshold()) & (bounds > 0)):
                heapq.heappush(queue, (-float(bounds[i]), (*chosen, first + int(i))))
        best = sorted(self.found, key=lambda entry: (-entry[0], sorted(entry[1])))
        return [Term(_exponents(features), value) for _, features, value in best]

    def _threshold(self) -> float:
        return self.found[0][0] if len(self.found) == self.top else 0.0

    def _bounds(self, chosen: tuple[int, ...], first: int) -> Array:
        """For each next feature from ``first`` on: an upper bound of the coefficients of all completions.

        The remaining features are replaced by one that is as strong in each layer as the strongest of them. Distinct
        features have at most left! times as many arrangements as a repeated one.
        """
        left = self.degree - len(chosen) - 1
        features, exponents = _collect(chosen)
        columns = np.concatenate((self.absolute[:, features], self.largest[:, first, None]), axis=1)
        derivative = _derivative(columns, np.abs(self.starts), (*exponents, left))
        # Slightly larger, so that rounding never prunes a tie with the best.
        return derivative @ self.absolute[:, first:] * (math.factorial(left) * (1 + 1e-9))

    def _finish(self, chosen: tuple[int, ...]) -> None:
        """The exact coefficients of ``chosen`` with each last feature."""
        first = chosen[-1] if chosen else 0
        features, exponents = _collect(chosen)
        values = _derivative(self.columns[:, features], self.starts, exponents) @ self.columns[:, first:]
        if chosen:  # ∂x^(a+1) = (a + 1) x^a; only the last feature, the first position here, can be met again
            values[0] /= 1 + exponents[features.index(first)]
        size = np.abs(values)
        for i in np.argsort(-size, kind="stable")[: self.top]:
            if size[i] == 0 or size[i] < self._threshold():
                break
            entry = (float(size[i]), tuple(int(self.order[j]) for j in (*chosen, first + int(i))), float(values[i]))
            if len(self.found) < self.top:
                heapq.heappush(self.found, entry)
            else:
                heapq.heappushpop(self.found, entry)


def _derivative(columns: Array, starts: Array, exponents: tuple[int, ...]) -> Array:
    """(L + 1,): the coefficients at ``exponents`` of ∂z/∂p_l for each layer, and of ∂z/∂q last.

    ∂z/∂x_j = Σ_l w_l[j] ∂z/∂p_l + v[j] ∂z/∂q, whose coefficient at x^a is (a_j + 1) times z's at x^a x_j: one product
    with all columns gives the coefficients of the monomial times every single feature.
    """
    layers, v = columns[:-1], columns[-1]
    alphas = _alphas(layers, starts, exponents)
    result = np.empty(len(layers) + 1)
    result[-1] = alphas[-1][exponents]
    after = _times(_one(exponents), v)  # q Π_{m > l} (1 + p_m)
    for layer in range(len(layers) - 1, -1, -1):
        # The coefficient at the last exponents of a product is the sum of one factor times the other reversed.
        result[layer] = np.sum(alphas[layer] * np.flip(after))
        after = after + _times(after, layers[layer])
    return result


def _alphas(layers: Array, starts: Array, exponents: tuple[int, ...]) -> list[Array]:
    """α_0, …, α_L as polynomials in the columns' variables, cut off at ``exponents``."""
    zero = (0,) * len(exponents)
    alpha = _one(exponents)
    alphas = [alpha]
    for layer, w in enumerate(layers):
        alpha = np.asarray(alpha + _times(alpha, w))
        alpha[zero] = starts[layer + 1]
        alphas.append(alpha)
    return alphas


def _one(exponents: tuple[int, ...]) -> Array:
    one = np.zeros([exponent + 1 for exponent in exponents])
    one[(0,) * len(exponents)] = 1
    return one


def _times(polynomial: Array, w: Array) -> Array:
    """The product with Σ_i w_i x_i; what exceeds the exponents is dropped."""
    product = np.zeros_like(polynomial)
    for axis, factor in enumerate(w):
        here, there = [slice(None)] * polynomial.ndim, [slice(None)] * polynomial.ndim
        here[axis], there[axis] = slice(1, None), slice(None, -1)
        product[tuple(here)] += factor * polynomial[tuple(there)]
    return product


def _collect(chosen: tuple[int, ...]) -> tuple[list[int], tuple[int, ...]]:
    counted = _exponents(chosen)
    return list(counted), tuple(counted.values())


def _exponents(features: tuple[int, ...]) -> dict[int, int]:
    return {feature: features.count(feature) for feature in sorted(features)}


def _monomial(alpha: Mapping[int, int], d: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    for feature, exponent in alpha.items():
        if not 0 <= feature < d or exponent < 0:
            raise ValueError(
                f"alpha must name features 0 to {d - 1} with exponents of at least 0; got {feature}: {exponent}"
            )
    features = tuple(feature for feature, exponent in alpha.items() if exponent)
    return features, tuple(alpha[feature] for feature in features)


def _array(parameter: Tensor) -> Array:
    return parameter.detach().to("cpu", torch.float64).numpy()
