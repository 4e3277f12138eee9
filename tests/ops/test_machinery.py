"""The operators amid PyTorch's other machinery: devices by default, tracing, tangents, lazy tensors."""

import pytest
import torch
from operator_cases import operands_of
from torch.autograd import forward_ad

import fastcross
from fastcross import reference
from fastcross.accuracy import RANK_ONE, evaluate


@pytest.fixture
def operands():
    torch.manual_seed(0)
    return torch.randn(8, 9), torch.randn(3, 9) / 3, torch.randn(3, 9)


@pytest.mark.parametrize("size", [8, 4096])
@pytest.mark.parametrize("operator", RANK_ONE)
def test_a_default_device_does_not_move_the_scratch(operator, size):
    tensors, function = operands_of(operator, size, 9, dtype=torch.float32), getattr(fastcross, operator)
    expected = evaluate(function, tensors)
    with torch.device("meta"):
        assert torch.equal(function(*tensors), expected[0])
        results = evaluate(function, tensors)
    assert all(torch.equal(ours, before) for ours, before in zip(results, expected, strict=True))
    for ours, exact in zip(results, evaluate(getattr(reference, operator), tensors, dtype=torch.float64), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-4 * exact.abs().max().item())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_sees_the_operator(operands):
    x0, w, b = operands
    with torch.no_grad():
        traced = torch.jit.trace(lambda x: fastcross.cross_network(x, w, b, backend="cpu"), (x0,), check_trace=False)
    other = torch.randn_like(x0)
    torch.testing.assert_close(traced(other), reference.cross_network(other, w, b))


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_tangents_are_carried_along(operands, layers, requires_grad):
    x0, w, b = operands
    w, b = w[:layers].clone().requires_grad_(requires_grad), b[:layers]
    tangent = torch.randn_like(x0)
    for function in (fastcross.cross_network, reference.cross_network):
        y, dy = torch.func.jvp(lambda x, f=function: f(x, w, b), (x0,), (tangent,))
        with forward_ad.dual_level():
            dual = forward_ad.unpack_dual(function(forward_ad.make_dual(x0, tangent), w, b)).tangent
        if function is fastcross.cross_network:
            ours = (y, dy, dual, torch.func.jacfwd(lambda x: fastcross.cross_network(x, w, b).sum(0))(x0))
    expected = (y, dy, dual, torch.func.jacfwd(lambda x: reference.cross_network(x, w, b).sum(0))(x0))
    for a, e in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, e)


def test_a_single_row_without_a_batch(operands):
    x0, w, b = operands
    for layers in (1, 3):
        assert fastcross.cross_network(x0[0], w[:layers], b[:layers]).shape == (9,)


def test_compiled_with_padded_rows_of_another_dtype(operands):
    _, w, _ = operands
    padded = torch.randn(8, 16)[:, :9]
    double = torch.compile(lambda x, w: fastcross.cross_network(x, w, backend="cpu") * 2)
    torch.testing.assert_close(double(padded, w.double()), 2 * reference.cross_network(padded, w))


def test_compiled_with_transposed_weights(operands):
    x0, w, _ = operands
    transposed = w.t().contiguous().t().requires_grad_()
    torch.compile(lambda x, w: fastcross.cross_network(x, w * 2, backend="cpu"))(x0, transposed).sum().backward()
    mine, transposed.grad = transposed.grad, None
    reference.cross_network(x0, transposed * 2).sum().backward()
    torch.testing.assert_close(mine, transposed.grad)


def test_lazily_negated_and_zero_tensors(operands):
    x0, w, b = operands
    negated = torch._neg_view(w)
    assert negated.is_neg()
    ours = fastcross.cross_network(x0, negated, b, backend="cpu")
    torch.testing.assert_close(ours, reference.cross_network(x0, negated, b))
    leaf = x0.clone().requires_grad_()
    zero = torch._efficientzerotensor((8, 9))
    (gradient,) = torch.autograd.grad(fastcross.cross_network(leaf, w, b), leaf, zero)
    assert not gradient.any()


def test_what_is_left_of_a_functorch_transform(operands):
    x0, w, b = operands
    kept = []
    torch.func.grad(lambda w: (kept.append(w * 1), w.sum())[1])(w)
    torch.testing.assert_close(fastcross.cross_network(x0, kept[0], b), reference.cross_network(x0, w, b))
    x0.requires_grad_()
    fastcross.cross_network(x0, kept[0], b).sum().backward()
    assert x0.grad is not None
