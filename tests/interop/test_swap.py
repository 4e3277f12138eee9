"""swap against the packages themselves: the same numbers, dtypes and errors; and the modules stay what they were."""

import copy
import io
import math
import pickle
import subprocess
import sys

import pytest
import torch
from peer_modules import (
    RANK_ONE,
    SAME_PRODUCTS,
    STAND_INS,
    cross,
    deepctr,
    deepctr_mixture,
    fuxictr,
    fuxictr_mixture,
    outputs_and_gradients,
    randomise,
    recbole_teacher,
    torchfm,
    torchrec,
    torchrec_mixture,
)
from snapshot import snapshot
from torch import nn

import fastcross
from fastcross.interop.swap import Swapped
from fastcross.ops import backends, multiplicative


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 8, 1), (0, 8, 2), (7, 34, 3), (64, 100, 6)], ids=str)
def test_outputs_and_gradients(build, shape, dtype):
    rows, d, num_layers = shape
    if build is recbole_teacher and rows == 0:
        pytest.skip("RecBole's own reshape takes no empty batch")
    torch.manual_seed(2)
    peer = randomise(build(d, num_layers), min(0.3, d**-0.5)).to(dtype)
    x, dy = torch.randn(rows, d).to(dtype), torch.randn(rows, d).to(dtype)
    exact = outputs_and_gradients(copy.deepcopy(peer).double(), x.double(), dy.double())
    theirs = outputs_and_gradients(peer, x, dy)
    assert fastcross.swap(peer).swapped or (dtype == torch.bfloat16 and build in SAME_PRODUCTS)
    ours = outputs_and_gradients(peer, x, dy)
    for name, value in exact.items():
        assert ours[name].dtype == theirs[name].dtype
        assert ours[name].shape == theirs[name].shape
        if value.numel() == 0:
            continue
        error, allowed = ((result[name].double() - value).abs().max() for result in (ours, theirs))
        # A few roundings, for where the package happens to be exact; in float64 its own result is the measure.
        roundings = 4 if build in RANK_ONE else 32  # sums over d of both signs, in an order of their own
        atol = (1e-12 if dtype == torch.float64 else roundings * torch.finfo(dtype).eps) * value.abs().max()
        assert error <= 2 * allowed + atol, f"{name}: {error:.3g} against {allowed:.3g}"


def test_it_is_the_operator_that_runs(build, monkeypatch):
    module = randomise(build(8, 2))
    x = torch.randn(4, 8)
    expected = cross(module)(x)
    fastcross.swap(module)
    formula, run, calls = type(module).peer.formula, cross(module), []
    operator = formula.operator
    monkeypatch.setitem(vars(formula), "operator", lambda *x, **w: calls.append(x) or operator(*x, **w))
    y = run(x)
    assert len(calls) == 1
    assert y.shape == expected.shape


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
    exact = cross(copy.deepcopy(module).double())(x.double())
    with torch.autocast("cpu", torch.bfloat16):
        try:
            theirs = cross(module)(x)
        except RuntimeError:  # torch.tensordot takes no mixed dtypes, even under autocast
            theirs = exact.float() + 1e-3 * exact.abs().max()
        fastcross.swap(module)
        ours = cross(module)(x)
    assert ours.dtype == theirs.dtype
    assert build in RANK_ONE or torch.equal(
        ours, theirs
    )  # the family's own operators would round x_l to half precision
    assert (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max()


@pytest.mark.parametrize("build", [deepctr_mixture, fuxictr_mixture])
def test_a_bare_squeeze_drops_a_dimension_of_one(build):
    for rows, d in ((1, 8), (5, 1), (1, 1)):
        network, x = randomise(build(d, 2)), torch.randn(rows, d)
        y = network(x)
        assert fastcross.swap(network).swapped
        assert network(x).shape == y.shape == tuple(n for n in (rows, d) if n > 1)
        torch.testing.assert_close(network(x), y)


ACTIVATIONS = {
    "relu": (torch.relu, nn.functional.relu, nn.ReLU()),
    "tanh": (torch.tanh, nn.functional.tanh, nn.Tanh()),
    None: (nn.Identity(),),
}


@pytest.mark.parametrize(("name", "activation"), [(name, f) for name, fs in ACTIVATIONS.items() for f in fs])
@pytest.mark.parametrize("experts", [1, 3])
@pytest.mark.parametrize("d", [8, 3456])  # sums of many small products: an activation must not look like none
def test_activations_of_torchrecs_mixture(name, activation, experts, d):
    layers = pytest.importorskip("torchrec.modules.crossnet")
    network = randomise(layers.LowRankMixtureCrossNet(d, 2, experts, 2, activation), d**-0.5)
    x = torch.randn(5, d)
    y = network(x)
    assert fastcross.swap(network).swapped
    assert type(network).peer.formula.options["activation"] == name
    torch.testing.assert_close(network(x), y)


def test_a_mixture_that_keeps_its_batch_of_one():
    """A version of the package without the bare squeeze() computes something else for one row."""
    network = fuxictr_mixture(8, 2)
    base = type(network)
    members = {"forward": lambda self, inputs: base.forward(self, inputs).view(inputs.shape)}
    network.__class__ = type(base.__name__, (base,), {"__module__": base.__module__, **members})
    assert "its output is (1, 8), not (8,)" in fastcross.swap(network).left[0].note


def test_the_teachers_own_attributes_and_three_dimensions():
    """KD_DAGFM reads its teacher's logits, and gives it (B, fields, d)."""
    network = randomise(recbole_teacher(8, 2))
    x = torch.randn(5, 2, 4)
    y, logits = network(x), network.logits
    assert fastcross.swap(network).swapped
    torch.testing.assert_close(network(x), y)
    torch.testing.assert_close(network.logits, logits)
    assert network.logits is not logits


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
    assert "L = 3, " in str(report)
    assert "d = 8" in str(report)
    assert f"C++, {backends.instruction_set()}" in str(report)
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
    if build in STAND_INS and clone is not copy.deepcopy:
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


def test_parts_of_a_network_are_not_networks_themselves():
    """FuxiCTR's layers are modules that EDCN uses alone: within a network they are swapped or left with it."""
    model = nn.Sequential(randomise(fuxictr(8, 2)), randomise(fuxictr(8, 2)))
    model[1].cross_net[0].weight.register_forward_hook(lambda *args: None)
    report = fastcross.swap(model)
    assert [entry.name for entry in report.swapped] == ["0"]
    assert [entry.name for entry in report.left] == ["1"]


def test_measures_a_copy():
    network = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(64), randomise(torchrec_mixture(64, 2)))
    x = torch.ones(512, 64)
    before, keys = snapshot(network, classes=False), list(network.state_dict())
    report = fastcross.swap(network, measure=x)
    assert snapshot(network, classes=False) == before
    assert list(network.state_dict()) == keys
    assert isinstance(network[2], Swapped)
    assert 0 < report.after < 10 * report.before
    assert "ms before" in str(report)
    again = fastcross.swap(network, measure=x)
    assert again.swapped == []
    assert again.before is None
    with pytest.raises(ValueError, match="got undo=True"):
        fastcross.swap(network, undo=True, measure=x)


