"""The Triton kernels: output and every gradient, by fastcross/accuracy.py, on a GPU or in Triton's interpreter.

A process either interprets or compiles: tests/test_triton_interpreter.py runs this file with TRITON_INTERPRET=1. Run
otherwise, the tests need a GPU, which is looked for when one runs and not when they are collected.
"""

import pytest
import torch
from operator_cases import operands_of
from triton_place import INTERPRETING, MARKS

import fastcross
from fastcross.accuracy import BY_NAME, RANK_ONE, assert_as_good_as_eager, evaluate
from fastcross.ops import backends

pytestmark = MARKS
HALF, BF16, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """In the interpreter as if on a small GPU, so that a program has several tiles of rows to go through."""
    if INTERPRETING:
        from fastcross.kernels.gpu import launch

        monkeypatch.setattr(launch, "hardware_of", lambda device: launch.Hardware(processors=1))


def operands(operator, rows, d, layers, dtype, device, *, bias=True, stride=None, params=None, outputs=2):
    """Rows with ``stride`` elements from one to the next, parameters in a dtype of their own if it is given."""
    drawn = operands_of(operator, rows, d, layers, outputs, bias=bias, seed=rows * d * layers)
    of_rows, between = BY_NAME[operator].rows, (0, (stride or d) - d)
    x = [torch.nn.functional.pad(t, between, value=7.0).to(device, dtype)[:, :d] for t in drawn[:of_rows]]
    return [*x, *(None if t is None else t.to(device, params or dtype) for t in drawn[of_rows:])]


def gradient_of(y):
    """The same in every dtype; its rows have a stride of their own."""
    dy = torch.linspace(-1, 1, y.numel() + y.shape[0], dtype=torch.float32, device=y.device)
    return dy.bfloat16().to(y.dtype).view(y.shape[0], y.shape[1] + 1)[:, :-1]


def check(operator, tensors):
    return assert_as_good_as_eager(operator, tensors, "triton", gradient_of)


def results(operator, tensors):
    return evaluate(getattr(fastcross, operator), tensors, gradient_of, backend="triton")


