"""The lazy optimisers of tables against PyTorch's own, step by step; a state that does not fit changes nothing."""

import copy

import torch
from fuzz import draw, rule

from fastcross import optim


def case(number, folder):
    rng = draw.start(number)
    kind = rng.choice(("adam", "adam", "sgd", "clip", "misfit"))
    dtype = rng.choice((torch.float32, torch.float64))
    tables = [_table(rng, dtype) for _ in range(rng.randint(1, 4))]
    if kind == "clip":
        return clip(rng, tables)
    if kind == "misfit":
        return misfit(rng, tables)
    lr = rng.choice((0.001, 0.1))
    ours = (optim.RowAdam if kind == "adam" else optim.RowSGD)(tables, lr=lr)
    expected = [Rows(table, lr) for table in tables]
    for step in range(1, rng.randint(2, 7)):
        if rng.random() < 0.2:
            ours = _reloaded(ours, tables)
        for table in tables:
            table.grad = _gradient(rng, table) if rng.random() < 0.9 else None
        before = [table._version for table in tables]
        for table, each in zip(tables, expected, strict=True):
            getattr(each, kind)(table.grad, step)
        ours.step()
        for i, (table, each) in enumerate(zip(tables, expected, strict=True)):
            tolerance = 1e-5 if dtype == torch.float32 else 1e-12
            error = (table.detach().double() - each.values).abs().max()
            if not error <= tolerance * (1 + each.values.abs().max()):
                raise AssertionError(f"{kind}: table {i} is off by {error:.3g} after step {step}")
            named = 0 if table.grad is None else table.grad._nnz() if table.grad.is_sparse else len(table)
            if named and table._version == before[i]:
                raise AssertionError(f"{kind}: table {i} was changed and autograd was not told")
    return kind


class Rows:
    """A table in float64 whose rows are updated one by one, by the equations; steps without a gradient count."""

    def __init__(self, table, lr):
        self.values, self.lr = table.detach().double().clone(), lr
        self.m, self.v = torch.zeros_like(self.values), torch.zeros_like(self.values)

    def rows(self, gradient):
        if gradient is None:
            return []
        dense = gradient.detach().double().to_dense()
        named = gradient.coalesce().indices()[0].tolist() if gradient.is_sparse else range(len(dense))
        return [(row, dense[row]) for row in named]

    def adam(self, gradient, step):
        for row, g in self.rows(gradient):
            self.m[row] += (1 - 0.9) * (g - self.m[row])
            self.v[row] += (1 - 0.999) * (g * g - self.v[row])
            m, v = self.m[row] / (1 - 0.9**step), self.v[row] / (1 - 0.999**step)
            self.values[row] -= self.lr * m / (v.sqrt() + 1e-8)

    def sgd(self, gradient, step):
        for row, g in self.rows(gradient):
            self.values[row] -= self.lr * g


def _table(rng, dtype):
    shape = rng.choice((1, 2, rng.randint(1, 50), rng.randint(1, 2000))), rng.choice((1, 2, 16, rng.randint(1, 40)))
    return torch.nn.Parameter(torch.randn(shape, dtype=dtype))


def _gradient(rng, table, least=0):
    """Sparse, coalesced or with repeated rows, without rows, or dense."""
    if rng.random() < 0.15:
        return torch.randn_like(table)
    count = max(least, rng.choice((0, 1, 2, rng.randint(1, 100))))
    rows = torch.randint(0, table.shape[0], (count,))
    gradient = torch.sparse_coo_tensor(rows[None], torch.randn(count, table.shape[1], dtype=table.dtype), table.shape)
    return gradient.coalesce() if rng.random() < 0.6 else gradient


def _reloaded(optimiser, tables):
    fresh = type(optimiser)(tables, lr=99.0)
    fresh.load_state_dict(copy.deepcopy(optimiser.state_dict()))
    return fresh


def clip(rng, tables):
    """Over tables with sparse gradients and others, as PyTorch's function does it with dense ones."""
    model = torch.nn.ParameterList(tables)
    dense, sizes = [table.detach().clone().requires_grad_() for table in tables], []
    for table, other in zip(tables, dense, strict=True):
        table.grad = _gradient(rng, table)
        other.grad = table.grad.to_dense().clone()
        sizes.append(_size(table.grad))
    limit = rng.choice((1e-3, 1.0, 1e6))
    norm, expected = optim.clip_grad_norm(model, limit), torch.nn.utils.clip_grad_norm_(dense, limit)
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=1e-8)
    for table, other, size in zip(tables, dense, sizes, strict=True):
        atol = rule.ULPS * torch.finfo(table.dtype).eps * size * min(1.0, limit / max(float(expected), 1e-30))
        torch.testing.assert_close(table.grad.to_dense(), other.grad, rtol=1e-5, atol=atol)
    return "clip"


def _size(gradient):
    """What the roundings of a row's sum are relative to: the same sum with all signs positive."""
    if not gradient.is_sparse:
        return float(gradient.abs().max())
    absolute = torch.sparse_coo_tensor(gradient._indices(), gradient._values().abs(), gradient.shape)
    return float(absolute.to_dense().max())


def misfit(rng, tables):
    """A moment or a gradient that does not fit: an error before anything is written."""
    optimiser = optim.RowAdam(tables)
    for table in tables:
        table.grad = _gradient(rng, table, least=1)
    optimiser.step()
    table, kind = rng.choice(tables), rng.choice(("moment", "replaced", "gradient", "state"))
    height, width = table.shape
    if kind == "moment":
        moment = torch.zeros(
            rng.choice(((height + 1, width), (max(0, height - 1), width), (height, width + 1))), dtype=table.dtype
        )
        optimiser.state[table][rng.choice(("exp_avg", "exp_avg_sq"))] = moment
    elif kind == "replaced":
        table.data = torch.randn(height + rng.randint(1, 9), width, dtype=table.dtype)
        table.grad = _gradient(rng, table, least=1)
    elif kind == "gradient":
        table.grad = None
        wrong = torch.randint(height, height + 5, (1, 3))
        table.grad = torch.sparse_coo_tensor(
            wrong, torch.randn(3, width, dtype=table.dtype), (height, width), check_invariants=False
        )
    before = [t.detach().clone() for t in tables]
    states = copy.deepcopy(optimiser.state_dict())
    try:
        if kind == "state":
            other = optim.RowAdam(
                [torch.randn(t.shape[0] + 1, t.shape[1], dtype=t.dtype).requires_grad_() for t in tables]
            )
            for t in other.param_groups[0]["params"]:
                t.grad = _gradient(rng, t, least=1)
            other.step()
            optimiser.load_state_dict(other.state_dict())
        else:
            optimiser.step()
    except (ValueError, IndexError):
        if not all(torch.equal(a, t.detach()) for a, t in zip(before, tables, strict=True)):
            raise AssertionError(f"{kind}: refused, but a table was changed") from None
        if str(optimiser.state_dict()) != str(states):
            raise AssertionError(f"{kind}: refused, but the state was changed") from None
        return f"refused a misfitting {kind}"
    raise AssertionError(f"a misfitting {kind} was taken")
