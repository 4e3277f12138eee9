"""The embedding and stacking layer, against PyTorch's own embedding."""

import pytest
import torch
import torch.nn.functional as F

from fastcross.data import Bag
from fastcross.kernels.embedding import ALIGNMENT
from fastcross.layers.embedding import EmbeddingStack, paper_dim

BACKENDS = ["cpu", "torch"]


def make_stack(backend="auto", **options):
    torch.manual_seed(0)
    return EmbeddingStack([5, 3000, 7], 2, [3, 8, 1], sparse_gradients=True, backend=backend, **options)


def make_batch(rows=64, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    dense = torch.randn(rows, 2, generator=generator, dtype=dtype)
    categorical = torch.stack([torch.randint(0, n, (rows,), generator=generator) for n in (5, 3000, 7)], 1)
    return dense, categorical


def make_bag(rows, cardinality, weighted, seed=2):
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 4, (rows,), generator=generator)  # some rows have no values
    values = torch.randint(0, cardinality, (int(counts.sum()),), generator=generator)
    weights = torch.rand(len(values), generator=generator) if weighted else None
    return Bag(values, counts.cumsum(0) - counts, weights), counts


def plain_stack(stack, dense, categorical):
    single = [F.embedding(categorical[:, k], table) for k, table in enumerate(stack.tables)]
    return torch.cat((*single, dense), 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 63, 5000])
def test_stack_and_every_gradient(backend, dtype, rows):
    stack = make_stack(backend).to(dtype)
    dense, categorical = make_batch(rows, dtype)
    dense.requires_grad_()
    x0 = stack(dense, categorical)
    expected = plain_stack(stack, dense, categorical)
    assert torch.equal(x0, expected)
    assert x0.stride() == (ALIGNMENT, 1)  # 14 columns, padded
    g = torch.randn_like(expected)
    ddense, *tables = torch.autograd.grad(x0, (dense, *stack.tables), g)
    expected_ddense, *expected_tables = torch.autograd.grad(expected, (dense, *stack.tables), g)
    assert torch.equal(ddense, expected_ddense)
    for table, expected_table in zip(tables, expected_tables, strict=True):
        assert table.is_sparse
        assert table.is_coalesced()
        indices = table.indices()[0]
        assert bool((indices.diff() > 0).all())
        # A row shared by n examples is summed in another order: n roundings of the sum's size.
        torch.testing.assert_close(table.to_dense(), expected_table, rtol=1e-5, atol=1e-3 if rows == 5000 else 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pooling", ["mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
def test_bags(backend, pooling, weighted):
    rows, stack = (
        40,
        EmbeddingStack(
            [4], 1, [2, 5], bag_cardinalities=[11], bag_pooling=pooling, backend=backend, sparse_gradients=True
        ),
    )
    bag, counts = make_bag(rows, 11, weighted)
    dense, categorical = torch.randn(rows, 1), torch.randint(0, 4, (rows, 1))
    x0 = stack(dense, categorical, [bag])
    g = torch.randn_like(x0)
    x0.backward(g)
    pooled, table = torch.zeros(rows, 5), stack.tables[1].detach().clone().requires_grad_()
    for r, (start, count) in enumerate(zip(bag.offsets.tolist(), counts.tolist(), strict=True)):
        if count:
            weights = torch.ones(count) if bag.weights is None else bag.weights[start : start + count]
            total = (weights.unsqueeze(1) * table[bag.values[start : start + count]]).sum(0)
            pooled[r] = total / weights.sum() if pooling == "mean" else total
    torch.testing.assert_close(x0[:, 2:7], pooled)
    pooled.backward(g[:, 2:7])
    torch.testing.assert_close(stack.tables[1].grad.to_dense(), table.grad)
    assert (counts == 0).any()
    assert bool((x0[counts == 0, 2:7] == 0).all())


def test_gradients_are_bit_identical_from_run_to_run():
    stack, (dense, categorical) = make_stack(), make_batch(4096)
    g = torch.randn(4096, stack.out_features)
    first, second = (torch.autograd.grad(stack(dense, categorical), list(stack.tables), g) for _ in range(2))
    assert all(torch.equal(a.values(), b.values()) for a, b in zip(first, second, strict=True))


def test_frozen_table_and_int32_ids():
    stack, (dense, categorical) = make_stack(), make_batch()
    stack.load_pretrained(1, torch.full((3000, 8), 2.0))
    stack.tables[1].requires_grad_(False)
    x0 = stack(dense, categorical.int())
    assert bool((x0[:, 3:11] == 2).all())
    x0.sum().backward()
    assert stack.tables[1].grad is None
    assert stack.tables[0].grad is not None
    with pytest.raises(ValueError, match=r"feature 1 needs a weight of \(3000, 8\); got \(3000, 4\)"):
        stack.load_pretrained(1, torch.zeros(3000, 4))


@pytest.mark.parametrize(
    ("cardinality", "dim"), [(1, 6), (2, 7), (16, 12), (81, 18), (1000, 34), (10_000, 60), (10_000_000, 337)]
)
def test_paper_dimension(cardinality, dim):
    """Six times the fourth root, by hand: 16 = 2⁴ gives 12, 1000 gives 33.7, ten million 337.4."""
    assert paper_dim(cardinality) == dim
    if cardinality < 10**6:
        assert EmbeddingStack([cardinality], 1).dims == (dim,)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [-1, 3000, 2**40])
