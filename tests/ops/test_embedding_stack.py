"""The embedding stack against the reference: output, every gradient, and what PyTorch's transformations make of it."""

import functools

import pytest
import torch

from fastcross import reference
from fastcross.batch import Bag
from fastcross.ops import embedding_stack

HEIGHTS, WIDTHS, BAG_HEIGHTS, BAG_WIDTHS = (5, 300), (3, 8), (11, 6), (4, 1)


def make_operands(rows=23, dtype=torch.float32, weighted=True, seed=0):
    """dense, ids, tables, bags: two single-valued features, then a bag with weights and one without."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    sizes = zip((*HEIGHTS, *BAG_HEIGHTS), (*WIDTHS, *BAG_WIDTHS), strict=True)
    tables = [random(*size) for size in sizes]
    ids = torch.stack([torch.randint(0, n, (rows,), generator=generator) for n in HEIGHTS], 1)
    bags = []
    for k, height in enumerate(BAG_HEIGHTS):
        counts = torch.randint(0, 4, (rows,), generator=generator)  # some rows have no values
        values = torch.randint(0, height, (int(counts.sum()),), generator=generator)
        weights = None
        if k == 0 and weighted:
            weights = torch.rand(len(values), generator=generator, dtype=torch.float64).to(dtype)
            weights[: len(values) // 4] = 0  # and of some rows the weights sum to 0
            weights.requires_grad_()
        bags.append(Bag(values, counts.cumsum(0) - counts, weights))
    return random(rows, 2), ids, tables, bags


def differentiated(dense, tables, bags):
    return [dense, *tables, *(bag.weights for bag in bags if bag.weights is not None)]


def in_float64(dense, ids, tables, bags, pooling):
    """x0 and a function from dx0 to every gradient, by the reference."""
    dense, *tables = (t.detach().double().requires_grad_() for t in (dense, *tables))
    bags = [
        (b.values, b.offsets, None if b.weights is None else b.weights.detach().double().requires_grad_()) for b in bags
    ]
    x0 = reference.embedding_stack(dense, ids, tables, bags, pooling)
    inputs = [dense, *tables, *(weights for _, _, weights in bags if weights is not None)]
    return x0, lambda g: torch.autograd.grad(x0, inputs, g.double(), materialize_grads=True)


@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
@pytest.mark.parametrize("pooling", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 23, 3000])
def test_output_and_every_gradient(rows, dtype, pooling, backend, sparse):
    if backend == "reference" and rows == 3000:
        pytest.skip("the reference compared with itself, slowly")
    dense, ids, tables, bags = make_operands(rows, dtype)
    expected, gradients = in_float64(dense, ids, tables, bags, pooling)
    x0 = embedding_stack(dense, ids, tables, bags, pooling=pooling, sparse_gradients=sparse, backend=backend)
    # A sum of n numbers of size 1 errs by n roundings at most: n is up to 3 in a bag's row, up to rows for an id. Half
    # precision is summed in float32 and rounded once, but for the reference, whose dots are in half precision.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(x0.double(), expected, rtol=4 * eps, atol=8 * eps)
    g = torch.randn(x0.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = torch.autograd.grad(x0, differentiated(dense, tables, bags), g, materialize_grads=True)
    for k, (ours, wanted) in enumerate(zip(found, gradients(g), strict=True)):
        if 1 <= k <= len(tables):
            assert ours.is_sparse == sparse
            assert not sparse or ours.is_coalesced()
            assert ours.dtype == dtype
        n = max(1, rows if dtype in (torch.float32, torch.float64) else 64)
        torch.testing.assert_close(ours.to_dense().double(), wanted, rtol=8 * eps, atol=n * eps)


def test_half_precision_sums_in_float32():
    """4096 times 1 is 2048 where float16 adds one by one."""
    table = torch.zeros(2, 1, dtype=torch.float16, requires_grad=True)
    ids, dense = torch.zeros(4096, 1, dtype=torch.int64), torch.zeros(4096, 0)
    for sparse in (True, False):
        x0 = embedding_stack(dense, ids, [table], sparse_gradients=sparse)
        (gradient,) = torch.autograd.grad(x0.sum(), table)
        assert float(gradient.to_dense()[0, 0]) == 4096


@pytest.mark.parametrize("sparse", [True, False])
def test_mean_over_float64_rows_is_exact_to_float64(sparse):
    table = torch.rand(3, 4, dtype=torch.float64)
    bag = Bag(torch.tensor([0, 1, 2]), torch.tensor([0]))
    x0 = embedding_stack(torch.zeros(1, 0), torch.zeros(1, 0, dtype=torch.int64), [table.requires_grad_()], [bag])
    torch.testing.assert_close(x0[0], table.mean(0), rtol=1e-15, atol=0)


@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
@pytest.mark.parametrize("sparse", [True, False])
def test_tables_of_several_dtypes_and_strides(backend, sparse):
    """x0 has the dtype that PyTorch promotes them to; each gradient has its table's."""
    dense, ids, tables, bags = make_operands(dtype=torch.float64)
    leaves = [
        tables[0].detach().float().T.contiguous().T.requires_grad_(),  # transposed
        tables[1].detach().repeat(1, 2)[:, ::2].contiguous().repeat(1, 2)[:, :8].requires_grad_(),  # of a wider one
        tables[2].detach().half().requires_grad_(),
        tables[3].detach().bfloat16().requires_grad_(),
    ]
    x0 = embedding_stack(dense, ids, leaves, bags, sparse_gradients=sparse, backend=backend)
    assert x0.dtype == torch.float64
    expected, gradients = in_float64(dense, ids, leaves, bags, "mean")
    torch.testing.assert_close(x0, expected, rtol=2e-2 if backend == "reference" else 1e-6, atol=1e-2)
    g = torch.randn_like(x0)
    for ours, wanted, like in zip(
        torch.autograd.grad(x0, differentiated(dense, leaves, bags), g),
        gradients(g),
        differentiated(dense, leaves, bags),
        strict=True,
    ):
        assert ours.dtype == like.dtype
        torch.testing.assert_close(ours.to_dense().double(), wanted, rtol=3e-2, atol=3e-2)
    with pytest.raises(ValueError, match="contiguous tables of one dtype; got feature 0's, torch"):
        embedding_stack(dense, ids, leaves, bags, backend="cpu")


