"""swap against the packages themselves: same numbers, same objects, same files.

Each package is a `pip install --no-deps -r requirements-peers.txt` away; a test whose package is missing is skipped.
"""

import copy
import io
import pickle
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fastcross
from fastcross import reference
from fastcross.interop.peers import PEERS, recognise
from fastcross.interop.swap import Swapped


def deepctr(d, num_layers):
    return pytest.importorskip("deepctr_torch.layers.interaction").CrossNet(d, num_layers)


def torchrec(d, num_layers):
    return pytest.importorskip("torchrec.modules.crossnet").VectorCrossNet(d, num_layers)


def fuxictr(d, num_layers):
    return pytest.importorskip("fuxictr.pytorch.layers.interactions.cross_net").CrossNet(d, num_layers)


def torchfm(d, num_layers):
    return pytest.importorskip("torchfm.layer").CrossNetwork(d, num_layers)


class Cross(nn.Module):
    """TorchEasyRec is not on PyPI: a class with the name, the parameters and the formula of its cross network."""

    __module__ = "tzrec.modules.interaction"

    def __init__(self, input_dim, cross_num=3):
        super().__init__()
        self.cross_num = cross_num
        self.w = nn.ModuleList(nn.Linear(input_dim, 1, bias=False) for _ in range(cross_num))
        self.b = nn.ParameterList(nn.Parameter(torch.zeros(input_dim)) for _ in range(cross_num))

    def forward(self, x):
        y = x
        for weight, bias in zip(self.w, self.b, strict=True):
            y = y + x * weight(y) + bias
        return y


def tzrec(d, num_layers):
    return Cross(d, num_layers)


