"""The embedding kernels: x0 and every gradient by the rule of fastcross/accuracy.py; their form, and wrong ids.

On a GPU, or in Triton's interpreter, where ``test_triton_interpreter.py`` runs this file.
"""

from unittest import mock

import pytest
import torch
from no_waits import NoWaits
from triton_place import MARKS

from fastcross import reference
from fastcross.accuracy import assert_as_good
from fastcross.batch import Bag
from fastcross.layers.embedding import EmbeddingStack
from fastcross.ops import backends, embedding_stack

pytestmark = MARKS
HALF, BF16, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64


def operands(device, rows, widths, dtype=SINGLE, bags=0, weighted=False, dense=2, height=11):
    """dense, ids, tables and bags; of the widths the last ones belong to the bags, and some of their rows are empty."""
    generator = torch.Generator().manual_seed(rows + len(widths))

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=DOUBLE).to(dtype).to(device).requires_grad_()

    def ids(*shape):
        return torch.randint(0, height, shape, generator=generator).to(device)

    given = []
    for _ in range(bags):
        counts = torch.randint(0, 4, (rows,), generator=generator)
        n = int(counts.sum())
        weights = torch.rand(n, generator=generator, dtype=DOUBLE).to(dtype).to(device) if weighted else None
        given.append(Bag(ids(n), (counts.cumsum(0) - counts).to(device), weights))
    return normal(rows, dense), ids(rows, len(widths) - bags), [normal(height, width) for width in widths], given


def evaluate(operands, function, dtype=None, pooling="mean"):
    """x0 and the gradients of dense, tables and weights, of sparse ones the sum of their entries."""
    dense, ids, tables, bags = operands

    def leaf(t):
        return None if t is None else (t if dtype is None else t.to(dtype)).detach().requires_grad_()

    dense, tables, weights = leaf(dense), [leaf(t) for t in tables], [leaf(bag.weights) for bag in bags]
    x0 = function(
        dense, ids, tables, [Bag(b.values, b.offsets, w) for b, w in zip(bags, weights, strict=True)], pooling
    )
    g = torch.randn(x0.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(x0)
    inputs = [dense, *tables, *(w for w in weights if w is not None)]
    return [x0.detach(), *torch.autograd.grad(x0, inputs, g, materialize_grads=True)]


def ours(dense, ids, tables, bags, pooling, sparse=True, backend="triton"):
    return embedding_stack(dense, ids, tables, bags, pooling=pooling, sparse_gradients=sparse, backend=backend)


def by_reference(dense, ids, tables, bags, pooling):
    return reference.embedding_stack(dense, ids, tables, [(b.values, b.offsets, b.weights) for b in bags], pooling)


CASES = {  # rows, widths, further options, pooling
    "one row": (1, (4,), {}, "mean"),
    "no rows": (0, (4, 3), {"bags": 1}, "mean"),
    "no tables": (5, (), {}, "mean"),
    "no dense": (5, (8, 4), {"dense": 0}, "mean"),
    "wide words": (33, (16, 4, 32), {}, "mean"),
    "odd widths": (33, (3, 17, 1), {}, "mean"),
    "wider than a tile": (7, (150, 2), {}, "mean"),
    "bags": (21, (4, 8, 4), {"bags": 2}, "mean"),
    "sums of bags": (21, (3, 5, 6), {"bags": 2, "weighted": True}, "sum"),
    "weights": (21, (3, 5), {"bags": 1, "weighted": True, "dtype": HALF}, "mean"),
    "bags only, bfloat16": (9, (8,), {"bags": 1, "dtype": BF16}, "mean"),
    "float16": (21, (8, 16), {"dtype": HALF}, "mean"),
    "float64": (21, (2, 3), {"bags": 1, "weighted": True, "dtype": DOUBLE}, "mean"),
    "one id": (70, (2, 5), {"height": 1}, "mean"),
}


@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients(case, device):
    rows, widths, options, pooling = CASES[case]
    given = operands(device, rows, widths, **options)
    dtype = options.get("dtype", SINGLE)
    exact = evaluate(given, by_reference, DOUBLE, pooling)
    eager = evaluate(given, by_reference, dtype, pooling)
    for i, (found, near, wanted) in enumerate(zip(evaluate(given, ours, pooling=pooling), eager, exact, strict=True)):
        assert found.dtype == dtype
        assert_as_good(found.to_dense(), near, wanted, f"result {i}")


def test_ids_of_32_bits_are_read_as_they_are(device):
    """The same bits as of 64; the kernel is given no copy."""
    from fastcross.kernels.gpu import embedding as gpu

    dense, ids, tables, bags = operands(device, 33, (16, 8, 4), bags=1, weighted=True)
    short = ids.int(), [Bag(b.values.int(), b.offsets.int(), b.weights) for b in bags]
    expected = evaluate((dense, ids, tables, bags), ours)
    with mock.patch.object(gpu, "embedding_stack_keyed_fwd", wraps=gpu.embedding_stack_keyed_fwd) as fwd:
        found = evaluate((dense, short[0], tables, short[1]), ours)
    assert fwd.call_args.args[1].data_ptr() == short[0].data_ptr()
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.to_dense(), b.to_dense())


