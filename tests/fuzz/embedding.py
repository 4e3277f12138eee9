"""Embedding stacks with random tables, bags and ids, against the reference; what does not fit is refused."""

import torch
from fuzz import draw, rule

from fastcross import reference
from fastcross.batch import Bag
from fastcross.ops.embedding import embedding_stack


def case(number, folder):
    rng = draw.start(number)
    rows, singles, bags = draw.rows(rng), rng.randint(0, 4), rng.choice((0, 0, 1, 2))
    num_dense = rng.choice((0, 1, rng.randint(1, 9))) if singles + bags else rng.randint(1, 9)
    dtype = rng.choice((torch.float32, torch.float64, torch.float32, torch.bfloat16))
    heights = [rng.choice((1, 2, rng.randint(1, 30), rng.randint(1, 3000))) for _ in range(singles + bags)]
    pooling, sparse = rng.choice(("mean", "sum")), rng.random() < 0.5
    tables = [_table(rng, height, dtype, sparse) for height in heights]
    dense = draw.Operand(rng, (rows, num_dense), torch.float32, name=None if rows and num_dense else "contiguous")
    ids = _ids(rng, rows, heights[:singles])
    given = [_bag(rng, rows, height) for height in heights[singles:]]
    backend = rng.choice(
        ("auto", "torch", "reference") if dtype == torch.bfloat16 else ("auto", "cpu", "torch", "reference")
    )
    if backend == "cpu" and any(not t.view(t.base).is_contiguous() or t.base.dtype != dtype for t in tables):
        backend = "auto"
    if rows and rng.random() < 0.1 and (problem := _damage(rng, ids, given, heights, singles)):
        return refused(problem, dense, ids, tables, given, pooling, backend)
    check(rng, dense, ids, tables, given, pooling, sparse, backend)
    return f"{backend}{' sparse' if sparse else ''}{' bags' if bags else ''}"


def _table(rng, height, dtype, sparse):
    """A view only where its gradient is dense: PyTorch has no sparse gradients of views."""
    other = torch.float64 if dtype == torch.float32 else torch.float32
    kind = dtype if rng.random() < 0.9 else other
    return draw.Operand(
        rng,
        (height, rng.choice((1, 2, rng.randint(1, 20)))),
        kind,
        name=None if rng.random() < 0.3 and not sparse else "contiguous",
    )


def _ids(rng, rows, heights):
    """(rows, k); some in int32, some a view."""
    columns = [torch.randint(0, height, (rows,)) for height in heights]
    ids = torch.stack(columns, 1) if columns else torch.empty(rows, 0, dtype=torch.int64)
    if rng.random() < 0.2:
        ids = ids.t().contiguous().t()
    return ids.int() if rng.random() < 0.2 else ids


def _bag(rng, rows, height):
    """Values, offsets, weights: empty bags anywhere, no rows, no values."""
    count = rng.choice((0, 1, rng.randint(0, 3 * rows + 1))) if rows else 0
    offsets = torch.randint(0, count + 1, (rows,)).sort().values
    offsets[:1] = 0
    weights = None
    if rng.random() < 0.4:
        weights = draw.Operand(rng, (count,), torch.float32, name="contiguous")
        weights.base = weights.base.abs() + 0.1  # so that no sum of weights cancels
    return torch.randint(0, height, (count,)), offsets, weights


