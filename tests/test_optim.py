"""The lazy optimisers of tables against PyTorch's own, and row-wise Adagrad against its formula."""

import copy
import itertools

import pytest
import torch
from no_waits import NoWaits
from torch import nn

from fastcross import optim
from fastcross.layers.embedding import EmbeddingStack
from fastcross.ops import backends
from fastcross.optim import gradients
from fastcross.training.config import OPTIMIZERS

KERNELS = pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "plain"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


@pytest.fixture
def choose(monkeypatch):
    def take(kernels):
        if not kernels:
            monkeypatch.setattr(backends, "choose", lambda *_: "torch")

    return take


def make_stack(**options):
    torch.manual_seed(0)
    return EmbeddingStack([5, 3000, 7], 2, [3, 8, 1], **{"sparse_gradients": True} | options)


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
def test_row_adam_is_sparse_adam(dtype, choose, monkeypatch):
    def trained(make, kernels=True):
        stack = make_stack().to(dtype)
        choose(kernels)
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


@KERNELS
def test_row_sgd_is_sgd(kernels, choose):
    stack, expected = make_stack(), make_stack(sparse_gradients=False)
    choose(kernels)
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


def tables(dtype, *shapes):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]


def random_gradients(parameters, step, rows=None):
    """A dense gradient for each table, of these rows; drawn from the step's number."""
    generator = torch.Generator().manual_seed(step)
    for table in parameters:
        g = torch.randn(table.shape, dtype=torch.float64, generator=generator).to(table.dtype)
        chosen = torch.arange(len(table)) if rows is None else torch.tensor(rows)
        yield table, chosen, g[chosen]


def descend(optimizer, parameters, steps=12, rows=None, sparse=True, first=0):
    for step in range(first, first + steps):
        for table, chosen, g in random_gradients(parameters, step, rows):
            grad = torch.sparse_coo_tensor(chosen.unsqueeze(0), g, table.shape, is_coalesced=True)
            table.grad = grad if sparse else grad.to_dense()
        optimizer.step()


SHAPES = (7, 5), (40, 3), (1, 1)


@DTYPES
@KERNELS
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            lambda p: optim.RowAdam(p, lr=0.03, weight_decay=0.2),
            lambda p: torch.optim.AdamW(p, lr=0.03, weight_decay=0.2),
        ),
        (lambda p: optim.RowAdagrad(p, lr=0.03), lambda p: torch.optim.Adagrad(p, lr=0.03)),
    ],
    ids=["adamw", "adagrad"],
)
def test_where_every_row_is_touched_it_is_torchs_own(ours, theirs, kernels, dtype, choose):
    found, expected = tables(dtype, *SHAPES), tables(dtype, *SHAPES)
    descend(theirs(expected), expected, sparse=False)
    choose(kernels)
    descend(ours(found), found)
    tolerance = 2e-6 if dtype == torch.float32 else 1e-13
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@KERNELS
def test_adagrad_is_lazy_as_torchs_own_is_with_sparse_gradients(kernels, choose):
    found, expected = tables(torch.float64, (50, 4)), tables(torch.float64, (50, 4))
    descend(torch.optim.Adagrad(expected, lr=0.1), expected, rows=[3, 8, 49])
    choose(kernels)
    descend(optim.RowAdagrad(found, lr=0.1), found, rows=[3, 8, 49])
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


@DTYPES
@KERNELS
def test_row_wise_adagrad_is_its_formula(kernels, dtype, choose):
    """s_r += mean_i g_ri²; w_ri -= lr g_ri / (√s_r + ε), written out in float64."""
    lr, eps, rows = 0.1, 1e-3, [1, 4, 6]
    found = tables(dtype, (7, 5), (9, 1))
    expected = [table.detach().double() for table in found]
    sums = [torch.zeros(len(table), dtype=torch.float64) for table in expected]
    for step in range(8):
        for (_, chosen, g), w, s in zip(random_gradients(found, step, rows), expected, sums, strict=True):
            for r, g_r in zip(chosen.tolist(), g.double(), strict=True):
                s[r] += (g_r**2).sum() / len(g_r)
                w[r] -= lr * g_r / (s[r].sqrt() + eps)
    choose(kernels)
    optimizer = optim.RowAdagrad(found, lr=lr, eps=eps, row_wise=True)
    descend(optimizer, found, steps=8, rows=rows)
    tolerance = 2e-6 if dtype == torch.float32 else 1e-13
    for table, w, s in zip(found, expected, sums, strict=True):
        torch.testing.assert_close(table.detach().double(), w, rtol=tolerance, atol=tolerance)
        kept = optimizer.state[table]["sum"]
        assert kept.shape == (len(table),)
        torch.testing.assert_close(kept.double(), s, rtol=tolerance, atol=0)


