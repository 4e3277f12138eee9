"""The embedding stack with ids, bags and tables that do not fit, or change between forward and backward pass."""

import functools

import pytest
import torch
from torch import nn

from fastcross.batch import Bag
from fastcross.layers.embedding import EmbeddingStack
from fastcross.ops import embedding_stack

BACKENDS = ["cpu", "torch", "reference"]
ERRORS = {None: ValueError, "inductor": RuntimeError, "aot_eager": RuntimeError}  # C++ knows no ValueError
NO_IDS = torch.zeros(2, 0, dtype=torch.int64)


def pooled(offsets, values=(1, 1, 2), weights=None, **options):
    table = torch.rand(9, 4, requires_grad=True)
    bag = torch.tensor(values), torch.tensor(offsets, dtype=torch.int64)
    return functools.partial(embedding_stack, **options), (torch.zeros(2, 1), NO_IDS, [table], [(*bag, weights)])


OFFSETS = ([1, 2], [0, 4], [2, 1], [0, -1], [0, 2**40], [-(2**40), 0])


@pytest.mark.parametrize(("backend", "compiler"), [*((backend, None) for backend in BACKENDS), ("cpu", "inductor")])
@pytest.mark.parametrize("pooling", ["mean", "sum"])
def test_bad_offsets(pooling, backend, compiler):
    torch.compiler.reset()
    for offsets in OFFSETS:
        stack, operands = pooled(offsets, backend=backend, pooling=pooling)
        stack = torch.compile(stack, backend=compiler, fullgraph=True) if compiler else stack
        with pytest.raises(ERRORS[compiler], match="feature 0's offsets must start at 0 and rise to at most 3; got"):
            stack(*operands)


@pytest.mark.parametrize(("backend", "compiler"), [*((backend, None) for backend in BACKENDS), ("cpu", "aot_eager")])
def test_bad_ids(backend, compiler):
    torch.compiler.reset()
    stack, (dense, ids, tables, _) = pooled([0, 1], backend=backend)
    stack = torch.compile(stack, backend=compiler, fullgraph=True) if compiler else stack
    for bad in (-1, 9, 2**40):
        with pytest.raises(ERRORS[compiler], match=f"feature 0 has 9 ids, 0 to 8; got id {bad} in value 1"):
            stack(dense, ids, tables, [(torch.tensor([0, bad, 3]), torch.tensor([0, 1]))])
        with pytest.raises(ERRORS[compiler], match=f"feature 0 has 9 ids, 0 to 8; got id {bad} in row 1"):
            stack(dense, torch.tensor([[2], [bad]]), tables, [])


def test_values_of_no_row():
    stack, _ = pooled([])
    empty = torch.zeros(0, 1), torch.zeros(0, 0, dtype=torch.int64), [torch.rand(9, 4)]
    with pytest.raises(ValueError, match="offsets must start at 0 and rise to at most 1; got none"):
        stack(*empty, [(torch.tensor([1]), torch.tensor([], dtype=torch.int64))])
    assert stack(*empty, [(torch.tensor([], dtype=torch.int64),) * 2]).shape == (0, 5)


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("changed", ["ids", "values", "offsets", "weights", "table"])
def test_what_the_backward_pass_reads_must_not_change(changed, backend, sparse):
    table = torch.rand(9, 4, requires_grad=True)
    parts = {
        "ids": torch.tensor([[1], [2]]),
        "values": torch.tensor([1, 1, 2]),
        "offsets": torch.tensor([0, 1]),
        "weights": torch.rand(3, requires_grad=True),
        "table": table,
    }
    bag = Bag(parts["values"], parts["offsets"], parts["weights"])
    tables = [torch.rand(9, 4, requires_grad=True), table]
    x0 = embedding_stack(torch.zeros(2, 1), parts["ids"], tables, [bag], sparse_gradients=sparse, backend=backend)
    with torch.no_grad():
        parts[changed].fill_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x0.sum().backward()