def recbole(d, num_layers):
    """RecBole's whole model; its own Config does not run on NumPy 2, so a dict and a two-field dataset stand in."""
    dcn = pytest.importorskip("recbole.model.context_aware_recommender.dcn")
    token = pytest.importorskip("recbole.utils").FeatureType.TOKEN
    fields = ["user", "item"]
    dataset = SimpleNamespace(
        fields=lambda source: fields, field2type=dict.fromkeys(fields, token), num=lambda field: 50
    )
    config = {"LABEL_FIELD": "label", "embedding_size": d // 2, "device": "cpu", "double_tower": None}
    config |= {"numerical_features": [], "mlp_hidden_size": [8], "cross_layer_num": num_layers}
    return dcn.DCN(config | {"reg_weight": 0.1, "dropout_prob": 0.0}, dataset)


BUILDERS = (deepctr, torchrec, fuxictr, torchfm, tzrec, recbole)


@pytest.fixture(params=BUILDERS, ids=lambda build: build.__name__)
def build(request):
    return request.param


def randomise(module, scale=0.4):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return module


def cross(module):
    """The module's cross network as a function: RecBole's is a method of the model."""
    return getattr(module, PEERS[peer_path(module)].method) if not isinstance(module, nn.Sequential) else module


def peer_path(module):
    return next(path for cls in type(module).__mro__ if (path := f"{cls.__module__}.{cls.__qualname__}") in PEERS)


def cross_parameters(module):
    num_layers = len(PEERS[peer_path(module)].parameters(module)[0])
    names = PEERS[peer_path(module)].keys(num_layers)
    return {name: module.get_parameter(name) for name in names}


def outputs_and_gradients(module, x, dy):
    x = x.clone().requires_grad_()
    y = cross(module)(x)
    parameters = cross_parameters(module)
    grads = torch.autograd.grad(y, [x, *parameters.values()], dy.to(y.dtype))
    return dict(zip(["y", "dx0", *parameters], [y.detach(), *grads], strict=True))


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
    own = fastcross.swap.__globals__["cross_network"]
    monkeypatch.setitem(fastcross.swap.__globals__, "cross_network", lambda *args: calls.append(args) or own(*args))
    y = cross(module)(torch.randn(4, 8))
    assert len(calls) == 1
    assert y.shape == (4, 8)


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


def test_anywhere_in_a_model_and_what_is_left():
    interactions = pytest.importorskip("fuxictr.pytorch.layers.interactions.cross_net")
    crossnet = pytest.importorskip("torchrec.modules.crossnet")
    deepctr_layers = pytest.importorskip("deepctr_torch.layers.interaction")
    model = nn.ModuleDict(
        {
            "loss": nn.CrossEntropyLoss(),
            "native": fastcross.CrossNetwork(4, 2),
            "nested": nn.Sequential(nn.Linear(4, 4), nn.Sequential(torchfm(4, 2), fuxictr(4, 1))),
            "matrix": deepctr_layers.CrossNet(4, 2, parameterization="matrix"),
            "matrix1": deepctr_layers.CrossNet(1, 2, parameterization="matrix"),
            "full": crossnet.CrossNet(4, 2),
            "low": crossnet.LowRankCrossNet(4, 2),
            "mixture": crossnet.LowRankMixtureCrossNet(4, 2),
            "experts": deepctr_layers.CrossNetMix(4),
            "v2": interactions.CrossNetV2(4, 2),
        }
    )
    report = fastcross.swap(model)
    assert [entry.name for entry in report.swapped] == ["nested.1.0", "nested.1.1"]
    notes = {entry.name: entry.note for entry in report.left}
    assert list(notes) == ["matrix", "matrix1", "full", "low", "mixture", "experts", "v2"]
    assert all("matrices" in notes[name] for name in ("matrix", "full", "low", "v2"))
    assert "does not compute" in notes["matrix1"]
    assert all("mixture" in notes[name] for name in ("mixture", "experts"))
    assert "left mixture (torchrec.modules.crossnet.LowRankMixtureCrossNet): mixture" in str(report)


def test_nothing_to_swap():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    classes = [type(module) for module in model.modules()]
    report = fastcross.swap(model)
    assert report.swapped == report.left == []
    assert str(report).startswith("nothing to do")
    assert [type(module) for module in model.modules()] == classes
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module; got dict"):
        fastcross.swap({})


def _other_version(module):
    """Adds the bias inside the product, as the second version of the paper does; with zero biases one cannot tell."""

    class VectorCrossNet(nn.Module):
        __module__, __qualname__ = "torchrec.modules.crossnet", "VectorCrossNet"

        def __init__(self):
            super().__init__()
            self.kernels, self.bias = module.kernels, module.bias

        def forward(self, x):
            y = x
            for kernel, bias in zip(self.kernels, self.bias, strict=True):
                y = y + x * (y @ kernel + bias.T)
            return y

    return VectorCrossNet()


def _own_forward(module):
    module.forward = lambda x: x
    return module


def _subclass(module):
    module.__class__ = type("Mine", (type(module),), {"forward": lambda self, x: x, "__module__": "mine"})
    return module


def _other_shape(module):
    module.bias[0] = nn.Parameter(torch.zeros(7, 1))
    return module


def _missing_layer(module):
    del module.kernels
    return module


def _extra_parameter(module):
    module.gate = nn.Parameter(torch.ones(1))
    return module


def _one_layer_more(module):
    module._num_layers += 1
    return module


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_other_version, "does not compute"),
        (_own_forward, "this instance has its own forward"),
        (_subclass, "mine.Mine has its own forward"),
        (_other_shape, "unexpected parameters"),
        (_missing_layer, "unexpected parameters: .*kernels"),
        (_extra_parameter, "unexpected parameters: gate"),
        (_one_layer_more, "its own code failed on a small input"),
    ],
)
def test_unexpected_versions_are_left(change, reason):
    module = change(torchrec(8, 3))
    cls, state = type(module), torch.random.get_rng_state()
    report = fastcross.swap(nn.Sequential(module))
    assert report.swapped == []
    assert report.left[0].name == "0"
    assert re.search(reason, report.left[0].note), report.left[0].note
    assert type(module) is cls
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_hook_on_a_part_is_not_lost():
    module = torchfm(8, 2)
    module.w[1].register_forward_hook(lambda *args: None)
    assert "hook" in fastcross.swap(module).left[0].note