@pytest.mark.parametrize("pooling", ["mean", "sum"])
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_gradients_are_differentiable(backend, sparse, pooling):
    dense, ids, tables, bags = make_operands(5, torch.float64)
    inputs = differentiated(dense, tables, bags)

    def stack(dense, *others):
        tables, (weights,) = others[: len(HEIGHTS) + len(BAG_HEIGHTS)], others[-1:]
        given = [Bag(bags[0].values, bags[0].offsets, weights), bags[1]]
        return embedding_stack(dense, ids, tables, given, pooling=pooling, sparse_gradients=sparse, backend=backend)

    if not sparse:  # PyTorch's check takes dense gradients only
        assert torch.autograd.gradcheck(stack, inputs)
    g = torch.randn(stack(*inputs).shape, dtype=torch.float64, requires_grad=True)

    def second(function):
        gradients = torch.autograd.grad(function(*inputs), inputs, g, create_graph=True)
        total = sum(gradient.to_dense().pow(2).sum() for gradient in gradients)
        return torch.autograd.grad(total, (g, *inputs), allow_unused=True, materialize_grads=True)

    def plainly(dense, *others):
        given = [(bags[0].values, bags[0].offsets, others[-1]), (bags[1].values, bags[1].offsets, None)]
        return reference.embedding_stack(dense, ids, others[:-1], given, pooling)

    for ours, wanted in zip(second(stack), second(plainly), strict=True):
        torch.testing.assert_close(ours.to_dense(), wanted)