def test_a_table_may_change_where_nothing_reads_it():
    table = torch.rand(9, 4, requires_grad=True)
    x0 = embedding_stack(torch.zeros(2, 1), torch.tensor([[1], [2]]), [table])
    with torch.no_grad():
        table.fill_(0)  # as by an optimiser, before the backward pass of a batch that was sent ahead
    x0.sum().backward()
    assert table.grad.sum(1).tolist() == [0, 4, 4, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("size", [(2, 4), (10**5, 4), (9, 10**5)])
@pytest.mark.parametrize("sparse", [True, False])
def test_a_table_put_in_anothers_place(size, sparse):
    table, weights = nn.Parameter(torch.rand(9, 4)), torch.rand(3, requires_grad=True)
    stack = functools.partial(embedding_stack, sparse_gradients=sparse)
    x0 = stack(torch.zeros(2, 1), torch.tensor([[8], [2]]), [table])
    bag = Bag(torch.tensor([8, 1, 2]), torch.tensor([0, 1]), weights)
    pooled = stack(torch.zeros(2, 1), NO_IDS, [table], [bag])
    table.data = torch.ones(size)
    (gradient,) = torch.autograd.grad(x0.sum(), table)
    assert gradient.shape == (9, 4)  # as of PyTorch's own embedding: the graph is that of the forward pass
    before = r"feature 0's table was \(9, 4\) in the forward pass and is "
    with pytest.raises(RuntimeError, match=before):
        pooled.sum().backward()


def test_ids_changed_behind_autograds_back():
    ids = torch.zeros(64, 1, dtype=torch.int64)
    table = nn.Parameter(torch.rand(2, 3))
    x0 = embedding_stack(torch.zeros(64, 0), ids, [table], sparse_gradients=True, backend="cpu")
    ids.numpy()[:, 0] = range(64)  # shared memory, as of a loader that reuses its arrays
    with pytest.raises(RuntimeError, match="feature 0 has 2 ids; got others: they were changed since the forward pass"):
        x0.sum().backward()


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("bad", [-1, 9, 2**40])
def test_values_changed_behind_autograds_back(bad, backend):
    values, table = torch.zeros(64, dtype=torch.int64), nn.Parameter(torch.rand(9, 3))
    bag = Bag(values, torch.arange(64))
    ids = torch.zeros(64, 0, dtype=torch.int64)
    x0 = embedding_stack(torch.zeros(64, 0), ids, [table], [bag], sparse_gradients=True, backend=backend)
    values.numpy()[5] = bad
    with pytest.raises(RuntimeError, match=r"(feature 0|a table) has 9 ids; got others: they were changed"):
        x0.sum().backward()


def test_operands_of_another_kind():
    dense, ids, table = torch.zeros(2, 1), torch.zeros(2, 1, dtype=torch.int64), torch.rand(9, 4)
    bag = Bag(torch.tensor([1, 2]), torch.tensor([0, 1]))
    for message, arguments in {
        r"categorical must hold integer ids; got torch.float32": (dense, dense, [table]),
        r"categorical must hold integer ids; got torch.bool": (dense, ids.bool(), [table]),
        r"categorical must hold integer ids; got list": (dense, [[0], [1]], [table]),
        r"dense must be floating point; got torch.int64": (ids, ids, [table]),
        r"feature 0's table must be floating point, .* got \(9, 4\) torch.int64": (dense, ids, [table.long()]),
        r"feature 0's table must be floating point, .* got \(4,\)": (dense, ids, [table[0]]),
        r"feature 1's values must hold integer ids": (dense, ids, [table] * 2, [(table[0, :2], bag.offsets)]),
        r"feature 1's offsets must hold integer ids": (dense, ids, [table] * 2, [(bag.values, table[0, :2])]),
        r"feature 1's weights must be floating point": (
            dense,
            ids,
            [table] * 2,
            [(bag.values, bag.offsets, bag.values)],
        ),
    }.items():
        with pytest.raises(TypeError, match=message):
            embedding_stack(*arguments)
    for message, arguments in {
        r"dense must be \(B, num_dense\); got \(2,\)": (dense[:, 0], ids, [table]),
        r"categorical must be \(B, k\); got \(2,\)": (dense, ids[:, 0], [table]),
        r"as many rows; got \(1, 1\) and \(2, 1\)": (dense[:1], ids, [table]),
        r"a table for each of 1 features and 0 bags; got 2": (dense, ids, [table] * 2),
        r"feature 0's table must be on the device of dense, cpu; got meta": (dense, ids, [table.to("meta")]),
        r"categorical must be on the device of dense, cpu; got meta": (dense, ids.to("meta"), [table]),
        r"feature 1's values must be of one dimension": (dense, ids, [table] * 2, [(ids, bag.offsets)]),
        r"feature 1's offsets must be on the device": (dense, ids, [table] * 2, [(bag.values, bag.offsets.to("meta"))]),
    }.items():
        with pytest.raises(ValueError, match=message):
            embedding_stack(*arguments)
    with pytest.raises(ValueError, match='pooling must be "mean" or "sum"; got \'max\''):
        embedding_stack(dense, ids, [table], pooling="max")
    with pytest.raises(ValueError, match="backend must be one of"):
        embedding_stack(dense, ids, [table], backend="cuda")


def test_layer_with_odd_tables_trains():
    """Of another dtype, not contiguous, or both: as PyTorch's own operators would."""
    torch.manual_seed(0)
    stack = EmbeddingStack([5, 6], 1, 4)
    stack.tables[0] = nn.Parameter(torch.rand(5, 8)[:, ::2])
    stack.tables[1] = nn.Parameter(torch.rand(6, 4, dtype=torch.float64))
    dense, ids = torch.rand(7, 1), torch.randint(0, 5, (7, 2))
    x0 = stack(dense, ids)
    expected = torch.cat((stack.tables[0][ids[:, 0]], stack.tables[1][ids[:, 1]], dense), 1)
    assert x0.dtype == torch.float64
    assert torch.equal(x0, expected)
    for ours, wanted in zip(
        torch.autograd.grad(x0.sum(), list(stack.tables)),
        torch.autograd.grad(expected.sum(), list(stack.tables)),
        strict=True,
    ):
        assert torch.equal(ours.to_dense(), wanted)


def test_rows_that_are_narrower_than_the_tables_are_no_operand_of_the_kernels():
    ids, bwd = torch.zeros(2, 2, dtype=torch.int64), torch.ops.fastcross.embedding_stack_bwd
    with pytest.raises(RuntimeError, match=r"dx0 must have 7 columns of tables; got \(2, 6\)"):
        bwd(torch.zeros(2, 6), ids, [], [], [], [9, 4, 5, 3], [True, True], "mean", False)
