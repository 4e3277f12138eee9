"""Rows that overlap, are expanded or padded, beside parameters of another dtype; results have memory of their own."""

import pytest
import torch
from operator_cases import operands_of

import fastcross
from fastcross import reference
from fastcross.accuracy import BY_NAME, RANK_ONE

PAIRS = [(torch.float32, torch.float64), (torch.float64, torch.float32), (torch.float32, torch.float16)]
ROWS = {
    "overlapping": lambda dtype: torch.randn(13, dtype=dtype).unfold(0, 8, 1),
    "overlapping by half": lambda dtype: torch.randn(28, dtype=dtype).unfold(0, 8, 4),
    "overlapping, turned": lambda dtype: torch.randn(13, dtype=dtype).unfold(0, 6, 1).T,
    "one row, expanded": lambda dtype: torch.randn(1, 8, dtype=dtype).expand(6, 8),
    "one column, expanded": lambda dtype: torch.randn(6, 1, dtype=dtype).expand(6, 8),
    "one value, expanded": lambda dtype: torch.randn(1, 1, dtype=dtype).expand(6, 8),
    "padded": lambda dtype: torch.randn(6, 16, dtype=dtype)[:, :8],
    "far apart": lambda dtype: torch.randn(6, 200, dtype=dtype)[:, :8],
    "turned": lambda dtype: torch.randn(8, 6, dtype=dtype).T,
    "backwards in memory": lambda dtype: torch.randn(2, 8, 3, dtype=dtype).permute(0, 2, 1).reshape(6, 8),
    "leading dimensions, expanded": lambda dtype: torch.randn(3, 1, 8, dtype=dtype).expand(3, 2, 8),
    "a single feature": lambda dtype: torch.randn(6, 5, dtype=dtype)[:, 2:3],
}


def operands(operator, x0, dtype):
    rows = BY_NAME[operator].rows
    return [*(x0, x0.flip(0))[:rows], *operands_of(operator, d=x0.shape[-1], dtype=dtype, seed=1, scale=0.3)[rows:]]


def gradients(function, leaves, dy, **options):
    y = function(*leaves, **options)
    return y, torch.autograd.grad(y, leaves, dy(y))


def overlaps_itself(t):
    """Whether two elements have one address."""
    places = torch.zeros(t.shape, dtype=torch.int64)
    for size, stride, dim in zip(t.shape, t.stride(), range(t.dim()), strict=True):
        places += (torch.arange(size) * stride).view(-1, *(1,) * (t.dim() - 1 - dim))
    return places.unique().numel() != t.numel()


@pytest.mark.parametrize("backend", ["cpu", "auto"])
@pytest.mark.parametrize("operator", RANK_ONE)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: " and ".join(str(dtype)[6:] for dtype in pair))
@pytest.mark.parametrize("layout", ROWS)
def test_rows_in_any_layout_beside_parameters_of_another_dtype(layout, pair, operator, backend):
    torch.manual_seed(0)
    tensors = operands(operator, ROWS[layout](pair[0]), pair[1])
    leaves = [t.detach().requires_grad_() for t in tensors]
    wide = [t.detach().double().requires_grad_() for t in tensors]
    row = torch.randn(getattr(reference, operator)(*wide).shape[-1])
    for dy in (lambda y: row.to(y.dtype).expand(y.shape), lambda y: y.new_ones(()).expand(y.shape)):
        ours, grads = gradients(getattr(fastcross, operator), leaves, dy, backend=backend)
        exact, expected = gradients(getattr(reference, operator), wide, dy)
        assert ours.dtype == pair[0]
        assert not overlaps_itself(ours)
        eps = max(torch.finfo(dtype).eps for dtype in pair)
        torch.testing.assert_close(ours.double(), exact, rtol=8 * eps, atol=8 * eps)
        for grad, leaf, true in zip(grads, leaves, expected, strict=True):
            assert grad.dtype == leaf.dtype
            assert not overlaps_itself(grad)
            torch.testing.assert_close(grad.double(), true, rtol=8 * eps, atol=8 * eps * (1 + true.abs().max().item()))


@pytest.mark.parametrize("backend", ["cpu", "torch", "auto"])
def test_the_bias_keeps_its_own_dtype(backend):
    """70,000 rows of ones add up to more than half precision holds, but the bias is no half."""
    x0 = torch.ones(70_000, 3)
    w, b = torch.zeros(3, dtype=torch.float16), torch.zeros(3)
    leaves = [x0, x0.clone(), w.requires_grad_(), b.requires_grad_()]
    fastcross.cross_layer(*leaves, backend=backend).sum().backward()
    assert w.grad.dtype == torch.float16
    assert b.grad.dtype == torch.float32
    assert b.grad.tolist() == [70_000.0] * 3


@pytest.mark.parametrize("operator", [name for name in RANK_ONE if "b" in BY_NAME[name].names])
def test_a_float64_bias_alone_is_summed_in_float64(operator):
    torch.manual_seed(0)
    leaves, place = operands(operator, torch.randn(3000, 5), torch.float32), BY_NAME[operator].names.index("b")
    leaves[place] = leaves[place].double()
    leaves = [t.requires_grad_() for t in leaves]
    dy = torch.rand(getattr(fastcross, operator)(*leaves).shape)
    _, grads = gradients(getattr(fastcross, operator), leaves, lambda y: dy, backend="cpu")
    _, exact = gradients(
        getattr(reference, operator), [t.detach().double().requires_grad_() for t in leaves], lambda y: dy.double()
    )
    assert grads[place].dtype == torch.float64
    torch.testing.assert_close(grads[place], exact[place], rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("operator", RANK_ONE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_share_no_memory(operator, dtype):
    torch.manual_seed(0)
    tensors = operands(operator, torch.randn(6, 8), dtype)
    leaves = [t.detach().requires_grad_() for t in tensors]
    y, grads = gradients(getattr(fastcross, operator), leaves, torch.ones_like, backend="cpu")
    results = [y.detach(), *grads]
    assert len({t.untyped_storage().data_ptr() for t in (*results, *tensors)}) == len(results) + len(tensors)
    for grad in grads[1:]:
        assert grad.untyped_storage().nbytes() == grad.nbytes


@pytest.mark.parametrize("operator", RANK_ONE)
def test_no_rows_whatever_their_strides(operator):
    """PyTorch calls a tensor without elements contiguous, and makes no copy of it."""
    for x0 in (torch.randn(0, 10)[:, ::2], torch.randn(5, 0).T, torch.randn(0, 1).expand(0, 5)):
        tensors = operands(operator, x0, torch.float32)
        rows = BY_NAME[operator].rows
        leaves = [t.detach().requires_grad_() for t in (*[x0] * rows, *tensors[rows:])]
        y, grads = gradients(
            getattr(fastcross, operator), leaves, lambda y: torch.ones(()).expand(y.shape), backend="cpu"
        )
        assert y.shape == getattr(reference, operator)(*leaves).shape
        assert [g.shape for g in grads] == [t.shape for t in leaves]
        assert all((g == 0).all() for g in grads)