def test_dense_gradients(device):
    given = operands(device, 40, (3, 8, 5), bags=1, weighted=True)
    dense = evaluate(given, lambda *args: ours(*args, sparse=False))
    for a, b in zip(dense, evaluate(given, ours), strict=True):
        assert not a.is_sparse
        assert torch.equal(a, b.to_dense())


@pytest.mark.parametrize("rows", [32, 33, 1100])
def test_form_of_the_gradients(rows, device):
    """Ids in order, the sum of each at its head, 0 elsewhere, slices in a row; 1,100 rows are more than 32 blocks."""
    widths = (2,) if rows > 1000 else (2, 6, 4)
    dense, ids, tables, bags = operands(device, rows, widths, bags=len(widths) // 3, height=3)
    ids[: rows - 5, 0] = 1
    plain = ours(dense, ids, tables, bags, "mean", backend="torch")
    g = torch.randn(plain.shape, generator=torch.Generator().manual_seed(2)).to(device)
    wanted = torch.autograd.grad(plain, tables, g)
    first = torch.autograd.grad(ours(dense, ids, tables, bags, "mean"), tables, g)
    again = torch.autograd.grad(ours(dense, ids, tables, bags, "mean"), tables, g)
    entries = [*([rows] * ids.shape[1]), *(len(bag.values) for bag in bags)]
    places = [0, 0]
    for k, (found, second, expected) in enumerate(zip(first, again, wanted, strict=True)):
        assert not found.is_coalesced()
        numbers, values = found._indices()[0], found._values()
        given = ids[:, k] if k < ids.shape[1] else bags[0].values
        assert torch.equal(numbers, given.sort().values)
        assert values.shape == (entries[k], widths[k])
        heads = torch.cat((numbers.new_ones(1), numbers.diff())) > 0
        assert bool((values[~heads] == 0).all())
        torch.testing.assert_close(found.to_dense(), expected.to_dense(), rtol=1e-5, atol=1e-5 * rows**0.5)
        assert torch.equal(values, second._values())
        for i, part in enumerate((numbers, values)):
            assert part.data_ptr() == places[i] or k == 0
            places[i] = part.data_ptr() + part.numel() * part.element_size()


def test_keys_of_64_bits(device, monkeypatch):
    from fastcross.kernels import embedding as plain

    given = operands(device, 20, (3, 8), bags=1)
    expected = evaluate(given, ours)
    monkeypatch.setattr(plain, "key_dtype", lambda heights, counts: torch.int64)
    assert all(torch.equal(a.to_dense(), b.to_dense()) for a, b in zip(evaluate(given, ours), expected, strict=True))


def test_layouts_of_ids_tables_and_bags(device):
    dense, ids, tables, bags = operands(device, 20, (4, 8, 4), bags=1, weighted=True)
    expected = ours(dense, ids, tables, bags, "mean")
    turned = ids.int().T.contiguous().T
    shifted = [torch.cat((table.new_zeros(1), table.flatten()))[1:].view(table.shape) for table in tables]
    strided = Bag(*(t.repeat_interleave(2)[::2] for t in (bags[0].values, bags[0].offsets, bags[0].weights)))
    assert torch.equal(ours(dense.T.contiguous().T, turned, shifted, [strided], "mean"), expected)
    with pytest.raises(ValueError, match='backend "triton" needs contiguous tables of one dtype; got feature 0'):
        ours(dense, ids, [tables[0].T.contiguous().T, *tables[1:]], bags, "mean")


def test_frozen_tables_have_no_entries(device):
    dense, ids, tables, bags = operands(device, 9, (4, 3, 5, 2), bags=2)
    wanted = torch.autograd.grad(ours(dense, ids, tables, bags, "mean").sum(), tables)
    for k in (0, 2):
        tables[k].requires_grad_(False)
    found = torch.autograd.grad(ours(dense, ids, tables, bags, "mean").sum(), tables[1::2])
    assert all(torch.equal(a.to_dense(), b.to_dense()) for a, b in zip(found, wanted[1::2], strict=True))


@pytest.mark.parametrize("sparse", [True, False])
def test_nothing_waits(sparse, device):
    """Forward and backward pass have one sort, and no operator whose result depends on data."""
    stack = EmbeddingStack([7, 5], 2, [3, 4, 2], bag_cardinalities=[6], sparse_gradients=sparse, backend="triton")
    stack = stack.to(device)
    ids, places = torch.zeros(9, 2, dtype=torch.int64, device=device), torch.arange(9, device=device)
    bag = Bag(places % 6, places)
    with NoWaits() as mode, pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "kernel", lambda name, backend, x: backends.launcher(name))  # in plain sight
        stack(torch.zeros(9, 2, device=device), ids, [bag]).sum().backward()
    assert mode.operators.count("sort") == 1
    assert stack.tables[2].grad.is_sparse == sparse


