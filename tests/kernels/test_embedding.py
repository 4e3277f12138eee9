"""Gradients with an entry for each id, in operators of PyTorch, and their way through a device that is no CPU."""

import pytest
import torch
from no_waits import NoWaits

from fastcross.batch import Bag
from fastcross.kernels import embedding
from fastcross.ops import embedding_stack


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 50])
def test_sums_are_those_of_the_compact_form(rows, dtype):
    generator = torch.Generator().manual_seed(rows)
    ids, g = torch.randint(0, 9, (rows,), generator=generator), torch.randn(rows, 3, generator=generator).to(dtype)
    numbers, values = embedding.sum_rows(ids, g)
    distinct, wanted = embedding.sum_distinct(ids, g, 9)
    assert torch.equal(numbers, ids.sort().values)
    heads = torch.searchsorted(numbers, distinct)
    torch.testing.assert_close(values[heads], wanted)
    values[heads] = 0
    assert bool((values == 0).all())
    assert values.dtype == wanted.dtype


def test_sums_can_be_differentiated():
    ids, g = torch.tensor([3, 1, 3]), torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda g: embedding.sum_rows(ids, g)[1], g)


@pytest.mark.parametrize("sparse", [True, False])
def test_a_device_that_would_have_to_be_waited_for(sparse):
    """On the meta device sizes must follow from shapes alone."""
    tables = [torch.empty(size, device="meta", requires_grad=True) for size in ((9, 4), (7, 3))]
    ids, values = torch.empty(6, 1, dtype=torch.int64, device="meta"), torch.empty(8, dtype=torch.int64, device="meta")
    bag, dense = Bag(values, torch.empty(6, dtype=torch.int64, device="meta")), torch.empty(6, 2, device="meta")
    x0 = embedding_stack(dense, ids, tables, [bag], sparse_gradients=sparse, backend="torch")
    for table, entries, gradient in zip(tables, (6, 8), torch.autograd.grad(x0.sum(), tables), strict=True):
        assert gradient.shape == table.shape
        assert not sparse or (gradient._values().shape, gradient.is_coalesced()) == ((entries, table.shape[1]), False)


UNORDERED = ("index_add", "scatter_add", "scatter_reduce", "index_reduce", "embedding_bag", "cumsum")


@pytest.mark.parametrize("pooling", ["mean", "sum"])
def test_no_sum_on_another_device_depends_on_the_order_of_its_threads(pooling):
    """Operators that PyTorch gives no fixed order on CUDA have no part in output, gradients and their gradients."""

    def empty(*shape, **options):
        return torch.empty(shape, device="meta", **options)

    tables = [empty(9, 4, requires_grad=True), empty(7, 3, requires_grad=True)]
    ids, values, offsets = (empty(*shape, dtype=torch.int64) for shape in ((6, 1), (8,), (6,)))
    weights, dense, dx0 = empty(8, requires_grad=True), empty(6, 2), empty(6, 9, requires_grad=True)
    with NoWaits() as mode:
        operands = dense, ids, [values], [offsets], [weights], tables, pooling
        with torch.no_grad():
            embedding.embedding_stack_fwd(*operands)
        results = [embedding.embedding_stack(*operands)]
        results.append(embedding.weights_bwd(dx0[:, 4:7], tables[1], values, offsets, weights, pooling))
        coefficients = [embedding.pooling_coefficients(values, offsets, weights, pooling, torch.float32)]
        described = dx0, ids, [values], [offsets], coefficients, [9, 4, 7, 3], [True, True]
        results += embedding.embedding_stack_bwd(*described)[1::2]
        leaves = [*tables, weights, dx0]
        for result in results:
            found = torch.autograd.grad(result.square().sum(), leaves, create_graph=True, allow_unused=True)
            again = sum(g.square().sum() for g in found if g is not None)
            torch.autograd.grad(again, leaves, allow_unused=True)
    assert "index_put" in mode.operators
    assert not [name for name in mode.operators if name.strip("_").startswith(UNORDERED)]


@pytest.mark.parametrize("pooling", ["mean", "sum"])
def test_sums_of_bags_in_a_fixed_order_are_those_of_the_cpu(pooling, monkeypatch):
    """Output and gradients of bags as other devices sum them up, computed on the CPU, and differentiated twice."""
    torch.manual_seed(0)
    values, offsets = torch.randint(0, 5, (9,)), torch.tensor([0, 2, 2, 5])
    table, weights = torch.randn(5, 3, dtype=torch.float64), torch.rand(9, dtype=torch.float64)
    g = torch.randn(4, 3, dtype=torch.float64)

    def by_operators(*_):
        nothing = torch.zeros(4, 0, dtype=torch.float64)
        return embedding.embedding_stack(nothing, nothing.long(), [values], [offsets], [weights], [table], pooling)

    def by_stack(*_):
        nothing = torch.zeros(4, 0, dtype=torch.float64)
        return embedding.embedding_stack_fwd(nothing, nothing.long(), [values], [offsets], [weights], [table], pooling)

    def of_weights(g, table, weights):
        return embedding.weights_bwd(g, table, values, offsets, weights, pooling)

    functions = by_operators, by_stack, of_weights
    wanted = [function(g, table, weights) for function in functions]
    monkeypatch.setattr(embedding, "is_compact", lambda g: False)
    for function, expected in zip(functions, wanted, strict=True):
        torch.testing.assert_close(function(g, table, weights), expected, rtol=1e-14, atol=1e-14)
    leaves = [t.requires_grad_() for t in (g, table, weights)]
    assert torch.autograd.gradcheck(of_weights, leaves)
    assert torch.autograd.gradgradcheck(of_weights, leaves)
