"""The optimisers' state: what does not fit its tables or lies oddly in memory; copies step as the original does."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from fastcross import optim
from fastcross.layers.embedding import EmbeddingStack
from fastcross.ops import backends

HIGH = 200_000  # rows: an address past the end of a table of 10 rows is then outside of the process's memory


def take_plain_operators(monkeypatch):
    monkeypatch.setattr(backends, "choose", lambda *_: "torch")


def sparse(rows, height=10, width=4, **options):
    values = torch.ones(len(rows), width)
    return torch.sparse_coo_tensor(torch.tensor([rows]), values, (height, width), check_invariants=False, **options)


def stepped(kind=optim.RowAdam, height=10):
    """A table and its optimiser after a step."""
    table = nn.Parameter(torch.arange(4.0 * height).view(height, 4))
    optimizer = kind([table])
    table.grad = sparse([1, 3], height)
    optimizer.step()
    return table, optimizer


def snapshot(optimizer):
    state = [value.clone() for state in optimizer.state.values() for value in state.values()]
    tables = [table.detach().clone() for group in optimizer.param_groups for table in group["params"]]
    return [*state, *tables], [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def assert_declines(optimizer, message, act=None):
    before, groups = snapshot(optimizer)
    with pytest.raises(ValueError, match=message):
        (act or optimizer.step)()
    after, groups_after = snapshot(optimizer)
    assert groups == groups_after
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


FITTING = r"must be like its table, \({0}\) torch.float32 on cpu; got \({1}\) torch.float32 on cpu"


@pytest.mark.parametrize(
    ("shape", "rows"), [((HIGH, 4), range(0, HIGH, 3)), ((10, HIGH), [3, 9]), ((2, 4), [1])], ids=["h", "w", "smaller"]
)
def test_replaced_table_needs_a_new_optimizer(shape, rows):
    table, optimizer = stepped()
    table.grad = None
    table.data = torch.ones(shape)
    table.grad = sparse(list(rows), *shape)
    assert_declines(optimizer, "exp_avg " + FITTING.format(f"{shape[0]}, {shape[1]}", "10, 4"))
    fresh = optim.RowAdam([table])
    fresh.step()
    assert bool((table[rows[0]] < 1).all())


def test_state_of_another_table():
    _, small = stepped()
    table, optimizer = stepped(height=HIGH)
    expected = "exp_avg " + FITTING.format(f"{HIGH}, 4", "10, 4")
    assert_declines(optimizer, expected, lambda: optimizer.load_state_dict(small.state_dict()))
    both = optim.Optimizer([optimizer, stepped()[1]])
    states = [stepped(height=HIGH)[1].state_dict(), optimizer.state_dict()]
    before = optimizer.state[table]["exp_avg"]
    with pytest.raises(ValueError, match=FITTING.format("10, 4", f"{HIGH}, 4")):
        both.load_state_dict({"parts": states})
    assert both.parts[0].state[table]["exp_avg"] is before  # the first part fitted, and was given back
    assert both.param_groups[0] is both.parts[0].param_groups[0]


@pytest.mark.parametrize(
    ("moment", "found"),
    [
        (torch.zeros(10, 4, dtype=torch.float64), r"\(10, 4\) torch.float64 on cpu"),
        (torch.zeros(10, 4, dtype=torch.float16), r"\(10, 4\) torch.float16 on cpu"),
        (torch.zeros(10, 4, device="meta"), r"\(10, 4\) torch.float32 on meta"),
        (torch.zeros(40), r"\(40,\) torch.float32 on cpu"),
        (0.0, "0.0"),
    ],
    ids=str,
)
def test_moments_of_another_kind(moment, found):
    for name in ("exp_avg", "exp_avg_sq"):
        table, optimizer = stepped()
        table.grad = sparse([1, 3])
        optimizer.state[table][name] = moment
        with pytest.raises(ValueError, match=f"{name} must be like its table, .* got {found}"):
            optimizer.step()


def test_missing_moment():
    table, optimizer = stepped()
    del optimizer.state[table]["exp_avg_sq"]
    with pytest.raises(ValueError, match=r"exp_avg_sq must be like its table, .* got None"):
        optimizer.step()


@pytest.mark.parametrize("form", ["expanded", "transposed", "strided"])
def test_moments_of_any_stride_work(form):
    expected, reference = stepped(height=HIGH)
    table, optimizer = stepped(height=HIGH)
    for name in ("exp_avg", "exp_avg_sq"):
        if form == "expanded":
            for each, rows in ((optimizer, torch.zeros(1, 4).expand(HIGH, 4)), (reference, torch.zeros(HIGH, 4))):
                each.state[each.param_groups[0]["params"][0]][name] = rows
        else:
            moment = optimizer.state[table][name]
            wide = torch.zeros(HIGH, 8)
            wide[:, ::2] = moment
            optimizer.state[table][name] = wide[:, ::2] if form == "strided" else moment.T.contiguous().T
    for each, of in ((table, optimizer), (expected, reference)):
        each.grad = sparse(list(range(0, HIGH, 3)), HIGH)
        of.step()
    assert torch.equal(table, expected)


@pytest.mark.parametrize("kind", [optim.RowAdam, optim.RowSGD])
@pytest.mark.parametrize("rows", [[-1, 3], [1, 10], [10**8, 2], [3, -(10**8)]], ids=str)
def test_gradient_of_rows_that_are_not_there(kind, rows):
    table, optimizer = stepped(kind)
    for flag in (False, True):
        table.grad = sparse(rows, is_coalesced=flag)
        bad = next(row for row in rows if not 0 <= row < 10)
        assert_declines(optimizer, f"a gradient must name rows 0 to 9 of its table; got row {bad}")


@pytest.mark.parametrize("kind", [optim.RowAdam, optim.RowSGD])
def test_gradient_of_another_kind(kind):
    table, optimizer = stepped(kind)
    table.data = torch.ones(5, 4)  # the gradient in .grad is still one of 10 rows
    with pytest.raises(ValueError, match=r"gradient must be like its table, \(5, 4\) .* got \(10, 4\)"):
        optimizer.step()
    table, optimizer = stepped(kind)
    table.grad = torch.ones(10, 4).to_sparse()
    assert_declines(optimizer, r"must have whole rows, one sparse dimension; got 2 of \(10, 4\)")
    other = nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    with pytest.raises(ValueError, match=r"like its table, \(3,\)"):
        kind([other]).step()


@pytest.mark.parametrize("kind", [optim.RowAdam, optim.RowSGD])
@pytest.mark.parametrize("kernels", [True, False])
def test_one_bad_gradient_changes_no_other_table(kind, kernels, monkeypatch):
    if not kernels:
        take_plain_operators(monkeypatch)
    tables = [nn.Parameter(torch.ones(10, 4)) for _ in range(3)]
    optimizer = kind([{"params": tables[:2]}, {"params": tables[2:]}])
    for table in tables:
        table.grad = sparse([1, 3])
    optimizer.step()
    tables[2].grad = sparse([1, 11])
    assert_declines(optimizer, "got row 11")


@pytest.mark.parametrize("kind", [optim.RowAdam, optim.RowSGD])
@pytest.mark.parametrize("rows", [[], [3, 3, 1], [9, 0]], ids=str)
@pytest.mark.parametrize("flag", [False, True])
def test_rows_in_any_order_or_none(kind, rows, flag):
    """Also where they carry PyTorch's mark for distinct rows, wrongly."""
    results = []
    for dense in (False, True):
        table = nn.Parameter(torch.ones(10, 4))
        table.grad = sparse(rows, is_coalesced=False).to_dense() if dense else sparse(rows, is_coalesced=flag)
        kind([table], lr=0.1).step()
        results.append(table.detach())
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("kind", [optim.RowAdam, optim.RowSGD])
@pytest.mark.parametrize("form", ["rows of a wider one", "transposed", "half"])
def test_tables_of_any_stride_and_half_precision(kind, form):
    def make(values):
        if form == "half":
            return nn.Parameter(values.half())
        if form == "transposed":
            return nn.Parameter(values.T.contiguous().T)
        wide = torch.zeros(10, 9)
        wide[:, 2:6] = values
        return nn.Parameter(wide[:, 2:6])

    torch.manual_seed(0)
    values = torch.randn(10, 4)
    table, plain = make(values), nn.Parameter(values.clone())
    for each in (table, plain):
        each.grad = sparse([1, 3]).to(each.dtype)
        kind([each], lr=0.5).step()
    tolerance = 2e-3 if form == "half" else 1e-6
    torch.testing.assert_close(table.float(), plain, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", [optim.RowAdam, optim.RowSGD])
def test_a_step_is_an_in_place_change_to_autograd(kind):
    table, optimizer = stepped(kind)
    y = (table * table).sum()
    table.grad = sparse([1])
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("kind", [optim.RowAdam, optim.RowSGD])
def test_closure_is_called(kind):
    table, optimizer = stepped(kind)
    before = table.detach().clone()

    def closure():
        optimizer.zero_grad()
        loss = table.square().sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) == float(before.square().sum())
    assert not torch.equal(table, before)


