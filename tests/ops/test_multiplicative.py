"""DCN-V2's layers and their kin: output and every gradient by fastcross/accuracy.py; PyTorch's transforms."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from multiplicative_cases import CASES, gradient, operands
from torch.func import grad, jacfwd, jvp, vmap

import fastcross
from fastcross import reference
from fastcross.accuracy import assert_as_good_as_eager, evaluate
from fastcross.kernels import layers_of_products
from fastcross.ops import multiplicative

BACKENDS = ("torch", "cpu")
SHAPES = {  # rows, d
    "one row": (1, 16),
    "no rows": (0, 5),
    "one feature": (9, 1),
    "odd": (7, 33),
    "tall": (1030, 54),
    "wide": (63, 430),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def ours(case, **options):
    return lambda *t: getattr(fastcross, case.operator)(*t, **case.options, **options)


def expected(case):
    return lambda *t: getattr(reference, case.operator)(*t, **case.options)


def assert_right(case, tensors, backend):
    assert_as_good_as_eager(case.operator, tensors, backend, gradient(tensors[0]), **case.options)


def without_none(function, tensors):
    """The function of those operands that are there, and these."""
    there = [t is not None for t in tensors]

    def of_those(*some):
        rest = iter(some)
        return function(*(next(rest) if here else None for here in there))

    return of_those, [t for t in tensors if t is not None]


@each_case
@each_backend
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layers", [1, 3])
def test_output_and_gradients(case, backend, shape, dtype, layers):
    tensors = operands(case, *shape, dtype, layers, rank=min(19, shape[1]), experts=3)
    assert_right(case, tensors, backend)


@each_case
@each_backend
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [SHAPES["wide"], SHAPES["tall"]], ids=["wide", "tall"])
def test_half_precision(case, backend, dtype, shape):
    """Many numbers, so that those that a rounding takes across relu's edge are a few of them, here and there."""
    tensors = operands(case, *shape, dtype, rank=8, experts=3)
    assert_right(case, tensors, backend)


@each_case
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32)], ids=str)
def test_mixed_full_precision(case, dtypes):
    """In float64 as soon as one operand is; results in the dtype of what they belong to."""
    tensors = operands(case, 20, 30)
    tensors = [tensors[0].to(dtypes[0]), *(None if t is None else t.to(dtypes[1]) for t in tensors[1:])]
    found = evaluate(ours(case), tensors)
    exact = evaluate(expected(case), tensors, dtype=torch.float64)
    of = [tensors[0], *(t for t in tensors if t is not None)]
    for t, x, operand in zip(found, exact, of, strict=True):
        assert t.dtype == operand.dtype
        torch.testing.assert_close(t.double(), x, rtol=1e-6, atol=1e-6)


@each_case
@each_backend
def test_autocast_chooses_the_dtype_of_the_gemms(case, backend):
    tensors = operands(case, 64, 30, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = evaluate(ours(case, backend=backend), tensors)
    half = evaluate(ours(case, backend=backend), tensors, dtype=torch.bfloat16)
    for t, h in zip(found, half, strict=True):
        assert t.dtype == torch.float32
        assert torch.equal(t, h.float())


@each_case
@each_backend
@pytest.mark.parametrize(
    "layout",
    ["padded", "every other row", "transposed", "expanded", "expanded columns", "overlapping", "leading dimensions"],
)
def test_layouts(case, backend, layout):
    tensors = operands(case, 24, 34, torch.float32)
    tensors[0] = {
        "padded": lambda x: torch.full((24, 48), torch.nan)[:, :34].copy_(x),
        "every other row": lambda x: torch.full((48, 34), torch.nan)[::2].copy_(x),
        "transposed": lambda x: x.T.contiguous().T,
        "expanded": lambda x: x[:1].expand(24, 34),
        "expanded columns": lambda x: x[:, :1].expand(24, 34),
        "overlapping": lambda x: x.flatten().unfold(0, 34, 5)[:24],
        "leading dimensions": lambda x: x.reshape(2, 3, 4, 34),
    }[layout](tensors[0])
    assert_right(case, tensors, backend)


@each_case
@each_backend
def test_parameters_in_any_layout(case, backend):
    tensors = operands(case, 12, 10, torch.float32)
    tensors = [t if t is None else t.movedim(0, -1).contiguous().movedim(-1, 0) for t in tensors]
    assert_right(case, tensors, backend)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(CASES)),
    rows=st.integers(0, 70),
    d=st.integers(1, 70),
    layers=st.integers(1, 6),
    rank=st.integers(1, 40),
    experts=st.integers(1, 5),
    seed=st.integers(0, 2**16),
)
def test_any_shape(name, rows, d, layers, rank, experts, seed):
    case = CASES[name]
    tensors = operands(case, rows, d, torch.float64, layers, rank, experts, seed)
    exact = evaluate(expected(case), tensors)
    for backend in BACKENDS:
        for found, right in zip(evaluate(ours(case, backend=backend), tensors), exact, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-9)


