"""A swapped module stays the object it was: same parameters, same keys, same files, and back."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from peer_modules import cross, randomise, torchfm, tzrec

import fastcross
from fastcross.interop.swap import Swapped


def test_same_parameters_same_keys_and_back(build):
    module = build(8, 3)
    cls, keys, parameters = type(module), list(module.state_dict()), list(module.parameters())
    report = fastcross.swap(module)
    assert len(report.swapped) == 1
    assert report.left == []
    assert "L = 3, d = 8" in str(report)
    assert isinstance(module, cls)
    assert isinstance(module, Swapped)
    assert list(module.state_dict()) == keys
    assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
    assert "on fastcross" in module.extra_repr()
    assert fastcross.swap(module).left[0].note == "already swapped"
    assert len(fastcross.swap(module, undo=True).restored) == 1
    assert type(module) is cls
    assert fastcross.swap(module, undo=True).restored == []


def test_checkpoints_load_both_ways(build):
    theirs, ours = randomise(build(8, 3)), build(8, 3)
    fastcross.swap(ours)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(5, 8)
    torch.testing.assert_close(cross(ours)(x), cross(theirs)(x))
    fresh = build(8, 3)
    fresh.load_state_dict(ours.state_dict())
    torch.testing.assert_close(cross(fresh)(x), cross(theirs)(x))


@pytest.mark.parametrize(
    "clone",
    [
        copy.deepcopy,
        lambda module: pickle.loads(pickle.dumps(module)),
        lambda module: pickle.loads(pickle.dumps(module, protocol=0)),
        lambda module: torch.load(_saved(module), weights_only=False),
    ],
    ids=["deepcopy", "pickle", "pickle0", "save"],
)
def test_copies_stay_swapped(build, clone):
    if build is tzrec and clone is not copy.deepcopy:
        pytest.skip("pickle finds a class by its path, and this stand-in is not at its own")
    module = randomise(build(8, 2))
    fastcross.swap(module)
    copied = clone(module)
    assert isinstance(copied, Swapped)
    assert next(copied.parameters()) is not next(module.parameters())
    x = torch.randn(3, 8)
    assert torch.equal(cross(copied)(x), cross(module)(x))
    fastcross.swap(copied, undo=True)
    assert isinstance(module, Swapped)
    assert not isinstance(copied, Swapped)


def _saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return file


def test_moves_and_hooks():
    module = randomise(torchfm(8, 2))
    seen = []
    module.register_forward_hook(lambda *args: seen.append("forward"))
    module.register_full_backward_hook(lambda *args: seen.append("backward"))
    fastcross.swap(module)
    module.double()(torch.randn(3, 8, dtype=torch.float64, requires_grad=True)).sum().backward()
    assert seen == ["forward", "backward"]
    assert module.b[0].grad.dtype == torch.float64


def test_a_subclass_that_keeps_the_code_is_swapped():
    base = type(torchfm(8, 2))
    mine = type("Mine", (base,), {"name": "mine"})(8, 2)
    assert fastcross.swap(mine).swapped
    assert mine.name == "mine"


def test_no_package_is_imported():
    code = (
        "import sys, torch, fastcross; fastcross.swap(torch.nn.Linear(2, 2));"
        "peers = {'deepctr_torch', 'torchrec', 'fuxictr', 'torchfm', 'recbole', 'tzrec'};"
        "assert not peers & set(sys.modules), peers & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