def test_bad_hyperparameters():
    table = nn.Parameter(torch.ones(2, 2))
    for options in ({"lr": -1.0}, {"eps": -1.0}, {"betas": (0.9, 1.0)}, {"lr": float("nan")}):
        with pytest.raises(ValueError, match=r"lr and eps must be at least 0 and betas in \[0, 1\)"):
            optim.RowAdam([table], **options)
    with pytest.raises(ValueError, match="lr must be at least 0; got -1"):
        optim.RowSGD([table], lr=-1.0)


def test_clipping_a_gradient_of_rows_that_are_not_there():
    table, _ = stepped()
    for rows in ([3, -1, 3], [1, 10], [10**12, 2]):
        table.grad = sparse(rows, is_coalesced=False)
        with pytest.raises(ValueError, match="a gradient must name rows 0 to 9 of its table; got row"):
            optim.clip_grad_norm(nn.ParameterList([table]), 1.0)


def save_and_load(pair):
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {"deepcopy": copy.deepcopy, "pickle": lambda pair: pickle.loads(pickle.dumps(pair)), "torch": save_and_load}
COPIED = pytest.mark.parametrize("way", WAYS)


def make(name, **options):
    torch.manual_seed(0)
    stack = EmbeddingStack([9, 30], 2, [3, 4])
    model = nn.ModuleDict({"stack": stack, "layer": nn.Linear(stack.out_features, 1)})
    return model, optim.configure(model, lr=0.05, name=name, **options)


