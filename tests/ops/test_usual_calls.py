"""Calls that are remembered: the same results, and no operand that differs is taken for one that was checked."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fastcross import ops
from fastcross.ops import checks, internals
from fastcross.ops.usual import KEPT, OFTEN

OPERATORS = ("cross_layer", "cross_network", "cross_logits")


def operands(operator, bias=True, rows=6, dtype=torch.float32):
    torch.manual_seed(0)
    x0, x = torch.randn(rows, 9, dtype=dtype), torch.randn(rows, 9, dtype=dtype)
    w, b, v = torch.randn(3, 9, dtype=dtype) / 3, torch.randn(3, 9, dtype=dtype), torch.randn(2, 9, dtype=dtype)
    b = b if bias else None
    if operator == "cross_layer":
        return [x0, x, w[0].clone(), b[0].clone() if bias else None]
    return [x0, w, b] if operator == "cross_network" else [x0, w, b, v]


def leaves(tensors):
    return [t if t is None else t.detach().clone().requires_grad_() for t in tensors]


def step(operator, tensors, dy=None):
    y = getattr(ops, operator)(*tensors)
    given = [t for t in tensors if t is not None]
    return y.detach(), *torch.autograd.grad(y, given, torch.ones_like(y) if dy is None else dy)


def forget_calls(operator):
    calls = getattr(ops, operator).__globals__["_calls"]
    calls._kept.clear()
    calls._missed.clear()


@pytest.fixture(autouse=True)
def forget():
    for operator in OPERATORS:
        forget_calls(operator)


@pytest.fixture
def unchecked(monkeypatch):
    """From here on, a call that is not remembered fails."""

    def fail(*_):
        raise AssertionError("not remembered")

    def forbid():
        monkeypatch.setattr(checks, "fits_layer", fail)
        monkeypatch.setattr(checks, "fits_network", fail)
        monkeypatch.setattr(internals, "are_alike", fail)
        monkeypatch.setattr(internals, "is_plain", fail)

    return forbid


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_remembered_call_gives_the_same_bits(operator, bias, unchecked):
    tensors = leaves(operands(operator, bias))
    with torch.no_grad():
        y = getattr(ops, operator)(*tensors)
    first = step(operator, tensors)
    with torch.no_grad():  # a second time, and they are remembered
        getattr(ops, operator)(*tensors)
    step(operator, tensors)
    unchecked()
    again = leaves(operands(operator, bias))
    for ours, expected in zip(step(operator, again), first, strict=True):
        assert torch.equal(ours, expected)
    with torch.no_grad():
        assert torch.equal(getattr(ops, operator)(*again), y)


@pytest.mark.parametrize("operator", OPERATORS)
def test_other_operands_are_other_calls(operator):
    """Rows, dtypes, strides, missing gradients, threads: each gives what it gives where nothing is remembered."""
    expected, found = [], []
    for results in (expected, found):
        for case in 2 * ("usual", "rows", "dtype", "strides", "expanded", "threads"):
            if results is expected:
                forget_calls(operator)
            tensors = operands(operator, rows=11 if case == "rows" else 6)
            if case == "dtype":
                tensors = [t.double() for t in tensors]
            if case == "strides":
                tensors[0] = torch.nn.functional.pad(tensors[0], (0, 4))[:, :9]
            if case == "expanded":
                tensors[0] = tensors[0][:1].expand(6, 9)
            torch.set_num_threads(1 if case == "threads" else 2)
            tensors = [t.requires_grad_() for t in tensors]
            results += step(operator, tensors)
            tensors[1].requires_grad_(False)
            y = getattr(ops, operator)(*tensors)
            results += torch.autograd.grad(y, [tensors[0], tensors[2]], torch.ones_like(y).T.contiguous().T)
    for ours, right in zip(found, expected, strict=True):
        assert torch.equal(ours, right)


CHANGES = {
    "freed": lambda t: t.untyped_storage().resize_(0),
    "cut": lambda t: t.untyped_storage().resize_(t.nbytes - 4),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_memory_that_is_gone_is_an_error(operator, change):
    """Forward, and between forward and backward; PyTorch itself would crash."""
    for place in range(len(operands(operator))):
        tensors = leaves(operands(operator))
        step(operator, tensors)
        step(operator, tensors)
        y = getattr(ops, operator)(*tensors)
        CHANGES[change](tensors[place].data)
        with pytest.raises(ValueError, match="must have memory of its own"):
            getattr(ops, operator)(*tensors)
        if operator != "cross_layer" or place < 3:  # whose backward pass does not read the bias
            with pytest.raises(ValueError, match="must have memory of its own"):
                y.sum().backward()


@pytest.mark.parametrize("operator", OPERATORS)
def test_what_is_wrong_after_a_right_call_is_refused(operator):
    tensors = leaves(operands(operator))
    step(operator, tensors)
    step(operator, tensors)
    for place in range(len(tensors)):
        for wrong in (torch.ones(5, 8), torch.ones(6, 9, device="meta"), [1.0], torch.ones(6, 9).to_sparse()):
            others = [wrong if i == place else t for i, t in enumerate(tensors)]
            with pytest.raises((TypeError, ValueError), match=r"must (be|have)"):
                getattr(ops, operator)(*others)


def test_what_resemblance_sees():
    t = torch.randn(4, 6, requires_grad=True)
    alike = internals.resemblance([t])
    assert alike(torch.zeros(4, 6, requires_grad=True))
    negated = torch._neg_view(torch.zeros(4, 6)).requires_grad_()
    zeros = torch._efficientzerotensor((4, 6)).requires_grad_()
    subclass = torch.zeros(4, 6).as_subclass(type("Subclass", (torch.Tensor,), {})).requires_grad_()
    for other in (
        torch.zeros(4, 6), torch.zeros(4, 7, requires_grad=True), torch.zeros(6, 4).T.requires_grad_(),
        torch.zeros(4, 6).double().requires_grad_(), torch.zeros(4, 6, device="meta").requires_grad_(),
        torch.nn.Parameter(torch.zeros(4, 6)), negated, zeros, subclass, None, 1.0,
    ):  # fmt: skip
        assert not alike(other)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("rows", [5, 20])
def test_checkpointing_sees_the_same_saved_tensors(operator, rows):
    """In a first call, a remembered one, and where something looks on."""
    for profiled in (False, False, False, True):
        tensors = leaves(operands(operator, rows=rows))
        y = getattr(ops, operator)(*tensors)
        expected = torch.autograd.grad(y.sum(), tensors)
        with torch.autograd.profiler.profile(enabled=profiled):
            y = checkpoint(getattr(ops, operator), *tensors, use_reentrant=False)
        for ours, right in zip(torch.autograd.grad(y.sum(), tensors), expected, strict=True):
            assert torch.equal(ours, right)
        forget_calls(operator) if profiled else None


def test_a_backward_pass_runs_on_the_threads_of_its_own_time():
    torch.manual_seed(0)
    x0, w, dy = torch.randn(4000, 64), (torch.randn(3, 64) / 20).requires_grad_(), torch.randn(4000, 64)

    def gradient(forward, backward):
        torch.set_num_threads(forward)
        y = ops.cross_network(x0, w)
        torch.set_num_threads(backward)
        return torch.autograd.grad(y, w, dy)[0]

    one, two = ([gradient(threads, threads) for _ in range(3)][-1] for threads in (1, 2))
    assert not torch.equal(one, two)  # whose sums join in another order
    for _ in range(3):
        assert torch.equal(gradient(2, 1), one)
        assert torch.equal(gradient(2, 2), two)


@pytest.mark.parametrize("operator", OPERATORS)
def test_operands_that_are_one_tensor_make_no_new_function(operator):
    """PyTorch finds nothing to be like a tensor that comes twice."""
    calls = getattr(ops, operator).__globals__["_calls"]
    tensors = leaves(operands(operator, rows=3))
    tensors[1] = tensors[0] if operator == "cross_layer" else tensors[1]
    if operator != "cross_layer":
        tensors[2] = tensors[1]
    for _ in range(5):
        getattr(ops, operator)(*tensors).sum().backward()
    assert not calls._kept


def test_a_gradient_that_is_the_input_is_no_new_launch(monkeypatch):
    from fastcross.kernels.cpu import cross_network

    tensors = leaves(operands("cross_network"))
    for _ in range(3):
        step("cross_network", tensors)
    monkeypatch.setattr(cross_network.BACKWARD, "launcher", None)
    ops.cross_network(*tensors).backward(tensors[0].detach())
    ops.cross_network(*tensors).backward(tensors[0])


def test_what_is_no_backend_is_named():
    for _ in range(2):
        with pytest.raises(ValueError, match="backend must be one of"):
            ops.cross_network(*operands("cross_network"), backend=["numba"])


@pytest.mark.parametrize("operator", OPERATORS)
def test_calls_that_do_not_come_again_are_not_kept(operator):
    """Each would cost a millisecond; of as many sizes as are in use by turns, all are, and others only if often."""
    calls = getattr(ops, operator).__globals__["_calls"]
    for _ in range(3):
        for rows in range(1, 2 * KEPT):
            step(operator, leaves(operands(operator, rows=rows)))
    assert not calls._kept
    for _ in range(2):
        for rows in range(1, 1 + KEPT):
            step(operator, leaves(operands(operator, rows=rows)))
    assert [len(kept) for kept in calls._kept.values()] == [KEPT]
    before = [*calls._kept.values()]
    for _ in range(OFTEN - 1):
        step(operator, leaves(operands(operator, rows=50)))
    assert [*calls._kept.values()] == before
    step(operator, leaves(operands(operator, rows=50)))
    assert [*calls._kept.values()] != before
