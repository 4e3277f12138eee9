"""The output and every gradient of each operator, on each backend that runs here, by fastcross/accuracy.py."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastcross
from fastcross import ops, reference
from fastcross.accuracy import OPERATORS, RANK_ONE, assert_as_good_as_eager, evaluate

SHAPES = {
    "one row": (1, 16),
    "no rows": (0, 5),
    "one feature": (9, 1),
    "odd": (7, 33),
    "tall": (1030, 54),
    "wide": (63, 1000),
    "paper": (130, 1026),
}


def test_every_operator_is_held_to_the_rule():
    """By the doctor, and by the tests of all operators."""
    assert {operator.name for operator in OPERATORS} == {*ops.__all__} - {"embedding_stack"}


def operands(operator, rows, d, layers, outputs, bias, dtype, seed=0):
    """x0 [, x], weight, bias [, head]: rows of unit variance, weights as CrossNetwork initialises them."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)

    weight, b = normal(layers, d, scale=(d * layers) ** -0.5), normal(layers, d, scale=0.3) if bias else None
    if operator == "cross_layer":
        return normal(rows, d), normal(rows, d), weight[0].clone(), None if b is None else b[0].clone()
    if operator == "cross_network":
        return normal(rows, d), weight, b
    return normal(rows, d), weight, b, normal(outputs, d, scale=d**-0.5)


def random_gradient(operator, tensors, seed=1):
    shape = (*tensors[0].shape[:-1], tensors[-1].shape[0]) if operator == "cross_logits" else tensors[0].shape
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("operator", "layers"),
    [("cross_layer", 1), *((name, layers) for name in RANK_ONE[1:] for layers in (1, 3, 6, 16))],
)
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_output_and_gradients(backend, operator, layers, dtype, shape, bias):
    tensors = operands(operator, *shape, layers, 3, bias, dtype)
    assert_as_good_as_eager(operator, tensors, backend, random_gradient(operator, tensors))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operator", RANK_ONE)