def test_an_output_that_cannot_be_measured_changes_nothing():
    network, x = torchrec_mixture(8, 2).requires_grad_(False), torch.ones(4, 8)
    before = snapshot(network)
    with pytest.raises(ValueError, match="no tensor that can be differentiated"):
        fastcross.swap(network, measure=(x,))
    assert snapshot(network) == before


@pytest.mark.parametrize(
    ("to", "expected"),
    [(torch.float32, "C++, "), ("meta", "plain PyTorch: no kernel for torch.float32 on meta")],
)
def test_names_the_backend(build, to, expected):
    assert expected in fastcross.swap(build(8, 2).to(to)).swapped[0].note


def test_names_the_missing_library(build, monkeypatch):
    monkeypatch.setattr(backends, "_HAS_CPU", False)
    monkeypatch.setattr(backends, "_warn_of_missing_kernels", lambda: None)
    report = fastcross.swap(build(8, 2))
    assert "plain PyTorch: the C++ library is not built" in str(report)
    assert bool(report.left) == (build in SAME_PRODUCTS)


def test_what_gains_nothing_in_bfloat16_is_left(build):
    report = fastcross.swap(build(8, 2).to(torch.bfloat16))
    assert bool(report.left) == (build in SAME_PRODUCTS)
    if report.left:
        assert "nothing to gain in bfloat16" in report.left[0].note


def test_few_rows_run_the_packages_own_code_if_it_has_as_few_products(build, monkeypatch):
    monkeypatch.setattr(multiplicative, "SMALL", 640)
    module = randomise(build(8, 2))
    note, peer, calls = fastcross.swap(module).swapped[0].note, type(module).peer, []
    operator, run = peer.formula.operator, cross(module)
    monkeypatch.setitem(vars(peer.formula), "operator", lambda *x, **w: calls.append(x) or operator(*x, **w))
    least = math.ceil(640 / (peer.multiplications(module) or 640))
    for rows in (least - 1, least) if build in SAME_PRODUCTS else (1, 2):
        run(torch.randn(rows, 8))
    assert len(calls) == (1 if build in SAME_PRODUCTS else 2)
    assert (f"below {least} rows" in note) == (build in SAME_PRODUCTS)
    assert ("under autocast" in note) == (build not in RANK_ONE)


def test_no_package_is_imported():
    code = (
        "import sys, torch, fastcross; fastcross.swap(torch.nn.Linear(2, 2));"
        "peers = {'deepctr_torch', 'torchrec', 'fuxictr', 'torchfm', 'recbole', 'tzrec'};"
        "assert not peers & set(sys.modules), peers & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
