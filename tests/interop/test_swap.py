"""swap against the packages themselves: the same numbers, dtypes and errors; and the modules stay what they were."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from peer_modules import cross, deepctr, outputs_and_gradients, peer_of, randomise, torchfm, torchrec, tzrec

import fastcross
from fastcross import reference
from fastcross.interop.swap import Swapped
from fastcross.layers.peers import VECTOR


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 8, 1), (0, 8, 2), (7, 34, 3), (64, 100, 6)], ids=str)
def test_outputs_and_gradients(build, shape, dtype):
    rows, d, num_layers = shape
    torch.manual_seed(2)
    peer = randomise(build(d, num_layers), 0.3).to(dtype)
    x, dy = torch.randn(rows, d).to(dtype), torch.randn(rows, d).to(dtype)
    exact = outputs_and_gradients(copy.deepcopy(peer).double(), x.double(), dy.double())
    theirs = outputs_and_gradients(peer, x, dy)
    assert fastcross.swap(peer).swapped
    ours = outputs_and_gradients(peer, x, dy)
    for name, value in exact.items():
        assert ours[name].dtype == theirs[name].dtype
        assert ours[name].shape == theirs[name].shape
        if value.numel() == 0:
            continue
        error, allowed = ((result[name].double() - value).abs().max() for result in (ours, theirs))
        # A few roundings, for where the package happens to be exact; in float64 its own result is the measure.
        atol = (1e-12 if dtype == torch.float64 else 4 * torch.finfo(dtype).eps) * value.abs().max()
        assert error <= 2 * allowed + atol, f"{name}: {error:.3g} against {allowed:.3g}"


def test_it_is_the_operator_that_runs(build, monkeypatch):
    module = randomise(build(8, 2))
    fastcross.swap(module)
    calls = []
    monkeypatch.setitem(vars(VECTOR), "operator", lambda *x, **w: calls.append(x) or fastcross.cross_network(*x, **w))
    y = cross(module)(torch.randn(4, 8))
    assert len(calls) == 1
    assert y.shape == (4, 8)


def test_what_the_operator_does_not_take_is_the_packages_own(build):
    module = randomise(build(8, 2))
    swapped = copy.deepcopy(module)
    fastcross.swap(swapped)
    for x in (torch.randn(2, 7), torch.randn(2, 8).double(), torch.ones(2, 8, dtype=torch.int64), torch.randn(8, 8, 8)):
        results = []
        for each in (module, swapped):
            try:
                results.append(cross(each)(x))
            except Exception as error:
                results.append(f"{type(error).__name__}: {error}")
        if isinstance(results[0], str):
            assert results[0] == results[1]
        else:
            torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_returns_the_packages_dtype(build, dtype):
    module = randomise(build(16, 3), 0.1)
    torch.manual_seed(2)
    x = torch.randn(32, 16).to(dtype)
    exact = reference.cross_network(x.double(), *(t.double() for t in peer_of(module).parameters(module).values()))
    with torch.autocast("cpu", torch.bfloat16):
        try:
            theirs = cross(module)(x)
        except RuntimeError:  # torch.tensordot takes no mixed dtypes, even under autocast
            theirs = exact.float() + 1e-3 * exact.abs().max()
        fastcross.swap(module)
        ours = cross(module)(x)
    assert ours.dtype == theirs.dtype == torch.float32
    assert (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max()


def test_keyword_argument_and_signature():
    module = randomise(torchrec(8, 2))
    x = torch.randn(3, 8)
    y = module(x)
    fastcross.swap(module)
    torch.testing.assert_close(module(input=x), y)
    with pytest.raises(TypeError, match="unexpected keyword"):
        module(x0=x)


def test_torchscript_and_fx_record_the_packages_own_code():
    module = randomise(torchrec(3, 2))
    x = torch.randn(2, 3)
    fastcross.swap(module)
    graph = torch.fx.GraphModule(module, torch.fx.Tracer().trace(module))
    torch.testing.assert_close(torch.jit.script(graph)(x), module(x))
    torch.testing.assert_close(torch.jit.trace(module, x)(x), module(x))
    scripted = torch.jit.script(deepctr(3, 2))
    assert "TorchScript" in fastcross.swap(scripted).left[0].note


def test_torchrecs_published_numbers():
    """What TorchRec's own unit test of VectorCrossNet expects, from the same seed."""
    torch.manual_seed(0)
    x = torch.randn(3, 2)
    module = torchrec(2, 20)
    fastcross.swap(module)
    expected = torch.tensor([[1.8289e-04, -3.4827e-05], [-2.2084e02, 5.7615e01], [-1.3328e02, -1.7187e02]])
    torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-4)


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
