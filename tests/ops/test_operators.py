"""The output and every gradient of each operator, on each backend that runs here, by fastcross/accuracy.py."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_cases import operands_of

import fastcross
from fastcross import ops, reference
from fastcross.accuracy import BY_NAME, RANK_ONE, assert_as_good_as_eager, evaluate

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
    assert {*BY_NAME} == {*ops.__all__} - {"embedding_stack"}


def random_gradient(y):
    """Drawn in float64, whatever the dtype."""
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return dy.to(y.dtype)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("operator", "layers"),
    [(name, layers) for name in RANK_ONE for layers in ((1, 3, 6, 16) if BY_NAME[name].has_layers else (1,))],
)
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_output_and_gradients(backend, operator, layers, dtype, shape, bias):
    tensors = operands_of(operator, *shape, layers, 3, bias=bias, dtype=dtype)
    assert_as_good_as_eager(operator, tensors, backend, random_gradient)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operator", RANK_ONE)
@pytest.mark.parametrize("shape", [SHAPES["odd"], SHAPES["paper"]], ids=["odd", "paper"])
def test_half_precision(operator, dtype, shape):
    tensors = operands_of(operator, *shape, 6, dtype=dtype)
    assert_as_good_as_eager(operator, tensors, "auto", random_gradient)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_rows_with_float32_parameters(dtype):
    x0, w, b = operands_of("cross_network", 50, 70, 4, dtype=torch.float32)
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
    x0, w, b = operands_of("cross_network", 20, 30, 3)
    x0, w = x0.to(mixed[0]), w.to(mixed[1])
    y = fastcross.cross_network(x0, w, b, backend="cpu")
    assert y.dtype == mixed[0]
    torch.testing.assert_close(y.double(), reference.cross_network(x0.double(), w.double(), b), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("operator", RANK_ONE)
@pytest.mark.parametrize("layout", ["padded", "every other row", "transposed", "expanded", "leading dimensions"])
def test_layouts(operator, backend, layout):
    tensors = operands_of(operator, 24, 33, dtype=torch.float32)
    for i in range(BY_NAME[operator].rows):
        x = tensors[i]
        tensors[i] = {
            "padded": lambda x: torch.full((24, 48), torch.nan)[:, :33].copy_(x),
            "every other row": lambda x: torch.full((48, 33), torch.nan)[::2].copy_(x),
            "transposed": lambda x: x.T.contiguous().T,
            "expanded": lambda x: x[:1].expand(24, 33),
            "leading dimensions": lambda x: x.reshape(2, 3, 4, 33),
        }[layout](x)
    assert_as_good_as_eager(operator, tensors, backend, random_gradient)


def test_padding_between_rows_is_kept_and_not_written():
    buffer = torch.full((8, 48), 7.0)
    x0, (_, w, b) = buffer[:, :33].normal_(), operands_of("cross_network", 8, 33, 2, dtype=torch.float32)
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
    tensors = operands_of(operator, rows, d, layers, outputs, bias=bias, seed=seed)
    exact = evaluate(getattr(reference, operator), tensors)
    for backend in ("torch", "cpu"):
        for ours, expected in zip(evaluate(getattr(fastcross, operator), tensors, backend=backend), exact, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("operator", RANK_ONE)
def test_gradients_asked_for_are_the_only_ones_computed(operator):
    tensors = operands_of(operator, 40, 33)
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
    x0, w, b = operands_of("cross_network", 10, 20, 3, dtype=torch.float32)
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
    tensors = operands_of("cross_network", 100_000, 8, 2, dtype=torch.float32)
    assert_as_good_as_eager("cross_network", tensors, "cpu", torch.rand(100_000, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", ["one row", "odd", "wide", "no rows"])
def test_a_single_layer_of_few_elements(shape, dtype):
    """Where ``auto`` leaves the kernels for three of PyTorch's operators."""
    tensors = operands_of("cross_network", *SHAPES[shape], 1, dtype=dtype)
    assert_as_good_as_eager("cross_network", tensors, "auto", random_gradient)


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
