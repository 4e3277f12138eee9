"""The Triton kernels of the optimisers: tables and moments by the rule of fastcross/accuracy.py.

As test_triton_kernels.py on a GPU or in Triton's interpreter, in which test_triton_interpreter.py runs this file.
"""

import contextlib
from unittest import mock

import pytest
import torch
from guarded import Guarded
from no_waits import NoWaits
from row_cases import HEIGHT, LR, STEP, UPDATES, compact, copied, draw, exact, update
from torch import nn
from triton_place import INTERPRETING, MARKS

from fastcross import optim
from fastcross.accuracy import assert_as_good
from fastcross.kernels import row_updates as plain
from fastcross.layers.embedding import EmbeddingStack
from fastcross.ops.row_updates import has_heads, mark_heads

pytest.importorskip("triton")

from fastcross.kernels.gpu import row_updates as gpu

pytestmark = MARKS
interpreted = pytest.mark.skipif(not INTERPRETING, reason="seen in the interpreter")
WIDTHS = {"aligned": (16, 8, 40, 64), "odd": (3, 16, 1, 33)}
HALF, BF16, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.fixture
def place(device):
    return lambda t: t.clone().to(device)


@pytest.fixture
def described(monkeypatch):
    """Counts how often tables are described anew, which copies a description to the device."""
    monkeypatch.setattr(gpu, "_LAUNCHES", {})
    monkeypatch.setattr(gpu, "_make", mock.Mock(wraps=gpu._make))
    return gpu._make


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def flat(tables, kept):
    return [*tables, *(moment for each in kept for moment in each)]


