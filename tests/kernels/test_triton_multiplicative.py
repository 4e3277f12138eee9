"""DCN-V2's layers on the Triton kernels: output and every gradient, by the rule of fastcross/accuracy.py.

Where they run, and when: see test_triton_kernels.py. In the interpreter tf32 is allowed, so that low-rank layers take
the kernels of their own; it multiplies in full float32 all the same.
"""

import pytest
import torch
from multiplicative_cases import CASES, gradient, operands
from triton_place import INTERPRETING, MARKS

import fastcross
from fastcross.accuracy import assert_as_good_as_eager, evaluate
from fastcross.ops import backends

pytestmark = MARKS
BF16, SINGLE = torch.bfloat16, torch.float32
GEMMS = ("matrix", "gated", "low rank")  # those with kernels around a GEMM of their own
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
each_gemm = pytest.mark.parametrize("case", [CASES[name] for name in GEMMS], ids=GEMMS)


@pytest.fixture(autouse=True)
def allow_tf32(monkeypatch):
    """In the interpreter, as if on a small GPU, so that sums over rows have several tiles to go through."""
    if not INTERPRETING:
        yield  # where tf32 would not be as good as the eager loop
        return
    from fastcross.kernels.gpu import launch

    monkeypatch.setattr(launch, "hardware_of", lambda device: launch.Hardware(processors=3, tf32=True))
    settings = torch.backends.cuda.matmul
    before, settings.fp32_precision = settings.fp32_precision, "tf32"
    yield
    settings.fp32_precision = before


def tensors_of(case, rows, d, dtype, device, **sizes):
    return [None if t is None else t.to(device) for t in operands(case, rows, d, dtype, **sizes)]


def check(case, tensors):
    """As in tests/ops/test_multiplicative.py."""
    return assert_as_good_as_eager(case.operator, tensors, "triton", gradient(tensors[0]), 16, **case.options)


def results(case, tensors):
    function = getattr(fastcross, case.operator)
    return evaluate(function, tensors, gradient(tensors[0]), backend="triton", **case.options)


@each_case
@pytest.mark.parametrize(
    ("rows", "d", "layers", "rank"),
    [(1, 16, 1, 3), (0, 5, 2, 3), (9, 1, 2, 1), (7, 33, 3, 19)],
    ids=["one row", "no rows", "one feature", "odd"],
)
def test_output_and_gradients(case, rows, d, layers, rank, device):
    check(case, tensors_of(case, rows, d, SINGLE, device, layers=layers, rank=rank, experts=3))


@each_gemm
@pytest.mark.parametrize("dtype", [SINGLE, BF16, torch.float16], ids=str)
def test_several_tiles(case, dtype, device):
    check(case, tensors_of(case, 140, 70, dtype, device, layers=2, rank=20))


def test_low_rank_in_full_precision(device):
    """On the steps, between PyTorch's GEMMs."""
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    check(CASES["low rank"], tensors_of(CASES["low rank"], 9, 33, SINGLE, device, rank=19))


@each_gemm
@pytest.mark.parametrize("dtype", [SINGLE, BF16], ids=str)
def test_padded_rows(case, dtype, device):
    """Wide words, and the columns after the last of them."""
    tensors = tensors_of(case, 5, 38, dtype, device, rank=8)
    padded = torch.full((5, 48), float("nan"), dtype=dtype, device=device)
    padded[:, :38] = tensors[0]
    found = check(case, [padded[:, :38], *tensors[1:]])
    assert found[0].shape == (5, 38)


@each_gemm
def test_same_bits_again(case, device):
    tensors = tensors_of(case, 140, 20, SINGLE, device, layers=2)
    first, second = results(case, tensors), results(case, tensors)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@each_gemm
def test_without_a_backward_pass(case, device):
    """Less is kept, and the output has the same bits."""
    tensors = tensors_of(case, 9, 20, SINGLE, device)
    with torch.no_grad():
        y = getattr(fastcross, case.operator)(*tensors, backend="triton", **case.options)
    assert torch.equal(y, results(case, tensors)[0])


@each_gemm
def test_only_needed_gradients(case, device):
    tensors = tensors_of(case, 6, 20, SINGLE, device)
    options = (None, 0.0) if case.operator == "cross_low_rank" else ()
    fwd, bwd = (backends.launcher(f"{case.operator}_{suffix}") for suffix in ("fwd", "bwd"))
    dy, (_, kept), count = torch.ones_like(tensors[0]), fwd(*tensors, *options, True), len(tensors)
    every = bwd(dy, *tensors, *options, kept, [True] * count)
    for i in range(count):
        for needs in ([j == i for j in range(count)], [j != i for j in range(count)]):
            for grad, full, needed in zip(bwd(dy, *tensors, *options, kept, needs), every, needs, strict=True):
                assert torch.equal(grad, full) if needed else grad.numel() == 0


@each_gemm
def test_non_finite_values_stay_in_their_row(case, device):
    tensors = tensors_of(case, 9, 70, SINGLE, device)
    tensors[0][4, -1] = float("nan")
    y = getattr(fastcross, case.operator)(*tensors, backend="triton", **case.options)
    assert y[4].isnan().any()
    assert y[[0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()


def test_float64_is_left_to_plain_pytorch(device):
    tensors = tensors_of(CASES["matrix"], 4, 6, torch.float64, device)
    with pytest.raises(ValueError, match=r"runs cross_matrix in float32.*got torch\.float64"):
        fastcross.cross_matrix(*tensors, backend="triton")