def check(rng, dense, ids, tables, bags, pooling, sparse, backend):
    operands = [dense, *tables, *(bag[2] for bag in bags if bag[2] is not None)]
    leaves = [operand.leaf() for operand in operands]

    def call(function, tensors):
        views = [operand.view(t) for operand, t in zip(operands, tensors, strict=True)]
        weights = iter(views[1 + len(tables) :])
        given = [(values, offsets, None if w is None else next(weights)) for values, offsets, w in bags]
        return function(views[0], views[1 : 1 + len(tables)], given)

    x0 = call(
        lambda d, t, b: embedding_stack(d, ids, t, b, pooling=pooling, sparse_gradients=sparse, backend=backend), leaves
    )
    dy = draw.cotangent(rng, x0)
    differentiable = any(operand.needs_grad for operand in operands)
    found = [x0.detach(), *_gradients(x0, leaves, dy)] if differentiable else [x0.detach()]

    def of_reference(convert, dy, stack=reference.embedding_stack):
        tensors = [convert(operand.base).clone().requires_grad_(operand.needs_grad) for operand in operands]
        y = call(lambda d, t, b: stack(d, ids.long(), t, b, pooling), tensors)
        return [y.detach(), *_gradients(y, tensors, dy)] if differentiable else [y.detach()]

    exact = of_reference(lambda base: base.double(), dy.double())
    size = of_reference(lambda base: base.double().abs(), dy.double().abs(), _stack_of_shares)
    eager = of_reference(lambda base: base, dy)
    names = ["x0", *(f"gradient {i}" for i in range(len(operands)))][: len(found)]
    rule.compare(found, eager, exact, size, names, [operand.base.dtype for operand in operands])


def _stack_of_shares(dense, ids, tables, bags, pooling):
    """The reference with the sums that a mean divides by held constant: their derivative has the other sign, so what a
    weight's gradient is made of, g·row / Σ weight, would cancel where every sign is positive."""
    if pooling == "mean":
        bags = [(values, offsets, _shares(len(values), offsets, weights)) for values, offsets, weights in bags]
    return reference.embedding_stack(dense, ids, tables, bags, "sum")


def _shares(count, offsets, weights):
    weights = torch.ones(count, dtype=torch.float64) if weights is None else weights
    row = torch.searchsorted(offsets, torch.arange(count), right=True) - 1
    return weights / weights.new_zeros(len(offsets)).index_add(0, row, weights.detach())[row]


def _gradients(y, leaves, dy):
    if not y.requires_grad:  # nothing that is differentiated got into y, such as a table without an id
        return [torch.zeros_like(leaf) if leaf.requires_grad else None for leaf in leaves]
    needed = [leaf for leaf in leaves if leaf.requires_grad]
    found = iter(torch.autograd.grad(y, needed, dy, allow_unused=True))
    each = [next(found) if leaf.requires_grad else None for leaf in leaves]
    return [
        torch.zeros_like(leaf) if g is None and leaf.requires_grad else g if g is None else g.to_dense()
        for g, leaf in zip(each, leaves, strict=True)
    ]


def _damage(rng, ids, bags, heights, singles):
    """Makes one id or offset wrong; returns what."""
    kinds = (["id"] if singles else []) + (["value", "offset"] if bags else [])
    kind = rng.choice(kinds) if kinds else None
    wrong = rng.choice((-1, -(10**9), 10**9))
    if kind == "id":
        k = rng.randrange(singles)
        ids[rng.randrange(len(ids)), k] = rng.choice((heights[k], wrong))
    elif kind:
        values, offsets, _ = rng.choice(bags)
        if kind == "value" and len(values):
            values[rng.randrange(len(values))] = wrong
        elif kind == "value":
            return None
        else:
            offsets[rng.randrange(len(offsets))] = rng.choice((wrong, len(values) + 1))
    return kind


def refused(problem, dense, ids, tables, bags, pooling, backend):
    given = [Bag(values, offsets, None if w is None else w.view(w.leaf())) for values, offsets, w in bags]
    try:
        embedding_stack(
            dense.view(dense.leaf()), ids, [t.view(t.leaf()) for t in tables], given, pooling=pooling, backend=backend
        )
    except (ValueError, IndexError) as error:
        if not isinstance(error, ValueError) or "feature" not in str(error):
            raise AssertionError(f"a bad {problem}: the error does not name the feature: {error!r}") from error
        return f"refused a bad {problem}"
    raise AssertionError(f"a bad {problem} was taken")
