"""Gradients of tables as devices other than the CPU have them, and optimisers whose numbers are on the device."""

import copy

import pytest
import torch
import torch.nn.functional as F
from no_waits import NoWaits
from row_cases import UPDATES, compact, copied, draw, exact, update
from torch import nn

from fastcross import optim
from fastcross.accuracy import assert_as_good
from fastcross.kernels import row_updates as plain
from fastcross.kernels.embedding import sum_rows
from fastcross.layers.embedding import EmbeddingStack
from fastcross.ops.row_updates import has_heads, mark_heads, rows_of, summed
from fastcross.optim import gradients

OPTIONS = {"check_invariants": False, "is_coalesced": False}
HALF, BF16, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64


def sparse(rows, values, shape):
    return torch.sparse_coo_tensor(rows.unsqueeze(0), values, shape, **OPTIONS)


@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE, HALF, BF16], ids=str)
@pytest.mark.parametrize("name", UPDATES)
def test_plain_updates_of_repeated_rows(name, dtype):
    tables, kept, found = draw((5, 16, 1), dtype, name)
    others, other_kept = copied(tables, kept)
    parts = zip(tables, kept, found, strict=True)
    expected = [exact(name, table, moments, *gradient) for table, moments, gradient in parts]
    with NoWaits():
        update(plain, name, tables, kept, found)
    update(plain, name, others, other_kept, compact(found))
    for k, results in enumerate(expected):
        parts = zip([tables[k], *kept[k]], [others[k], *other_kept[k]], results, strict=True)
        for i, (ours, compacted, right) in enumerate(parts):
            assert torch.equal(ours, compacted)
            assert_as_good(ours, compacted, right, f"{name}: {i} of table {k}")


@pytest.mark.parametrize("step", [1, 7, 10**6])
@pytest.mark.parametrize("beta", [0.0, 0.9, 0.999])
def test_corrections_of_a_step_on_the_device_keep_their_digits(beta, step):
    found = plain.bias_correction(beta, torch.tensor(float(step)))
    assert float(found) == pytest.approx(1 - beta**step, rel=1e-6)


@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE, BF16], ids=str)
def test_sums_stand_at_the_heads(dtype):
    torch.manual_seed(0)
    rows, values = torch.tensor([5, 0, 5, 9, 0, 5]), torch.randn(6, 3).to(dtype)
    with NoWaits():
        found, sums = sum_rows(rows, values)
    assert found.tolist() == [0, 0, 5, 5, 5, 9]
    assert sums.dtype == torch.promote_types(dtype, SINGLE)
    expected = sparse(rows, values.double(), (10, 3)).coalesce().values()
    torch.testing.assert_close(sums[[0, 2, 5]].double(), expected, rtol=2 * torch.finfo(sums.dtype).eps, atol=1e-12)
    assert not sums[[1, 3, 4]].any()


class Marked(torch.autograd.Function):
    """A table's gradient as the operator makes it on a GPU: slices of buffers, sums at the heads."""

    @staticmethod
    def forward(ctx, table):
        return table.sum()

    @staticmethod
    def backward(ctx, dy):
        rows, values = torch.tensor([7, 1, 1, 4, 7])[1:4], torch.ones(20)[8:].view(3, 4)
        values[1] = 0
        mark_heads(rows, values)
        return sparse(rows, values, (6, 4))


def test_the_mark_survives_in_grad_and_nowhere_else():
    table = nn.Parameter(torch.zeros(6, 4))
    Marked.apply(table).backward()
    assert has_heads(table.grad)
    assert summed(table.grad) is table.grad
    for other in (table.grad.clone(), table.grad * 2, table.grad + table.grad, table.grad.coalesce()):
        assert not has_heads(other)
    mixed = sparse(table.grad._indices()[0], torch.ones(3, 4), (6, 4))
    assert not has_heads(mixed)
    Marked.apply(table).backward()  # is added to the first
    assert not has_heads(table.grad)
    values = gradients([table])
    assert table.grad.is_coalesced()
    assert values[0].tolist() == [[2.0] * 4, [2.0] * 4]


def test_a_marked_gradient_is_clipped_as_it_is():
    table, dense = nn.Parameter(torch.zeros(6, 4)), nn.Parameter(torch.zeros(6, 4))
    Marked.apply(table).backward()
    dense.grad = table.grad.to_dense()
    with NoWaits():
        norm = optim.clip_grad_norm(nn.ParameterList([table]), 1.0)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_([dense], 1.0))
    assert has_heads(table.grad)
    torch.testing.assert_close(table.grad.to_dense(), dense.grad)


@pytest.mark.parametrize("kind", [optim.RowAdam, optim.RowAdagrad, optim.RowSGD])
def test_a_marked_gradient_is_taken_by_every_backend(kind):
    results = []
    for backend in ("cpu", "torch", "auto"):
        table = nn.Parameter(torch.ones(6, 4))
        Marked.apply(table).backward()
        kind([table], lr=0.1, backend=backend).step()
        results.append(table.detach())
    torch.testing.assert_close(results[1], results[0])
    assert torch.equal(results[2], results[0])
    assert (results[0] != 1).any(1).tolist() == [False, True, False, False, True, False]


