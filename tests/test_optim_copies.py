"""Copies and pickles of optimisers: a step of the copy is a step of the original."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from fastcross import optim
from fastcross.layers.embedding import EmbeddingStack


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
    sharded = pytest.importorskip("fastcross.distributed.optim", exc_type=ImportError)
    optimizer = sharded.ShardedOptimizer([optim.RowSGD([nn.Parameter(torch.ones(2, 2))])], None)
    with pytest.raises(TypeError, match=r"not to be copied or pickled; its state_dict\(\) is"):
        copy.deepcopy(optimizer)