@each_case
@each_backend
def test_gradients_asked_for_are_the_only_ones_computed(case, backend):
    function, tensors = without_none(ours(case, backend=backend), operands(case, 40, 12))
    everything = evaluate(without_none(expected(case), operands(case, 40, 12))[0], tensors)[1:]
    for wanted in range(1, 2 ** len(tensors)):
        leaves = [t.detach().requires_grad_(bool(wanted >> i & 1)) for i, t in enumerate(tensors)]
        function(*leaves).sum().backward()
        for leaf, right in zip(leaves, everything, strict=True):
            assert (leaf.grad is not None) == leaf.requires_grad
            if leaf.requires_grad:
                torch.testing.assert_close(leaf.grad, right)


@each_case
@each_backend
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_non_finite_rows_stay_their_own(case, backend, value):
    tensors = operands(case, 10, 20, torch.float32)
    tensors[0][6, 3] = value
    y, dx0, *_ = evaluate(ours(case, backend=backend), tensors)
    good = torch.arange(10) != 6
    assert torch.isfinite(y[good]).all()
    assert torch.isfinite(dx0[good]).all()
    assert not torch.isfinite(y[6]).all()


@each_case
@each_backend
def test_gradcheck_and_gradgradcheck(case, backend):
    function, tensors = without_none(ours(case, backend=backend), operands(case, 3, 4, layers=2, rank=2))
    leaves = [t.requires_grad_() for t in tensors]
    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


@each_case
def test_transforms(case):
    """vmap over rows and over parameters, gradients per example, tangents, Jacobians."""
    tensors = operands(case, (2, 4), 6)
    function, given = without_none(ours(case), tensors)
    right, _ = without_none(expected(case), tensors)
    everything = tuple(range(len(given)))
    stacked = [torch.stack((t, 2 * t, -t)) for t in given]
    for transform, operands_ in (
        (lambda f: vmap(f, (0, *(None,) * (len(given) - 1))), given),
        (lambda f: vmap(f), stacked),
        (lambda f: vmap(grad(lambda *t: f(*t).square().sum(), everything)), stacked),
        (lambda f: vmap(grad(lambda *t: f(*t).sum(), 1), (0, *(None,) * (len(given) - 1))), given),
        (lambda f: lambda *t: jvp(f, t, t), given),
        (lambda f: jacfwd(f, 1), given),
    ):
        torch.testing.assert_close(transform(function)(*operands_), transform(right)(*operands_))


@each_case
def test_compile_is_one_graph_for_any_batch(case):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(ours(case), fullgraph=True, dynamic=None)
    for rows in (7, 12, 33):
        tensors = operands(case, rows, 6, torch.float32)
        for found, right in zip(evaluate(compiled, tensors), evaluate(expected(case), tensors), strict=True):
            torch.testing.assert_close(found, right)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2  # the first batch size, then all others
    assert not torch._dynamo.utils.counters["graph_break"]