def test_no_layers():
    assert "unexpected" in fastcross.swap(deepctr(8, 0)).left[0].note
    assert "unexpected" in fastcross.swap(torchfm(8, 0)).left[0].note


def test_a_subclass_that_keeps_the_code_is_swapped():
    base = type(torchfm(8, 2))
    mine = type("Mine", (base,), {"name": "mine"})(8, 2)
    assert fastcross.swap(mine).swapped
    assert mine.name == "mine"


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
    exact = reference.cross_network(x.double(), *(t.double() for t in PEERS[peer_path(module)].parameters(module)))
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


def test_no_package_is_imported():
    code = (
        "import sys, torch, fastcross; fastcross.swap(torch.nn.Linear(2, 2));"
        "peers = {'deepctr_torch', 'torchrec', 'fuxictr', 'torchfm', 'recbole', 'tzrec'};"
        "assert not peers & set(sys.modules), peers & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_from_module(build):
    module = randomise(build(8, 3))
    native = fastcross.CrossNetwork.from_module(module)
    x = torch.randn(5, 8)
    torch.testing.assert_close(native(x), cross(module)(x))
    native.weight.data.zero_()
    assert PEERS[peer_path(module)].parameters(module)[0].abs().min() > 0
    fastcross.swap(module)
    assert fastcross.CrossNetwork.from_module(module).num_layers == 3


def test_from_module_names_what_it_cannot_take():
    with pytest.raises(TypeError, match=r"torch\.nn\.modules\.linear\.Linear"):
        fastcross.CrossNetwork.from_module(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="LowRankCrossNet: low-rank"):
        fastcross.CrossNetwork.from_module(pytest.importorskip("torchrec.modules.crossnet").LowRankCrossNet(4, 2))


def test_cross_state_dict(build):
    module = randomise(build(8, 12))  # layer 10 sorts before layer 2 as text
    model = nn.ModuleDict({"deep": nn.Linear(8, 8), "crossnet": module})
    weight, bias = PEERS[peer_path(module)].parameters(module)
    for state in (
        fastcross.cross_state_dict(module.state_dict()),
        fastcross.cross_state_dict(model.state_dict(), prefix="crossnet."),
    ):
        native = fastcross.CrossNetwork(8, 12)
        native.load_state_dict(state)
        assert torch.equal(native.weight, weight)
        assert torch.equal(native.bias, bias)
    assert isinstance(recognise(module), type(PEERS[peer_path(module)]))


def test_cross_state_dict_names_missing_and_extra_keys():
    state = {f"crossnet.{key}": value for key, value in torchrec(4, 3).state_dict().items()}
    with pytest.raises(ValueError, match=r"under the prefix ''.*there are some under 'crossnet\.'"):
        fastcross.cross_state_dict(state)
    with pytest.raises(ValueError, match=r"missing crossnet.bias.1; extra none"):
        fastcross.cross_state_dict({k: v for k, v in state.items() if k != "crossnet.bias.1"}, "crossnet.")
    with pytest.raises(ValueError, match=r"missing none; extra crossnet.gate"):
        fastcross.cross_state_dict({**state, "crossnet.gate": torch.ones(1)}, "crossnet.")
    with pytest.raises(ValueError, match=r"different shapes: .*crossnet.kernels.2 \(5, 1\)"):
        fastcross.cross_state_dict({**state, "crossnet.kernels.2": torch.ones(5, 1)}, "crossnet.")
    with pytest.raises(ValueError, match=r"not one vector per layer: kernels \(2, 4, 4\)"):
        fastcross.cross_state_dict({"kernels": torch.ones(2, 4, 4), "bias": torch.ones(2, 4, 1)})
    with pytest.raises(ValueError, match="no keys of a cross network"):
        fastcross.cross_state_dict({})
    native = fastcross.CrossNetwork(4, 2).state_dict()
    assert torch.equal(fastcross.cross_state_dict(native)["weight"], native["weight"])
