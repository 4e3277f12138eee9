"""Sums over rows: in float64 they are good to a few units, however many rows there are; infinity stays infinity."""

import math

import pytest
import torch

from fastcross import cross_layer, cross_logits, cross_network, reference

ROWS, D = 200_000, 5
UNITS = 16  # one running sum of so many rows would be off by some hundred


@pytest.fixture(scope="module")
def numbers():
    return torch.rand(ROWS, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def assert_summed_well(found, columns):
    """Each within a few units in the last place of the exact sum of its column: shares of rows are summed in turn."""
    for value, column in zip(found.tolist(), columns.T, strict=True):
        exact = math.fsum(column.tolist())
        assert abs(value - exact) <= UNITS * math.ulp(exact), (value - exact) / math.ulp(exact)


def parameter(*rows):
    return torch.tensor(rows, dtype=torch.float64, requires_grad=True)


def test_db_of_a_layer_and_a_network(numbers):
    x0 = torch.ones_like(numbers)
    w, b = parameter([0.0] * D), parameter([0.0] * D)
    (db,) = torch.autograd.grad(cross_layer(x0, x0, w[0], b[0], backend="cpu"), b, numbers)
    assert_summed_well(db[0], numbers)
    (db,) = torch.autograd.grad(cross_network(x0, w, b, backend="cpu"), b, numbers)
    assert_summed_well(db[0], numbers)


def test_dw_of_a_layer_and_a_network(numbers):
    """With x0 of ones and a single column of g, ds = a = g: dw is its sum."""
    x0, g = torch.ones_like(numbers), torch.zeros_like(numbers)
    g[:, 0] = numbers[:, 0]
    w, b = parameter([0.0] * D), parameter([0.0] * D)
    (dw,) = torch.autograd.grad(cross_layer(x0, x0, w[0], b[0], backend="cpu"), w, g)
    assert_summed_well(dw[0, :1], numbers[:, :1])
    (dw,) = torch.autograd.grad(cross_network(x0, w, b, backend="cpu"), w, g)
    assert_summed_well(dw[0, :1], numbers[:, :1])


def test_dc(numbers):
    """db_0 = Σ g + dc_1 w_1; where g is zero and w_1 is one, it is dc_1 = Σ a_2 = Σ g·x0."""
    x0, g = torch.ones_like(numbers), torch.zeros_like(numbers)
    g[:, 0] = numbers[:, 0]
    w, b = parameter([0.0] * D, [0.0, 1.0, 0.0, 0.0, 0.0]), parameter([0.0] * D, [0.0] * D)
    (db,) = torch.autograd.grad(cross_network(x0, w, b, backend="cpu"), b, g)
    assert_summed_well(db[0, 1:2], numbers[:, :1])


def test_gradients_of_logits(numbers):
    x0, dz = torch.ones_like(numbers), numbers[:, :1].contiguous()
    w, b, v = parameter([0.0] * D), parameter([0.0] * D), parameter([1.0, 0.0, 0.0, 0.0, 0.0])
    dw, db, dv = torch.autograd.grad(cross_logits(x0, w, b, v, backend="cpu"), (w, b, v), dz)
    for gradient in (dw, db, dv):
        assert_summed_well(gradient[0, :1], dz)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [4, 5, 303])
@pytest.mark.parametrize("bias", [0.0, 0.3])
def test_an_infinite_gradient_makes_no_nan(dtype, rows, bias):
    """What exact sums lose of it is no number, and β may be 0: the weights' gradients are those of the loop.

    Where α x0 and β have other signs, or x0 is 0, the closed form has no such number to find.
    """
    generator = torch.Generator().manual_seed(rows)
    x0, w, dy = (torch.rand(*shape, dtype=dtype, generator=generator) + 0.1 for shape in ((rows, D), (2, D), (rows, D)))
    b, dy[0, 1] = torch.full((2, D), bias, dtype=dtype), math.inf
    parameters = w.requires_grad_(), b.requires_grad_()
    ours = torch.autograd.grad(cross_network(x0, w, b, backend="cpu"), parameters, dy)
    eager = torch.autograd.grad(reference.cross_network(x0, w, b), parameters, dy)
    assert ours[0].isinf().all()
    for found, expected in zip(ours, eager, strict=True):
        torch.testing.assert_close(found, expected)