def message(stack, *batch):
    def call():
        stack(*batch)
        stack.raise_faults()

    with pytest.raises(ValueError, match="feature") as error:
        call()
    return str(error.value)


def stacks(device, **options):
    made = []
    for backend, place in (("torch", "cpu"), ("triton", device)):
        torch.manual_seed(0)
        made.append(EmbeddingStack(**options, backend=backend).to(place))
    return made


@pytest.mark.parametrize("bad", [-1, 2**31 - 2])
def test_bad_ids(bad, device):
    options = {"cardinalities": [5, 7], "num_dense": 1, "embedding_dim": 3, "bag_cardinalities": [4]}
    cpu, gpu = stacks(device, **options)
    dense, ids, bag = torch.zeros(6, 1), torch.ones(6, 2, dtype=torch.int64), Bag(torch.ones(6).long(), torch.arange(6))
    ids[4, 1] = bad
    on_device = dense.to(device), ids.to(device), [Bag(bag.values.to(device), bag.offsets.to(device))]
    assert message(gpu, *on_device) == message(cpu, dense, ids, [bag])
    gpu.raise_faults()  # it was told once
    x0 = gpu(*on_device)
    assert x0[4, 3:6].isnan().all()
    assert bool(x0.isnan().sum() == 3)
    x0.nan_to_num().sum().backward()
    wanted = torch.zeros(7, 3)
    wanted[1] = 5
    assert torch.equal(gpu.tables[1].grad.to_dense().cpu(), wanted)
    with pytest.raises(ValueError, match=f"feature 1 has 7 ids, 0 to 6; got id {bad} in row 4"):
        gpu.raise_faults()
    ids[4, 1], bag.values[3] = 1, bad
    on_device = dense.to(device), ids.to(device), [Bag(bag.values.to(device), bag.offsets.to(device))]
    assert message(gpu, *on_device) == message(cpu, dense, ids, [bag])
    functional = embedding_stack, on_device[0], on_device[1], list(gpu.tables), on_device[2]
    with pytest.raises(ValueError, match=f"feature 2 has 4 ids, 0 to 3; got id {bad} in value 3"):
        functional[0](*functional[1:], backend="triton")


@pytest.mark.parametrize("offsets", [[1, 2], [0, 4], [2, 1], [0, -1], [-5, 0]])
def test_bad_offsets(offsets, device):
    cpu, gpu = stacks(device, cardinalities=[], num_dense=1, embedding_dim=4, bag_cardinalities=[9])
    bag, dense, ids = Bag(torch.tensor([1, 1, 2]), torch.tensor(offsets)), torch.zeros(2, 1), torch.zeros(2, 0).long()
    weights = torch.ones(3, device=device, requires_grad=True)
    on_device = Bag(bag.values.to(device), bag.offsets.to(device), weights)
    batch = dense.to(device), ids.to(device), [on_device]
    assert message(gpu, *batch) == message(cpu, dense, ids, [bag])
    x0 = gpu(*batch)
    assert x0[:, :4].isnan().any()
    x0.sum().backward()  # leads nowhere out of bounds
    with pytest.raises(ValueError, match="offsets must start at 0 and rise to at most 3; got"):
        gpu.raise_faults()


def test_what_cannot_be_told_exactly_is_told_as_a_bound(device):
    stack = EmbeddingStack([5], 0, 2, backend="triton").to(device)
    for bad, told in ((2**40, "2147483647 or more"), (-(2**40), "-2147483648 or less")):
        assert f"got id {told} in row 1" in message(stack, torch.zeros(2, 0), torch.tensor([[0], [bad]]).to(device))


def test_faults_of_another_place_or_size(device):
    stack, ids = EmbeddingStack([5], 0, 2, backend="triton"), torch.tensor([[0], [9]], device=device)
    tables = {name: table.to(device) for name, table in stack.named_parameters()}
    with pytest.raises(ValueError, match="got id 9 in row 1"):  # at once, for a skeleton's would not be looked at
        torch.func.functional_call(stack.to("meta"), tables, (torch.zeros(2, 0, device=device), ids))
    given = torch.zeros(2, 0, device=device), ids, [*tables.values()]
    with pytest.raises(ValueError, match=r"faults must be contiguous, 1 torch.int64; got 2 torch.float32"):
        embedding_stack(*given, backend="triton", faults=torch.zeros(2, device=device))


def test_opcheck(device):
    dense, ids, tables, bags = operands(device, 5, (3, 4), bags=1, weighted=True)
    flat = [bags[0].values, bags[0].offsets, bags[0].weights.detach()]
    faults = torch.full((1 + 3,), torch.iinfo(torch.int64).max, device=device)
    given = dense.detach(), ids, flat, [table.detach() for table in tables], faults, "mean", [True, True]
    names = "embedding_stack_keyed_fwd", "embedding_stack_keyed_bwd"
    forward, backward = (backends.kernel(name, "triton", dense) for name in names)
    torch.library.opcheck(forward, given)
    x0, *kept = forward(*given)
    torch.library.opcheck(backward, (x0, *kept, [11, 3, 11, 4], [5, len(flat[0])], 1))