def test_other_devices_sort_and_do_not_wait():
    """On the meta device, where an operator that reads a result cannot work at all."""
    rows, values = torch.empty(7, dtype=torch.int64, device="meta"), torch.empty(7, 4, device="meta")
    table = nn.Parameter(torch.empty(9, 4, device="meta"))
    table.grad = sparse(rows, values, (9, 4))
    with NoWaits() as mode:
        (values,) = gradients([table])
        rows, again = rows_of(table, is_compact=False)
    assert has_heads(table.grad)
    assert again.shape == table.grad._values().shape
    assert values.shape == again.shape == (7, 4)
    assert rows.shape == (7,)
    assert mode.operators.count("sort") == 1  # what clipping has brought into form is not sorted again


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("name", optim.OPTIMIZERS)
def test_steps_on_other_devices_do_not_wait(name, capturable):
    """As a GPU takes them where a kernel cannot: an unknown gradient, clipped; a second step with its form known."""
    table = nn.Parameter(torch.empty(9, 4, device="meta"))
    stack = EmbeddingStack([9], 0, 4).to("meta")
    stack.tables[0] = table
    optimizer = optim.configure(stack, name=name, capturable=capturable)
    rows, values = torch.empty(7, dtype=torch.int64, device="meta"), torch.empty(7, 4, device="meta")
    table.grad = sparse(rows, values, (9, 4))
    with NoWaits() as mode:
        for _ in range(2):
            optimizer.clip_grad_norm(1.0)
            optimizer.step()
    assert mode.operators.count("sort") == 1
    assert "index_put_" in mode.operators


@pytest.mark.parametrize("name", ["adam", "adagrad", "sgd"])
def test_sorted_gradients_of_any_origin_train_as_others_do(name):
    """PyTorch's own sparse embedding, two backward passes: summed as on other devices, and as on the CPU."""
    results = []
    for is_compact in (True, False):
        torch.manual_seed(0)
        stack = EmbeddingStack([9], 0, 4)
        (table,) = stack.tables
        for ids in (torch.tensor([8, 1, 8, 0]), torch.tensor([1, 1, 7, 8])):
            F.embedding(ids, table, sparse=True).square().sum().backward()
        if not is_compact:
            rows, values = sum_rows(table.grad._indices()[0], table.grad._values())
            table.grad = sparse(rows, values, table.shape)
            mark_heads(table.grad._indices(), values)
        optimizer = optim.configure(stack, lr=0.1, name=name, backend="auto" if is_compact else "torch")
        norm = optimizer.clip_grad_norm(0.5)
        assert has_heads(table.grad) != is_compact
        optimizer.step()
        results.append((norm, table.detach()))
    torch.testing.assert_close(results[0], results[1])


def model_with_tables():
    torch.manual_seed(0)
    return EmbeddingStack([9, 30], 0, [3, 4])


def train(stack, optimizer, first, steps):
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        ids = torch.stack([torch.randint(0, n, (8,), generator=generator) for n in (9, 30)], 1)
        optimizer.zero_grad()
        stack(torch.zeros(8, 0), ids).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("name", optim.OPTIMIZERS)
def test_numbers_on_the_device_train_and_resume_as_others_do(name):
    """The state is the same, and goes from one to the other."""
    kinds, results, states = (False, True), [], []
    for capturable in kinds:
        stack = model_with_tables()
        optimizer = optim.configure(stack, lr=0.05, name=name, capturable=capturable, backend="torch")
        train(stack, optimizer, 0, 4)
        group = optimizer.param_groups[0]
        assert isinstance(group["lr"], torch.Tensor) == capturable
        results.append([table.detach() for table in stack.tables])
        states.append(copy.deepcopy(optimizer.state_dict()))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    options = [{k: v for k, v in state["parts"][0]["param_groups"][0].items() if k != "lr"} for state in states]
    assert options[0] == options[1]
    assert states[1]["parts"][0]["param_groups"][0]["lr"] == pytest.approx(0.05)
    for capturable, state in zip(kinds, reversed(states), strict=True):
        stack = model_with_tables()
        stack.load_state_dict({f"tables.{k}": table for k, table in enumerate(results[0])})
        optimizer = optim.configure(stack, lr=9.0, name=name, capturable=capturable, backend="torch")
        kept = optimizer.param_groups[0]["lr"]
        optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["lr"] is kept or not capturable
        train(stack, optimizer, 4, 3)
        results.append([table.detach() for table in stack.tables])
    for a, b in zip(*results[2:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_rate_is_written_where_it_is():
    for capturable in (False, True):
        optimizer = optim.configure(model_with_tables(), name="sgd", capturable=capturable)
        rate = optimizer.param_groups[0]["lr"]
        optimizer.set_lr(0.25)
        assert float(optimizer.param_groups[0]["lr"]) == 0.25
        assert (optimizer.param_groups[0]["lr"] is rate) == capturable


def test_what_cannot_be_captured():
    with pytest.raises(
        ValueError, match='capturable needs layers that "adam", "adamw" or "sgd" updates; got \'adagrad\''
    ):
        optim.configure(nn.Linear(2, 2), name="adagrad", capturable=True)
    layer = nn.Linear(2, 2)
    for name in ("adam", "adamw", "sgd"):
        (group,) = optim.configure(layer, name=name, capturable=True).param_groups
        assert isinstance(group["lr"], torch.Tensor)
        assert group.get("capturable", name == "sgd")
        assert group["fused"]


def test_unknown_backend():
    with pytest.raises(ValueError, match=r"backend must be one of .*; got 'cuda'"):
        optim.RowAdam([nn.Parameter(torch.ones(2, 2))], backend="cuda")