def train(model, optimizer, first, steps=3):
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        ids = torch.stack([torch.randint(0, n, (8,), generator=generator) for n in (9, 30)], 1)
        optimizer.zero_grad()
        model["layer"](model["stack"](torch.randn(8, 2, generator=generator), ids)).square().sum().backward()
        optimizer.clip_grad_norm(1.0)
        optimizer.step()


def assert_same(model, other):
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert p is not q
        assert torch.equal(p, q)


@COPIED
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("name", optim.OPTIMIZERS)
def test_a_copy_steps_as_the_original(name, capturable, way):
    if capturable and "adagrad" in name:
        pytest.skip("PyTorch's is not captured")
    model, optimizer = make(name, capturable=capturable, backend="torch")
    train(model, optimizer, 0)
    other, copied = WAYS[way]((model, optimizer))
    assert [type(part) for part in copied.parts] == [type(part) for part in optimizer.parts]
    groups = [group for part in copied.parts for group in part.param_groups]
    assert [id(group) for group in copied.param_groups] == [id(group) for group in groups]
    rows = copied.parts[-1]
    assert (rows.backend, rows.capturable) == ("torch", capturable)
    for each, of in ((optimizer, model), (copied, other)):
        each.set_lr(0.02)
        train(of, each, 3)
    assert_same(model, other)
    assert str(copied.state_dict()) == str(optimizer.state_dict())
    with pytest.raises(ValueError, match="make a new optimiser"):
        copied.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


@COPIED
@pytest.mark.parametrize("row_wise", [False, True])
def test_row_wise_sums_stay_row_wise(row_wise, way):
    table = nn.Parameter(torch.ones(4, 3))
    optimizer = optim.RowAdagrad([table], lr=0.1, row_wise=row_wise, backend="torch")
    for step in range(2):
        table.grad = torch.ones(4, 3)
        optimizer.step()
        if step == 0:
            optimizer = WAYS[way](optimizer)
            (table,) = optimizer.param_groups[0]["params"]
    assert optimizer.state[table]["sum"].shape == ((4,) if row_wise else (4, 3))
    assert optimizer.backend == "torch"


@COPIED
def test_a_group_that_is_added_to_a_copy_is_on_the_device_too(way):
    optimizer = WAYS[way](optim.RowSGD([nn.Parameter(torch.ones(4, 3))], lr=0.1, capturable=True))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 3))], "lr": 0.5})
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.1, 0.5])
    assert all(isinstance(group["lr"], torch.Tensor) for group in optimizer.param_groups)


def test_every_option_of_every_optimiser_is_kept():
    """Whatever else an instance has is PyTorch's own, or would be lost."""
    model, _ = make("adam")
    own = vars(torch.optim.SGD([nn.Parameter(torch.ones(1))])).keys()
    for name in optim.OPTIMIZERS:
        optimizer = optim.configure(model, name=name)
        for each in (optimizer, *optimizer.parts[1:]):
            assert vars(each).keys() <= own | each.__getstate__().keys()
            assert vars(copy.deepcopy(each)).keys() >= vars(each).keys() - own


def test_a_scheduler_of_a_copy():
    """A scheduler replaces step() of the optimiser that it is given; the copy has its own."""
    model, optimizer = make("sgd")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    other, copied = copy.deepcopy((model, optimizer))
    train(other, copied, 0)
    train(model, optimizer, 0)
    assert_same(model, other)
    scheduler.step()
    assert {group["lr"] for group in copied.param_groups} == {0.05}
    assert {group["lr"] for group in optimizer.param_groups} == {0.025}


def test_a_sharded_optimiser_refuses():
    """Its parts are bound to processes and to fbgemm's tables."""
    sharded = pytest.importorskip("fastcross.distributed.model", exc_type=ImportError)
    optimizer = sharded.ShardedOptimizer([optim.RowSGD([nn.Parameter(torch.ones(2, 2))])], None)
    with pytest.raises(TypeError, match=r"not to be copied or pickled; its state_dict\(\) is"):
        copy.deepcopy(optimizer)