@each_case
def test_opcheck(case):
    """The operators of the dispatcher: schema, shape rules, layouts, under tracing."""
    assert getattr(fastcross, case.operator)  # is imported at its first use, and then defined
    tensors, options = operands(case, 6, 8, layers=2, rank=3), list(case.options.values())
    if case.operator == "cross_low_rank":
        options = [case.options.get("activation"), case.options.get("diag_scale", 0.0)]
    elif case.operator == "cross_mixture":
        options = [case.options.get("activation", "tanh")]
    elif case.operator == "cross_fcn":
        options = [case.options.get("exponential", False), 1e-5]
    if case.operator == "cross_mixture" and len(tensors) == 6:
        tensors.append(None)
    forward, backward = (getattr(torch.ops.fastcross, f"{case.operator}_{suffix}") for suffix in ("fwd", "bwd"))
    for keep in (True, False):
        torch.library.opcheck(forward, (*tensors, *options, keep))
    y, kept = forward(*tensors, *options, True)
    for needs in ([True] * len(tensors), [i == 0 for i in range(len(tensors))], [i == 1 for i in range(len(tensors))]):
        torch.library.opcheck(backward, (torch.randn_like(y), *tensors, *options, kept, needs))


@pytest.mark.parametrize("name", ["low rank", "mixture"])
def test_keeps_the_numbers_between_the_gemms_and_nothing_as_large_as_x0(name):
    case, kept = CASES[name], []
    leaves = [t.requires_grad_() for t in operands(case, 64, 100, torch.float32, layers=3, rank=8, experts=2)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ours(case, backend="cpu")(*leaves)
    inputs = {t.data_ptr() for t in leaves}
    numbers = {"low rank": 8, "mixture": 2 * (8 + 1)}[name]
    assert sum(t.numel() for t in kept if t.data_ptr() not in inputs) <= 64 * 3 * numbers


@each_case
def test_many_chunks_are_one_batch(case):
    """More rows than fit a chunk, and a few."""
    tensors = operands(case, 700, 10, torch.float32, layers=2, rank=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers_of_products, "CHUNK", 0)
        assert len(list(layers_of_products.chunks(tensors[0]))) > 1
        assert_right(case, tensors, "cpu")


@each_case
@each_backend
def test_inputs_are_not_modified_and_results_repeat_bit_for_bit(case, backend):
    tensors = operands(case, 3000, 40, torch.float32)
    before = [None if t is None else t.clone() for t in tensors]
    runs = [evaluate(ours(case, backend=backend), tensors) for _ in range(3)]
    assert all(t is b is None or torch.equal(t, b) for t, b in zip(tensors, before, strict=True))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


@each_case
def test_auto_is_plain_pytorch_for_few_rows_and_in_bfloat16(case):
    """Bit for bit the one or the other, on either side of the least number of rows."""
    tensors = operands(case, 400, 30, torch.float32, rank=20)
    of_a_row = sum(t[0].numel() for t in tensors[1:] if t is not None and t.dim() > 2)
    with pytest.MonkeyPatch.context() as patch:
        for small, dtype, backend in (
            (400 * of_a_row, torch.float32, "cpu"),
            (400 * of_a_row + 1, torch.float32, "torch"),
            (0, torch.bfloat16, "torch"),
        ):
            patch.setattr(multiplicative, "SMALL", small)
            found, same = (evaluate(ours(case, backend=name), tensors, dtype=dtype) for name in ("auto", backend))
            assert all(torch.equal(a, b) for a, b in zip(found, same, strict=True))
            other = evaluate(ours(case, backend={"cpu": "torch", "torch": "cpu"}[backend]), tensors, dtype=dtype)
            assert not all(torch.equal(a, b) for a, b in zip(found, other, strict=True))


X0 = torch.randn(6, 4)
W, B, U, V = torch.randn(3, 4, 4), torch.randn(3, 4), torch.randn(3, 4, 2), torch.randn(3, 2, 4)
EXPERTS = torch.randn(3, 5, 4, 2), torch.randn(3, 5, 2, 2), torch.randn(3, 5, 2, 4), B
HALF = torch.randn(3, 2, 4), B, torch.randn(3, 2), torch.randn(3, 2)


@pytest.mark.parametrize(
    ("call", "error", "names"),
    [
        (lambda: fastcross.cross_matrix(X0, W[0]), ValueError, ["(L, d, d)", "(4, 4)", "(6, 4)"]),
        (lambda: fastcross.cross_matrix(X0, W[:, :, :3]), ValueError, ["d = 4", "(3, 4, 3)", "(6, 4)"]),
        (lambda: fastcross.cross_matrix(X0, W[:0]), ValueError, ["none of them 0", "(0, 4, 4)"]),
        (lambda: fastcross.cross_matrix(X0, W, B[:2]), ValueError, ["L = 3", "(2, 4)", "(3, 4, 4)"]),
        (lambda: fastcross.cross_matrix(X0, None), TypeError, ["weight is missing", "(6, 4)"]),
        (lambda: fastcross.cross_matrix(X0, W.long()), TypeError, ["torch.int64", "torch.float32"]),
        (lambda: fastcross.cross_matrix(X0, W.to("meta")), ValueError, ["meta", "cpu"]),
        (lambda: fastcross.cross_matrix(X0, [1.0]), TypeError, ["list", "(6, 4)"]),
        (lambda: fastcross.cross_matrix(X0.tolist(), W), TypeError, ["list"]),
        (lambda: fastcross.cross_matrix(X0, W, backend="cuda"), ValueError, ["'cuda'", "triton, cpu"]),
        (lambda: fastcross.cross_low_rank(X0, U, V[:, :1]), ValueError, ["r = 2", "(3, 1, 4)", "(3, 4, 2)"]),
        (lambda: fastcross.cross_low_rank(X0, V, U), ValueError, ["d = 4", "(3, 2, 4)", "(6, 4)"]),
        (lambda: fastcross.cross_low_rank(X0, U, V, activation="gelu"), ValueError, ["'tanh'", "'gelu'"]),
        (lambda: fastcross.cross_mixture(X0, *EXPERTS, None), ValueError, ["one expert", "(3, 5, 4, 2)"]),
        (lambda: fastcross.cross_mixture(X0, *EXPERTS, B[:, :3]), ValueError, ["K = 5", "(3, 3)"]),
        (lambda: fastcross.cross_mixture(X0, *EXPERTS, W), ValueError, ["K = 5", "(3, 4, 4)", "(3, 5, 4, 2)"]),
        (lambda: fastcross.cross_gated(X0, W, W[:2]), ValueError, ["L = 3", "(2, 4, 4)", "(3, 4, 4)"]),
        (lambda: fastcross.cross_fcn(X0, HALF[0][:, :, :3], *HALF[1:]), ValueError, ["d = 4", "(3, 2, 3)"]),
        (lambda: fastcross.cross_fcn(X0[:, :3], HALF[0], *HALF[1:]), ValueError, ["even", "(6, 3)"]),
        (lambda: fastcross.cross_fcn(X0, HALF[0], None, *HALF[2:]), TypeError, ["bias is missing", "(6, 4)"]),
        (lambda: fastcross.CrossFCN(5, 2), ValueError, ["even", "5"]),
        (lambda: fastcross.CrossLowRank(5, 2, 0), ValueError, ["rank", "0"]),
        (lambda: fastcross.CrossMixture(5, 2, 2, 0), ValueError, ["experts", "0"]),
    ],
)
def test_bad_input_is_named(call, error, names):
    with pytest.raises(error) as caught:
        call()
    for name in names:
        assert name in str(caught.value)
