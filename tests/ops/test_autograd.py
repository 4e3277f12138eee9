"""What PyTorch does with the operators: higher derivatives, transforms, the compiler, autocast."""

import pytest
import torch
from operator_cases import operands_of

import fastcross
from fastcross import CrossNetwork, reference
from fastcross.accuracy import BY_NAME, RANK_ONE

BACKENDS = ["torch", "cpu"]


def make(operator, requires_grad=True, **options):
    return [t.requires_grad_(requires_grad) for t in operands_of(operator, scale=0.4, **options)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("operator", RANK_ONE)
def test_gradcheck_and_gradgradcheck(operator, backend):
    def function(*tensors):
        return getattr(fastcross, operator)(*tensors, backend=backend)

    assert torch.autograd.gradcheck(function, make(operator))
    assert torch.autograd.gradgradcheck(function, make(operator))


def test_second_derivative_without_bias():
    x0, w, _ = make("cross_network")
    (dw,) = torch.autograd.grad(fastcross.cross_network(x0, w).sum(), w, create_graph=True)
    (expected,) = torch.autograd.grad(reference.cross_network(x0, w).sum(), w, create_graph=True)
    torch.testing.assert_close(
        torch.autograd.grad(dw.square().sum(), x0), torch.autograd.grad(expected.square().sum(), x0)
    )


@pytest.mark.parametrize("operator", RANK_ONE)
def test_func_grad_and_per_example_gradients(operator):
    tensors = make(operator, requires_grad=False)
    rows = BY_NAME[operator].rows

    def loss(of, *tensors):
        return getattr(of, operator)(*tensors).square().sum()

    for argument in range(len(tensors)):
        ours = torch.func.grad(loss, argnums=argument + 1)(fastcross, *tensors)
        torch.testing.assert_close(ours, torch.func.grad(loss, argnums=argument + 1)(reference, *tensors))
    in_dims = (None, *(0 if i < rows else None for i in range(len(tensors))))
    per_example = torch.vmap(torch.func.grad(loss, argnums=rows + 1), in_dims)(fastcross, *tensors)
    torch.testing.assert_close(
        per_example, torch.vmap(torch.func.grad(loss, argnums=rows + 1), in_dims)(reference, *tensors)
    )


@pytest.mark.parametrize("operator", RANK_ONE)
@pytest.mark.parametrize("over", ["rows", "parameters", "everything"])
def test_vmap(operator, over):
    tensors = make(operator, requires_grad=False)
    rows = BY_NAME[operator].rows
    batched = [over == "everything" or (i < rows) == (over == "rows") for i in range(len(tensors))]
    tensors = [torch.stack((t, 2 * t, -t)) if b else t for t, b in zip(tensors, batched, strict=True)]
    in_dims = tuple(0 if b else None for b in batched)
    ours, expected = (torch.vmap(getattr(of, operator), in_dims)(*tensors) for of in (fastcross, reference))
    torch.testing.assert_close(ours, expected)


def test_vmap_then_backward():
    x0, w, b = make("cross_network")
    x0 = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    grads = torch.autograd.grad(torch.vmap(lambda x: fastcross.cross_network(x, w, b))(x0).sum(), (x0, w, b))
    torch.testing.assert_close(grads, torch.autograd.grad(reference.cross_network(x0, w, b).sum(), (x0, w, b)))


@pytest.mark.parametrize("operator", RANK_ONE)
def test_opcheck(operator):
    tensors = make(operator, rows=6, d=8, requires_grad=False)
    forward, backward = (getattr(torch.ops.fastcross, f"{operator}_{suffix}") for suffix in ("fwd", "bwd"))
    has_layers = BY_NAME[operator].has_layers  # and if wanted keeps a number per row for each
    for keep_p in [(True,), (False,)] if has_layers else [()]:
        torch.library.opcheck(forward, (*tensors, *keep_p))
    y, *p = forward(*tensors, True) if has_layers else [forward(*tensors)]
    for needs in ([True] * len(tensors), *([i % 2 == odd for i in range(len(tensors))] for odd in (0, 1))):
        torch.library.opcheck(backward, (torch.randn_like(y), *tensors, *p, needs))


@pytest.mark.parametrize("operator", RANK_ONE)
def test_compile_is_one_graph_for_any_batch(operator):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(getattr(fastcross, operator), fullgraph=True, dynamic=None)
    for rows in (7, 12, 33, 64, 5):
        tensors = make(operator, rows=rows, dtype=torch.float32)
        ours, expected = compiled(*tensors), getattr(reference, operator)(*tensors)
        torch.testing.assert_close(ours, expected)
        torch.testing.assert_close(
            torch.autograd.grad(ours.square().sum(), tensors), torch.autograd.grad(expected.square().sum(), tensors)
        )
    # The first batch size, then one graph for all others.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert not torch._dynamo.utils.counters["graph_break"]


def test_keeps_one_scalar_per_row_and_layer_for_the_backward_pass():
    kept = []
    x0, w, b = make("cross_network", rows=64, d=32, layers=6, dtype=torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fastcross.cross_network(x0, w, b, backend="cpu")
    inputs = {t.data_ptr() for t in (x0, w, b)}
    assert sum(t.numel() for t in kept if t.data_ptr() not in inputs) <= 64 * 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_keeps_the_rows_dtype_and_float32_sums(dtype):
    torch.manual_seed(0)
    net = CrossNetwork(200, 6)
    x0 = torch.randn(30, 200).to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = [fastcross.cross_network(x0, net.weight, net.bias, backend=backend) for backend in ("auto", "torch")]
        outputs[0].float().sum().backward()
    exact = reference.cross_network(x0.double(), net.weight.double(), net.bias.double())
    for y in outputs:
        assert y.dtype == dtype
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(y.double(), exact, rtol=8 * eps, atol=8 * eps)
    assert x0.grad.dtype == dtype
    assert net.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("backend", BACKENDS)
def test_inference_mode(backend):
    tensors = make("cross_network", requires_grad=False)
    with torch.inference_mode():
        y = fastcross.cross_network(*tensors, backend=backend)
    torch.testing.assert_close(y, reference.cross_network(*tensors))


def test_inputs_are_not_modified_and_results_repeat_bit_for_bit():
    tensors = make("cross_network", rows=3000, d=100, dtype=torch.float32)
    before = [t.detach().clone() for t in tensors]
    runs = []
    for _ in range(3):
        y = fastcross.cross_network(*tensors, backend="cpu")
        runs.append([y, *torch.autograd.grad(y.square().sum(), tensors)])
    assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))
