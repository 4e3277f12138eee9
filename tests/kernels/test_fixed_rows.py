"""Gradients with an entry for each id, in operators of PyTorch, and their way through a device that is no CPU."""

import pytest
import torch

from fastcross.batch import Bag
from fastcross.kernels import embedding, fixed_rows
from fastcross.ops import embedding_stack


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 50])
def test_sums_are_those_of_the_compact_form(rows, dtype):
    generator = torch.Generator().manual_seed(rows)
    ids, g = torch.randint(0, 9, (rows,), generator=generator), torch.randn(rows, 3, generator=generator).to(dtype)
    numbers, values = fixed_rows.sum_rows(ids, g)
    distinct, wanted = embedding.sum_rows(ids, g, 9)
    assert torch.equal(numbers, ids.sort().values)
    heads = torch.searchsorted(numbers, distinct)
    torch.testing.assert_close(values[heads], wanted)
    values[heads] = 0
    assert bool((values == 0).all())
    assert values.dtype == wanted.dtype


def test_sums_can_be_differentiated():
    ids, g = torch.tensor([3, 1, 3]), torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda g: fixed_rows.sum_rows(ids, g)[1], g)


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