@KERNELS
def test_only_rows_of_the_batch_decay(kernels, choose):
    choose(kernels)
    (table,) = tables(torch.float32, (6, 3))
    before = table.detach().clone()
    table.grad = torch.sparse_coo_tensor(torch.tensor([[2]]), torch.zeros(1, 3), (6, 3), is_coalesced=True)
    optim.RowAdam([table], lr=0.1, weight_decay=0.5).step()
    expected = before.clone()
    expected[2] *= 0.95
    torch.testing.assert_close(table.detach(), expected, rtol=1e-6, atol=0)
    assert torch.equal(table[3], before[3])


def stack_and_layer():
    torch.manual_seed(0)
    stack = EmbeddingStack([9, 30], 2, [3, 4])
    return nn.ModuleDict({"stack": stack, "layer": nn.Linear(stack.out_features, 1)})


def train_both(model, optimizer, first, steps):
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        ids = torch.stack([torch.randint(0, n, (8,), generator=generator) for n in (9, 30)], 1)
        dense = torch.randn(8, 2, generator=generator)
        optimizer.zero_grad()
        model["layer"](model["stack"](dense, ids)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_that_was_saved_goes_on_bit_for_bit(name):
    model = stack_and_layer()
    optimizer = optim.configure(model, lr=0.05, name=name)
    train_both(model, optimizer, 0, 5)
    copied = copy.deepcopy(model)
    again = optim.configure(copied, lr=99.0, name=name)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    start = [p.detach().clone() for p in model.parameters()]
    train_both(model, optimizer, 5, 5)
    train_both(copied, again, 5, 5)
    for p, q, before in zip(model.parameters(), copied.parameters(), start, strict=True):
        assert torch.equal(p, q)
        assert not torch.equal(p, before)


def test_no_two_names_are_the_same_optimiser():
    assert set(OPTIMIZERS) == set(optim.OPTIMIZERS)
    results = []
    for name in OPTIMIZERS:
        model = stack_and_layer()
        train_both(model, optim.configure(model, lr=0.05, name=name), 0, 3)
        results.append(model["stack"].tables[1].detach())
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(results, 2))


def test_sums_that_do_not_fit_change_nothing():
    (table,) = tables(torch.float32, (6, 3))
    row_wise, whole = (optim.RowAdagrad([table], row_wise=each) for each in (True, False))
    descend(row_wise, [table], steps=1)
    before = table.detach().clone(), row_wise.state[table]["sum"].clone()
    with pytest.raises(ValueError, match=r"sum must be like its table, \(6, 3\).*; got \(6,\)"):
        whole.load_state_dict(row_wise.state_dict())
    assert not whole.state
    row_wise.state[table]["sum"] = torch.zeros(5)
    with pytest.raises(ValueError, match=r"sum must be like its table, \(6,\).*; got \(5,\)"):
        row_wise.step()
    assert torch.equal(table, before[0])


def test_bad_options():
    (table,) = tables(torch.float32, (6, 3))
    with pytest.raises(ValueError, match="weight_decay must be at least 0; got -1"):
        optim.RowAdam([table], weight_decay=-1)
    with pytest.raises(ValueError, match="lr and eps must be at least 0; got -1 and 1e-10"):
        optim.RowAdagrad([table], lr=-1)
    with pytest.raises(ValueError, match="name must be one of adam, adamw, adagrad, rowwise_adagrad, sgd; got 'lion'"):
        optim.configure(nn.Linear(2, 2), name="lion")