CASES = {  # rows, d, layers, dtype, further arguments
    "one row": (1, 16, 3, SINGLE, {}),
    "no rows": (0, 5, 2, SINGLE, {}),
    "one feature": (9, 1, 3, SINGLE, {}),
    "odd": (7, 33, 6, SINGLE, {}),
    "odd, no bias": (7, 33, 6, SINGLE, {"bias": False}),
    "odd, float64": (7, 33, 3, DOUBLE, {}),
    "odd, float16": (7, 33, 3, HALF, {"bias": False}),
    "odd, bfloat16": (7, 33, 3, BF16, {}),
    "wide": (63, 1000, 3, SINGLE, {"bias": False}),
    "paper": (5, 1026, 6, SINGLE, {}),
    "paper, one layer": (5, 1026, 1, BF16, {}),
    "paper, aligned": (5, 1026, 6, SINGLE, {"stride": 1040}),
    "paper, aligned bfloat16": (9, 1026, 6, BF16, {"stride": 1040}),
    "paper, half aligned": (5, 390, 3, HALF, {"stride": 396}),
    "mixed": (7, 54, 3, BF16, {"params": SINGLE, "stride": 64}),
    "mixed float16": (3, 54, 3, HALF, {"params": SINGLE}),
    "deep": (5, 40, 16, SINGLE, {}),
    "deepest": (3, 17, 64, SINGLE, {}),
    "sums in memory": (9, 300, 33, SINGLE, {"bias": False}),
    "long": (3, 5000, 3, SINGLE, {"stride": 5008}),
    "longer": (1, 16384, 2, BF16, {"outputs": 1, "bias": False}),
    "longest": (2, 42000, 1, SINGLE, {"outputs": 1, "bias": False}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("operator", RANK_ONE)
def test_output_and_gradients(operator, case, device):
    rows, d, layers, dtype, further = CASES[case]
    check(operator, operands(operator, rows, d, layers, dtype, device, **further))


@pytest.mark.parametrize("operator", RANK_ONE)
def test_same_bits_again(operator, device):
    tensors = operands(operator, 70, 20, 3, SINGLE, device)
    first, second = results(operator, tensors), results(operator, tensors)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("operator", RANK_ONE)
@pytest.mark.parametrize("d", [20, 4200])
def test_only_needed_gradients(operator, d, device):
    tensors = operands(operator, 5, d, 2, SINGLE, device)
    dy = torch.ones_like(getattr(fastcross, operator)(*tensors, backend="triton"))
    fwd, bwd = backends.launcher(f"{operator}_fwd"), backends.launcher(f"{operator}_bwd")
    saved = (*tensors, fwd(*tensors, True)[1]) if BY_NAME[operator].has_layers else tensors
    count = len(tensors)
    every = bwd(dy, *saved, [True] * count)
    for i in range(count):
        for needs in ([j == i for j in range(count)], [j != i for j in range(count)]):
            for grad, full, needed in zip(bwd(dy, *saved, needs), every, needs, strict=True):
                if needed:  # the sums' order may be another: registers that others do not need hold more rows
                    torch.testing.assert_close(grad, full, rtol=0, atol=1e-5 * full.abs().max().item())
                else:
                    assert grad.numel() == 0


@pytest.mark.parametrize("operator", RANK_ONE)
@pytest.mark.parametrize("d", [30, 33, 4200])
def test_writes_nothing_between_rows(operator, d, device, monkeypatch):
    """Rows are written into the middle of a larger tensor; what lies around them and between them stays as it was."""
    from fastcross.kernels.gpu import cross_layer, cross_network

    bands = []

    def empty_rows(x):
        rows, width = x.shape
        band = x.new_full((rows + 4, width + 14 + (-width) % 16), 7.0)
        bands.append((band, width))
        return band[2:-2, 8 : 8 + width]

    monkeypatch.setattr(cross_layer, "empty_rows", empty_rows)
    monkeypatch.setattr(cross_network, "empty_rows", empty_rows)
    check(operator, operands(operator, 6, d, 2, SINGLE, device, stride=d + 7))
    assert bands
    for band, width in bands:
        assert not (band[2:-2, 8 : 8 + width] == 7).any()
        band[2:-2, 8 : 8 + width] = 7
        assert (band == 7).all()


def test_non_finite_values_stay_in_their_row(device):
    x0, weight, bias = operands("cross_network", 9, 70, 2, SINGLE, device)
    x0 = x0.clone()
    x0[4, 69] = float("nan")
    y = fastcross.cross_network(x0, weight, bias, backend="triton")
    assert y[4].isnan().all()
    assert y[[0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()


def test_parameters_of_any_layout(device):
    x0, weight, bias = operands("cross_network", 4, 33, 3, SINGLE, device)
    turned = [t.T.contiguous().T for t in (weight, bias)]
    assert turned[0].stride(1) != 1
    expected = results("cross_network", (x0, weight, bias))
    ours = results("cross_network", (x0, *turned))
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.skipif(INTERPRETING, reason="a graph is captured on a GPU")
@pytest.mark.parametrize("operator", RANK_ONE)
def test_cuda_graph(operator, device):
    tensors = operands(operator, 64, 1026, 6, SINGLE, device)
    expected = results(operator, tensors)
    torch.use_deterministic_algorithms(False)  # filling fresh memory is no part of the graph
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(operator, tensors)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


@pytest.mark.skipif(INTERPRETING, reason="an hour in the interpreter")
def test_more_than_2_31_elements(device):
    torch.use_deterministic_algorithms(False)
    rows, d = 2**31 // 1024 + 5, 1024
    if torch.cuda.mem_get_info()[0] < 5 * rows * d * 2:
        pytest.skip(f"needs {5 * rows * d * 2 / 2**30:.0f} GiB")
    _, weight, bias = operands("cross_network", 1, d, 3, SINGLE, device)
    x0 = torch.randn(rows, d, device=device, dtype=BF16).requires_grad_()
    y = fastcross.cross_network(x0, weight, bias, backend="triton")
    (dx0,) = torch.autograd.grad(y, x0, y.detach())
    tail = x0.detach()[-9:].clone().requires_grad_()
    y_tail = fastcross.cross_network(tail, weight, bias, backend="torch")
    (dx0_tail,) = torch.autograd.grad(y_tail, tail, y.detach()[-9:])
    torch.testing.assert_close(y[-9:], y_tail)
    torch.testing.assert_close(dx0[-9:], dx0_tail)