@pytest.mark.parametrize("on_device", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize("layout", WIDTHS)
@pytest.mark.parametrize("dtype", [SINGLE, HALF, BF16, DOUBLE], ids=str)
@pytest.mark.parametrize("name", UPDATES)
def test_rows_and_moments(name, dtype, layout, on_device, place):
    tables, kept, gradients = draw(WIDTHS[layout], dtype, name, place)
    parts = zip(tables, kept, gradients, strict=True)
    expected = [exact(name, table, moments, *gradient) for table, moments, gradient in parts]
    eager, eager_kept = copied(tables, kept)
    update(plain, name, eager, eager_kept, compact(gradients))
    before, before_kept = copied(tables, kept)
    precision = torch.promote_types(dtype, SINGLE)
    numbers = (
        [torch.tensor(n, dtype=precision, device=tables[0].device) for n in (LR, STEP)] if on_device else (LR, STEP)
    )
    update(gpu, name, tables, kept, gradients, *numbers)
    for k, (rows, _) in enumerate(gradients):
        ours, theirs = [tables[k], *kept[k]], [eager[k], *eager_kept[k]]
        for i, (a, b, c) in enumerate(zip(ours, theirs, expected[k], strict=True)):
            assert_as_good(a, b, c, f"{name}: {i} of table {k}")
        untouched = [row for row in range(HEIGHT) if row not in rows.tolist()]
        for a, b in zip(ours, [before[k], *before_kept[k]], strict=True):
            assert torch.equal(a[untouched], b[untouched])
            assert not torch.equal(a, b)


@pytest.mark.parametrize("name", UPDATES)
def test_compact_gradients_and_others_give_the_same_bits(name, place):
    tables, kept, gradients = draw(WIDTHS["odd"], SINGLE, name, place)
    others, other_kept = copied(tables, kept)
    update(gpu, name, tables, kept, gradients)
    update(gpu, name, others, other_kept, compact(gradients))
    assert same(flat(tables, kept), flat(others, other_kept))


@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize("step", [1, 100, 100_000])
def test_the_number_of_the_step_may_be_on_the_device(name, step, place):
    tables, kept, gradients = draw((16, 3), SINGLE, name, place)
    others, other_kept = copied(tables, kept)
    update(gpu, name, tables, kept, gradients, LR, step)
    update(gpu, name, others, other_kept, gradients, place(torch.tensor(LR)), place(torch.tensor(float(step))))
    for a, b in zip(flat(tables, kept), flat(others, other_kept), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_non_finite_values_stay_in_their_row(name, bad, place):
    tables, kept, gradients = draw((16, 3), SINGLE, name, place)
    rows, values = gradients[0]
    values[3, 2] = bad
    update(gpu, name, tables, kept, gradients)
    others = [row for row in range(HEIGHT) if row != int(rows[3])]
    assert not tables[0][rows[3], 2].isfinite()
    assert all(t[others].isfinite().all() for t in (tables[0], *kept[0]))
    assert all(t.isfinite().all() for t in (tables[1], *kept[1]))


@pytest.mark.parametrize("name", UPDATES)
def test_rows_that_are_not_there_are_left_out(name, place):
    tables, kept, gradients = draw((16, 3), SINGLE, name, place, rows=[[-5, -1, 2, 2, HEIGHT, 10**12]])
    others, other_kept = copied(tables, kept)
    update(gpu, name, tables, kept, gradients)
    update(gpu, name, others, other_kept, [(rows[2:4], values[2:4]) for rows, values in gradients])
    assert same(flat(tables, kept), flat(others, other_kept))


@interpreted
@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("dtype", [SINGLE, BF16], ids=str)
@pytest.mark.parametrize("name", UPDATES)
def test_nothing_beyond_the_operands(name, dtype, at_end, monkeypatch):
    """Tables, moments, gradients, descriptions, rate and step begin, or end, at pages that the system protects."""
    guarded, make = Guarded(at_end), gpu._make

    def guard(*args):
        return (made := make(*args))._replace(tables=guarded.copy(made.tables))

    monkeypatch.setattr(gpu, "_make", guard)
    monkeypatch.setattr(gpu, "_LAUNCHES", {})
    for widths in WIDTHS.values():
        tables, kept, gradients = draw(widths, dtype, name, place=guarded.copy)
        update(gpu, name, tables, kept, gradients)
        update(gpu, name, tables, kept, gradients, *(guarded.copy(torch.tensor(float(n))) for n in (LR, STEP)))
        assert all(t.isfinite().all() for t in flat(tables, kept))


@interpreted
def test_operands_that_do_not_fit_each_other():
    tables, kept, gradients = draw((16, 3), SINGLE, "adagrad")
    for wrong, message in (
        ([kept[0], (kept[1][0][1:],)], r"moments 0 must be torch.float32 on cpu, \(12, 3\).*; got .* \(11, 3\)"),
        ([kept[0], (kept[1][0].half(),)], r"moments 0 must be torch.float32 .*; got torch.float16"),
        (kept[:1], "moments 0 must be 2 tensors; got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            update(gpu, "adagrad", tables, wrong, gradients)
    turned = [(rows, values.T.contiguous().T) for rows, values in gradients]
    with pytest.raises(ValueError, match=r"values must be .* contiguous"):
        update(gpu, "adagrad", tables, kept, turned)


OPTIMISERS = {
    "adam": optim.RowAdam,
    "adagrad": optim.RowAdagrad,
    "row-wise": lambda *args, **options: optim.RowAdagrad(*args, row_wise=True, **options),
    "sgd": optim.RowSGD,
}


def give_gradients(parameters, gradients, is_marked=True):
    for parameter, (rows, values) in zip(parameters, gradients, strict=True):
        options = {"check_invariants": False, "is_coalesced": False}
        parameter.grad = torch.sparse_coo_tensor(rows.unsqueeze(0), values, parameter.shape, **options)
        if is_marked:
            mark_heads(rows, values)


@interpreted
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_a_step_is_one_launch_and_waits_for_nothing(name, capturable, described):
    from triton.runtime import interpreter

    tables, _, gradients = draw((16, 3, 40), SINGLE, name)
    parameters = [nn.Parameter(table) for table in tables]
    options = {"lr": 0.1, "backend": "triton", "capturable": capturable}
    optimizer = optim.Optimizer([OPTIMISERS[name](parameters, **options)])
    launched, run = [], interpreter.InterpretedFunction.run

    def count(kernel, *args, **options):
        launched.append(kernel.fn.__name__)
        return run(kernel, *args, **options)

    for step in range(3):
        give_gradients(parameters, gradients)
        with mock.patch.object(interpreter.InterpretedFunction, "run", count), NoWaits() as mode:
            optimizer.clip_grad_norm(0.5)
            optimizer.step()
            optimizer.set_lr(0.2)
        assert len(launched) == step + 1, launched
        assert described.call_count == 1  # a second step copies nothing to the device
    assert mode.operators


@interpreted
@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.parametrize("is_marked", [True, False])
def test_optimisers_of_all_backends_agree(name, is_marked):
    """Clipped, over several steps, with gradients of the operator's form and with those of anybody."""
    results = []
    for backend in ("triton", "torch", "cpu"):
        tables, _, gradients = draw((16, 3, 40), SINGLE, name)
        parameters = [nn.Parameter(table) for table in tables]
        optimizer = optim.Optimizer([OPTIMISERS[name](parameters, lr=0.1, backend=backend)])
        for step in range(3):
            if not is_marked:
                gradients = [(rows.flip(0), values + step) for rows, values in gradients]
            give_gradients(parameters, [(rows, values.clone()) for rows, values in gradients], is_marked)
            optimizer.clip_grad_norm(0.5)
            optimizer.step()
        results.append([parameter.detach() for parameter in parameters])
    for found in results[1:]:
        for a, b in zip(found, results[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@interpreted
@pytest.mark.parametrize(("name", "dtype"), [("adam", SINGLE), ("adam", BF16), ("rowwise_adagrad", SINGLE)])
def test_the_operators_gradients_are_taken_as_they_are(name, dtype, described):
    """Forward, backward, clipping and step on the Triton path: nothing waits or is sorted again."""
    results = []
    for backend in ("triton", "torch"):
        torch.manual_seed(0)
        stack = EmbeddingStack([5, 30, 7], 2, [3, 8, 16], backend=backend).to(dtype)
        optimizer = optim.configure(stack, lr=0.1, name=name, backend=backend)
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            ids = torch.stack([torch.randint(0, n, (12,), generator=generator) for n in stack.cardinalities], 1)
            dense = torch.randn(12, 2, generator=generator).to(dtype)
            optimizer.zero_grad()
            with NoWaits() if backend == "triton" else contextlib.nullcontext() as mode:
                stack(dense, ids).float().square().sum().backward()
                optimizer.clip_grad_norm(1.0)
                optimizer.step()
            if backend == "triton":
                assert all(has_heads(table.grad) for table in stack.tables)
                assert "sort" not in mode.operators  # the keys are sorted within the operator
                assert described.call_count == 1
        results.append([table.detach().float() for table in stack.tables])
    # In bfloat16 the interpreter truncates, and each step rounds twice.
    tolerance = 1e-5 if dtype == SINGLE else 0.05
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_launches_are_forgotten_in_their_order(place, described, monkeypatch):
    monkeypatch.setattr(gpu, "KEPT", 3)
    drawn = [draw((2,), SINGLE, "sgd", place, rows=[[0] * count]) for count in (1, 2, 3, 4)]
    for i in (0, 1, 2, 0, 3, 1, 0):  # the fourth kind puts out the first
        update(gpu, "sgd", *drawn[i])
    assert described.call_count == 5
    assert len(gpu._LAUNCHES) == 3


@pytest.mark.skipif(INTERPRETING, reason="a graph is captured on a GPU")
@pytest.mark.parametrize("name", OPTIMISERS)
def test_cuda_graph(name, place):
    """Clipping and step, replayed with another rate; the number of the step goes on."""
    results = []
    for is_captured in (False, True):
        tables, _, gradients = draw((16, 3, 40), SINGLE, name, place)
        parameters = [nn.Parameter(table) for table in tables]
        optimizer = optim.Optimizer([OPTIMISERS[name](parameters, lr=0.1, capturable=True)])

        def step(optimizer=optimizer):
            optimizer.clip_grad_norm(0.5)
            optimizer.step()

        give_gradients(parameters, gradients)
        step()
        graph = torch.cuda.CUDAGraph()
        if is_captured:
            with torch.cuda.graph(graph):
                step()
        for rate in (0.2, 0.3):
            optimizer.set_lr(rate)
            graph.replay() if is_captured else step()
        torch.cuda.synchronize()
        results.append([parameter.detach() for parameter in parameters])
    assert same(*results)