def test_bad_id_names_feature_id_and_cardinality(backend, bad):
    stack, (dense, categorical) = make_stack(backend), make_batch()
    categorical[17, 1] = bad
    with pytest.raises(ValueError, match=f"feature 1 has 3000 ids, 0 to 2999; got id {bad} in row 17"):
        stack(dense, categorical)
    bag_stack = EmbeddingStack([], 1, 4, bag_cardinalities=[9], sparse_gradients=True, backend=backend)
    bag = Bag(torch.tensor([1, bad, 2]), torch.tensor([0, 2]))
    with pytest.raises(ValueError, match=f"feature 0 has 9 ids, 0 to 8; got id {bad} in value 1"):
        bag_stack(torch.zeros(2, 1), torch.zeros(2, 0, dtype=torch.int64), [bag])


def test_bad_offsets():
    stack = EmbeddingStack([], 1, 4, bag_cardinalities=[9])
    for offsets in ([1, 2], [0, 4], [2, 1]):
        bag = Bag(torch.tensor([1, 1, 2]), torch.tensor(offsets))
        with pytest.raises(ValueError, match="offsets must start at 0 and rise to at most 3"):
            stack(torch.zeros(2, 1), torch.zeros(2, 0, dtype=torch.int64), [bag])


def test_bad_shapes_and_types():
    stack, (dense, categorical) = make_stack(), make_batch()
    with pytest.raises(ValueError, match=r"dense must be \(B, 2\); got \(64, 1\)"):
        stack(dense[:, :1], categorical)
    with pytest.raises(ValueError, match=r"categorical must be \(B, 3\); got \(64, 2\)"):
        stack(dense, categorical[:, :2])
    with pytest.raises(ValueError, match="as many rows"):
        stack(dense[:5], categorical)
    with pytest.raises(TypeError, match=r"integer ids; got torch\.float32"):
        stack(dense, categorical.float())
    with pytest.raises(ValueError, match="there must be 0 bags; got 1"):
        stack(dense, categorical, [make_bag(64, 5, False)[0]])
    with pytest.raises(ValueError, match="one for each of 2 features; got"):
        EmbeddingStack([3, 4], 0, [1, 2, 3])
    with pytest.raises(ValueError, match="every cardinality at least 1; got num_dense = 0 and cardinalities"):
        EmbeddingStack([3, 0])
    with pytest.raises(ValueError, match="there must be a feature"):
        EmbeddingStack([], 0)