@pytest.mark.parametrize("shape", [SHAPES["odd"], SHAPES["paper"]], ids=["odd", "paper"])
def test_half_precision(operator, dtype, shape):
    tensors = operands(operator, *shape, 6, 3, True, dtype)
    assert_as_good_as_eager(operator, tensors, "auto", random_gradient(operator, tensors))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_rows_with_float32_parameters(dtype):
    x0, w, b = operands("cross_network", 50, 70, 4, 0, True, torch.float32)
    half = x0.to(dtype).requires_grad_()
    w.requires_grad_()
    y = fastcross.cross_network(half, w, b)
    y.sum().backward()
    exact = reference.cross_network(half.detach().double(), w.detach().double(), b.double())
    assert y.dtype == dtype
    assert half.grad.dtype == dtype
    assert w.grad.dtype == torch.float32
    torch.testing.assert_close(y.double(), exact, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("mixed", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_mixed_full_precision(mixed):
    x0, w, b = operands("cross_network", 20, 30, 3, 0, True, torch.float64)
    x0, w = x0.to(mixed[0]), w.to(mixed[1])
    y = fastcross.cross_network(x0, w, b, backend="cpu")
    assert y.dtype == mixed[0]
    torch.testing.assert_close(y.double(), reference.cross_network(x0.double(), w.double(), b), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("operator", RANK_ONE)
@pytest.mark.parametrize("layout", ["padded", "every other row", "transposed", "expanded", "leading dimensions"])
def test_layouts(operator, backend, layout):
    tensors = list(operands(operator, 24, 33, 3, 2, True, torch.float32))
    for i in range(2 if operator == "cross_layer" else 1):
        x = tensors[i]
        tensors[i] = {
            "padded": lambda x: torch.full((24, 48), torch.nan)[:, :33].copy_(x),
            "every other row": lambda x: torch.full((48, 33), torch.nan)[::2].copy_(x),
            "transposed": lambda x: x.T.contiguous().T,
            "expanded": lambda x: x[:1].expand(24, 33),
            "leading dimensions": lambda x: x.reshape(2, 3, 4, 33),
        }[layout](x)
    assert_as_good_as_eager(operator, tensors, backend, random_gradient(operator, tensors))


def test_padding_between_rows_is_kept_and_not_written():
    buffer = torch.full((8, 48), 7.0)
    x0, (_, w, b) = buffer[:, :33].normal_(), operands("cross_network", 8, 33, 2, 0, True, torch.float32)
    y = fastcross.cross_network(x0, w, b, backend="cpu")
    assert y.stride() == (48, 1)
    assert (buffer[:, 33:] == 7).all()


@settings(max_examples=60, deadline=None)
@given(
    operator=st.sampled_from(RANK_ONE),
    rows=st.integers(0, 70),
    d=st.integers(1, 140),
    layers=st.integers(1, 20),
    outputs=st.integers(1, 9),
    bias=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_shape(operator, rows, d, layers, outputs, bias, seed):
    tensors = operands(operator, rows, d, layers, outputs, bias, torch.float64, seed)
    exact = evaluate(getattr(reference, operator), tensors)
    for backend in ("torch", "cpu"):
        for ours, expected in zip(evaluate(getattr(fastcross, operator), tensors, backend=backend), exact, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("operator", RANK_ONE)
def test_gradients_asked_for_are_the_only_ones_computed(operator):
    tensors = operands(operator, 40, 33, 3, 2, True, torch.float64)
    everything = evaluate(getattr(reference, operator), tensors)[1:]
    for wanted in range(1, 2 ** len(tensors)):
        leaves = [t.detach().requires_grad_(bool(wanted >> i & 1)) for i, t in enumerate(tensors)]
        getattr(fastcross, operator)(*leaves, backend="cpu").sum().backward()
        for leaf, expected in zip(leaves, everything, strict=True):
            assert (leaf.grad is not None) == leaf.requires_grad
            if leaf.requires_grad:
                torch.testing.assert_close(leaf.grad, expected)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_non_finite_rows_stay_their_own(backend, value):
    """A bad row spoils itself and what sums over it, as with PyTorch's own operators; no other row."""
    x0, w, b = operands("cross_network", 10, 20, 3, 0, True, torch.float32)
    x0[6, 3] = value
    y, dx0, dw, db = evaluate(fastcross.cross_network, (x0, w, b), backend=backend)
    expected = evaluate(reference.cross_network, (x0, w, b))
    good = torch.arange(10) != 6
    assert torch.isfinite(y[good]).all()
    assert torch.isfinite(dx0[good]).all()
    assert not torch.isfinite(y[6]).any()
    assert not torch.isfinite(dw).all()
    assert torch.equal(torch.isfinite(db), torch.isfinite(expected[3]))


def test_long_sums_over_rows_keep_their_precision():
    """100,000 rows: the gradients of the parameters are as good as those of the eager loop."""
    tensors = operands("cross_network", 100_000, 8, 2, 0, True, torch.float32)
    assert_as_good_as_eager("cross_network", tensors, "cpu", torch.rand(100_000, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", ["one row", "odd", "wide", "no rows"])
def test_a_single_layer_of_few_elements(shape, dtype):
    """Where ``auto`` leaves the kernels for three of PyTorch's operators."""
    tensors = operands("cross_network", *SHAPES[shape], 1, 1, True, dtype)
    assert_as_good_as_eager("cross_network", tensors, "auto", random_gradient("cross_network", tensors))


def test_a_single_layer_of_few_elements_is_checked_too():
    x0, w = torch.randn(3, 4), torch.randn(1, 4)
    with pytest.raises(ValueError, match=r"bias \(2, 4\) and 1 rows of weight"):
        fastcross.cross_network(x0, w, torch.randn(2, 4))
    with pytest.raises(ValueError, match=r"weight \(1, 5\) and x0 \(3, 4\)"):
        fastcross.cross_network(x0, torch.randn(1, 5), torch.randn(1, 5))
    with pytest.raises(TypeError, match="floating point"):
        fastcross.cross_network(x0.long(), w.long(), w.long())
    grad = torch.func.vmap(fastcross.cross_network, (0, None, None))(torch.randn(2, 3, 4), w, w)
    assert grad.shape == (2, 3, 4)
