"""The lazy optimisers of tables: against PyTorch's own Adam, SparseAdam and SGD."""

import pytest
import torch
from no_waits import NoWaits

from fastcross import optim
from fastcross.gradients import gradients
from fastcross.layers.embedding import EmbeddingStack
from fastcross.ops import backends


def make_stack(**options):
    torch.manual_seed(0)
    return EmbeddingStack([5, 3000, 7], 2, [3, 8, 1], **{"sparse_gradients": True} | options)


def take_plain_operators(monkeypatch):
    monkeypatch.setattr(backends, "choose", lambda *_: "torch")


def train(stack, optimizer, steps=6, rows=48):
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        categorical = torch.stack([torch.randint(0, n, (rows,), generator=generator) for n in stack.cardinalities], 1)
        dense = torch.randn(rows, stack.num_dense, generator=generator)
        target = torch.randn(rows, stack.out_features, generator=generator)
        optimizer.zero_grad()
        (stack(dense, categorical) - target).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_row_adam_is_sparse_adam(dtype, monkeypatch):
    def trained(make, kernels=True):
        stack = make_stack().to(dtype)
        if not kernels:
            take_plain_operators(monkeypatch)
        train(stack, make(stack))
        monkeypatch.undo()
        return [table.detach() for table in stack.tables]

    # SparseAdam corrects ε with the second moment's bias and Adam does not: without ε they are the same.
    expected = trained(lambda stack: torch.optim.SparseAdam(list(stack.tables), lr=0.01, eps=1e-30))
    start = [table.detach() for table in make_stack().to(dtype).tables]
    for kernels in (True, False):
        ours = trained(lambda stack: optim.RowAdam(stack.tables, lr=0.01, eps=1e-30), kernels)
        for a, b, untouched in zip(ours, expected, start, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
            assert not torch.equal(a, untouched)


def test_row_adam_is_adam_where_every_row_is_touched():
    def trained(make):
        torch.manual_seed(0)
        stack = EmbeddingStack([3], 0, 4)
        train(stack, make(stack), steps=20)
        return stack.tables[0].detach()

    def dense_adam(stack):
        stack.sparse_gradients = False
        return torch.optim.Adam(stack.parameters(), lr=0.01)

    rows, dense = trained(lambda stack: optim.RowAdam(stack.tables, lr=0.01)), trained(dense_adam)
    torch.testing.assert_close(rows, dense, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernels", [True, False])
def test_row_sgd_is_sgd(kernels, monkeypatch):
    stack, expected = make_stack(), make_stack(sparse_gradients=False)
    if not kernels:
        take_plain_operators(monkeypatch)
    train(stack, optim.RowSGD(stack.tables, lr=0.01))
    train(expected, torch.optim.SGD(expected.parameters(), lr=0.01))
    for a, b in zip(stack.tables, expected.tables, strict=True):
        torch.testing.assert_close(a, b)


def test_untouched_rows_and_their_moments_stay():
    stack = EmbeddingStack([1000], 0, 4)
    before = stack.tables[0].detach().clone()
    optimizer = optim.configure(stack, lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        stack(torch.zeros(4, 0), torch.tensor([[3], [3], [7], [999]])).square().sum().backward()
        optimizer.step()
    changed = (stack.tables[0] != before).any(1).nonzero().squeeze(1).tolist()
    moments = optimizer.parts[0].state[stack.tables[0]]
    assert changed == [3, 7, 999]
    assert moments["exp_avg_sq"].any(1).nonzero().squeeze(1).tolist() == [3, 7, 999]


def test_gradient_in_grad_is_marked_coalesced_again():
    stack = make_stack()
    stack(torch.zeros(4, 2), torch.tensor([[1, 7, 2], [1, 5, 2], [0, 7, 2], [1, 7, 2]])).sum().backward()
    values = stack.tables[1].grad._values()
    gradients(stack.parameters())
    assert stack.tables[1].grad.is_coalesced()
    assert stack.tables[1].grad.values().data_ptr() == values.data_ptr()  # nothing was sorted or copied
    assert stack.tables[1].grad.indices().tolist() == [[5, 7]]


def test_clipping_without_gradients():
    """As torch.nn.utils.clip_grad_norm_ answers for a model that has none yet."""
    assert optim.clip_grad_norm(EmbeddingStack([3], embedding_dim=2), 1.0) == 0


def test_parameters_that_no_part_would_update_are_refused():
    optimizer = optim.configure(make_stack(), lr=0.1)
    groups = list(optimizer.param_groups)
    with pytest.raises(ValueError, match="make a new optimiser"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))], "lr": 0.1})
    assert optimizer.param_groups == groups


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_a_norm_that_is_not_finite_lets_nothing_pass_unclipped(bad):
    """Finite gradients become 0, and the one that is to blame can still be found."""
    model = torch.nn.Sequential(make_stack(), torch.nn.Linear(14, 1))
    model[1](model[0](torch.ones(2, 2), torch.tensor([[1, 7, 2], [1, 7, 3]]))).sum().backward()
    blamed = gradients(model.parameters())[1]
    blamed[0, 1] = bad
    before = [g.clone() for g in gradients(model.parameters())]
    with NoWaits():
        optim.clip_grad_norm(model, float("inf"))  # clips nothing
    for after, wanted in zip(gradients(model.parameters()), before, strict=True):
        assert torch.equal(after.nan_to_num(77), wanted.nan_to_num(77))
    with NoWaits():
        norm = optim.clip_grad_norm(model, 0.5)
    assert not norm.isfinite()
    assert blamed[0].isnan().tolist() == [False, True] + [False] * 6
    assert not any(g.nan_to_num(0).any() for g in gradients(model.parameters()))


def test_gradients_whose_norm_overflows_become_0():
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.full((2,), 1e30)
    assert optim.clip_grad_norm(torch.nn.ParameterList([parameter]), 1.0).isinf()
    assert parameter.grad.tolist() == [0, 0]