def test_opcheck():
    dense, ids, tables, bags = make_operands(7)
    dense, *tables = (t.detach() for t in (dense, *tables))
    values, offsets = [bag.values for bag in bags], [bag.offsets for bag in bags]
    weights = [None if bag.weights is None else bag.weights.detach() for bag in bags]
    operators = torch.ops.fastcross
    torch.library.opcheck(operators.embedding_stack_fwd.default, (dense, ids, values, offsets, weights, tables, "mean"))
    sizes = [size for table in tables for size in table.shape]
    for needs in ([True] * 4, [False, True, True, False]):
        for is_dense in (True, False):
            backward = (torch.randn(7, 18), ids, values, offsets, weights, sizes, needs, "mean", is_dense)
            torch.library.opcheck(operators.embedding_stack_bwd.default, backward)


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_compiles_as_one_graph_in_training(backend):
    dense, ids, tables, bags = make_operands(9)
    tuples = [(bag.values, bag.offsets, bag.weights) for bag in bags]
    stack = functools.partial(embedding_stack, backend=backend)
    x0 = torch.compile(stack, fullgraph=True)(dense, ids, tables, tuples)
    expected = stack(dense, ids, tables, bags)
    torch.testing.assert_close(x0, expected)
    g, inputs = torch.randn_like(expected), differentiated(dense, tables, bags)
    for ours, wanted in zip(torch.autograd.grad(x0, inputs, g), torch.autograd.grad(expected, inputs, g), strict=True):
        torch.testing.assert_close(ours, wanted)


def test_compiled_training_keeps_sparse_gradients():
    dense, ids, tables, bags = make_operands(9)
    stack = functools.partial(embedding_stack, sparse_gradients=True)
    torch.compile(stack, backend="aot_eager")(dense, ids, tables, bags).sum().backward()
    assert all(table.grad.is_sparse for table in tables)
    with torch.no_grad():  # without gradients nothing keeps it from being one graph
        x0 = torch.compile(stack, backend="aot_eager", fullgraph=True)(dense, ids, tables, bags)
    torch.testing.assert_close(x0, stack(dense, ids, tables, bags))


def test_gradients_per_example():
    dense, ids, tables, _ = make_operands(6)

    def loss(tables, dense, ids):
        return embedding_stack(dense.unsqueeze(0), ids.unsqueeze(0), tables, sparse_gradients=True).pow(2).sum()

    tables = tables[:2]
    each = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(tables, dense, ids)
    for m in range(6):
        wanted = torch.autograd.grad(loss(tables, dense[m], ids[m]), tables)
        for ours, theirs in zip(each, wanted, strict=True):
            torch.testing.assert_close(ours[m], theirs.to_dense())


def test_tangents():
    dense, ids, tables, bags = make_operands(6, torch.float64)
    directions = [torch.randn_like(t) for t in (dense, *tables)]
    _, tangent = torch.func.jvp(
        lambda dense, *tables: embedding_stack(dense, ids, tables, bags), (dense, *tables), tuple(directions)
    )
    torch.testing.assert_close(tangent, embedding_stack(directions[0], ids, directions[1:], bags))  # it is linear


def test_meta_and_fake_tensors_have_the_shape_and_strides():
    dense, ids, tables, bags = make_operands(6)
    expected = embedding_stack(dense, ids, tables, bags)
    meta = [Bag(*(None if t is None else t.to("meta") for t in (b.values, b.offsets, b.weights))) for b in bags]
    x0 = embedding_stack(dense.to("meta"), ids.to("meta"), [table.to("meta") for table in tables], meta)
    assert (x0.shape, x0.stride(), x0.dtype) == (expected.shape, expected.stride(), expected.dtype)


def test_under_the_profiler_it_has_its_name(cpu_kernels):
    dense, ids, tables, bags = make_operands(6)
    with torch.profiler.profile() as profile:
        embedding_stack(dense, ids, tables, bags, sparse_gradients=True).sum().backward()
    names = {event.name for event in profile.events()}
    assert {"fastcross::embedding_stack_fwd", "fastcross::embedding_stack_bwd"} <= names


def test_a_wrong_id_of_a_bag_is_an_error_where_operators_are_transformed():
    bag = Bag(torch.tensor([-1, 5, 1, 2]), torch.tensor([0, 2, 2, 3]))
    nothing = torch.zeros(4, 0)
    with pytest.raises(IndexError):
        torch.func.grad(lambda w: embedding_stack(nothing, nothing.long(), [w], [bag]).sum())(torch.randn(6, 5))
