"""What swap leaves, with the reason, and nothing of it has changed: other models, other code, other parts."""

import re

import pytest
import torch
from peer_modules import deepctr, deepctr_matrix, fuxictr, torchfm, torchrec, tzrec, with_gradients
from snapshot import assert_left, snapshot
from torch import nn
from torch.nn.utils import parametrizations, prune

import fastcross


def _part(network):
    """A submodule that the network calls for its second layer, or None."""
    if hasattr(network, "cross_net"):
        return network.cross_net[1].weight
    return network.w[1] if hasattr(network, "w") else None


def own_forward_of_a_part(network):
    part = _part(network)
    part.forward = lambda x: 2 * nn.functional.linear(x, part.weight)


def part_of_another_class(network):
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    _part(network).__class__ = Doubled


def weight_norm(network):
    parametrizations.weight_norm(_part(network))


def old_weight_norm(network):
    with pytest.warns(FutureWarning):
        torch.nn.utils.weight_norm(_part(network))


def spectral_norm(network):
    """In training, each look at the weight is a step of its power iteration."""
    parametrizations.spectral_norm(_part(network))


def pruned(network):
    prune.l1_unstructured(_part(network), "weight", 0.5)


def hooked_part(network):
    _part(network).register_forward_hook(lambda *args: None)


def hooked_backward(network):
    _part(network).register_full_backward_hook(lambda *args: None)


def lazy_part(network):
    network.w[1] = nn.LazyLinear(1, bias=False)


def scripted_part(network):
    network.w[1] = torch.jit.script(network.w[1])


def compiled_part(network):
    _part(network).compile(backend="eager")


def more_outputs(network):
    network.w[1] = nn.Linear(8, 2, bias=False)


def part_with_bias(network):
    network.w[1] = nn.Linear(8, 1)


def missing_part(network):
    network.w[1] = None


CHANGES_OF_PARTS = [
    (own_forward_of_a_part, "own code failed.*it uses forward"),
    (part_of_another_class, "does not compute"),
    (weight_norm, "unexpected parameters: there is no parameter"),
    (old_weight_norm, "unexpected parameters: there is no parameter"),
    (spectral_norm, "unexpected parameters: there is no parameter"),
    (pruned, "unexpected parameters: there is no parameter"),
    (hooked_part, "a hook on one of its parts"),
    (hooked_backward, "a hook on one of its parts"),
    (compiled_part, "own code failed.*_compiled_call_impl"),
]


@pytest.mark.parametrize(("change", "reason"), CHANGES_OF_PARTS, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("build", [torchfm, fuxictr, tzrec])
@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
def test_parts_that_are_not_the_packages(build, change, reason, shared):
    network = with_gradients(build(8, 3))
    change(network)
    if shared:
        parts = network.w if hasattr(network, "w") else network.cross_net
        parts[0] = parts[1]
    assert_left(nn.Sequential(network), reason)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lazy_part, "unexpected parameters"),
        (scripted_part, "unexpected parameters.*TorchScript"),
        (more_outputs, "unexpected parameters"),
        (part_with_bias, "unexpected parameters: w.1.bias"),
        (missing_part, "unexpected parameters"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_other_parts(change, reason):
    network = with_gradients(torchfm(8, 3))
    change(network)
    assert_left(network, reason)


def test_global_hooks_are_not_run_and_not_lost():
    network = with_gradients(torchfm(8, 2))
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *args: seen.append(type(module)))
    try:
        assert_left(network, "hook")
        assert seen == []
        network(torch.randn(2, 8))
        assert nn.Linear in seen
        assert fastcross.swap(deepctr(8, 2)).swapped  # calls no parts
    finally:
        handle.remove()


@pytest.mark.parametrize("parametrised", ["kernels", "bias"])
def test_parametrised_parameters_of_deepctr(parametrised):
    network = with_gradients(deepctr(8, 3))
    looks = []

    class Counted(nn.Module):
        def forward(self, value):
            looks.append(value)
            return value

    torch.nn.utils.parametrize.register_parametrization(network, parametrised, Counted())
    looks.clear()
    assert_left(network, "unexpected parameters")
    assert looks == []


def test_parametrised_entry_of_a_parameter_list():
    network = with_gradients(torchrec(8, 3))
    torch.nn.utils.parametrize.register_parametrization(network.kernels, "1", nn.Identity())
    assert_left(network, "unexpected")


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64], ids=str)
def test_numbers_that_are_not_real(dtype):
    network = torchrec(8, 2)
    for values in (network.kernels, network.bias):
        for i in range(2):
            values[i] = nn.Parameter(torch.ones(8, 1, dtype=dtype), requires_grad=False)
    assert_left(network, "unexpected")


def test_anywhere_in_a_model_and_what_is_left():
    interactions = pytest.importorskip("fuxictr.pytorch.layers.interactions.cross_net")
    crossnet = pytest.importorskip("torchrec.modules.crossnet")
    model = nn.ModuleDict(
        {
            "loss": nn.CrossEntropyLoss(),
            "native": fastcross.CrossNetwork(4, 2),
            "nested": nn.Sequential(nn.Linear(4, 4), nn.Sequential(torchfm(4, 2), fuxictr(4, 1))),
            "v2": deepctr_matrix(4, 2),
            "one": deepctr_matrix(1, 2),
            "other": crossnet.LowRankMixtureCrossNet(4, 2, activation=torch.sin),
            "edcn": nn.ModuleList([interactions.CrossInteraction(4)]),
            "fcn": looks_like("src.DCNv3", "ExponentialCrossNetwork"),
            "gated": looks_like("mine", "GateCrossLayer"),
            "experts": looks_like("mine", "CrossNetMix"),
            "low": looks_like("mine", "CrossV2"),
            "matrix": looks_like("mine", "FeatureCross"),
            "mine": looks_like("mine", "CrossLayer"),
            "whole": looks_like("tzrec.models.dcn_v2", "DCNV2"),  # a model, no layer
        }
    )
    report = fastcross.swap(model)
    assert [entry.name for entry in report.swapped] == ["nested.1.0", "nested.1.1", "v2", "one"]
    notes = {entry.name: entry.note for entry in report.left}
    expected = {
        "other": "it uses _activation",
        "edcn.0": "nothing to gain",
        "fcn": "dropout between the layers",
        "gated": "gated",
        "experts": "mixture",
        "low": "low-rank",
        "matrix": "matrices",
        "mine": "no class of a package that fastcross knows",
    }
    assert list(notes) == list(expected)
    assert all(text in notes[name] for name, text in expected.items())
    assert "left edcn.0 (fuxictr.pytorch.layers.interactions.cross_net.CrossInteraction): x0" in str(report)


def looks_like(package, name):
    return type(name, (nn.Module,), {"__module__": package, "__qualname__": name})()


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


def other_version(**members):
    """torchfm's cross network under its own path, with other code."""
    network = with_gradients(torchfm(8, 2))
    base = type(network)
    network.__class__ = type(base.__name__, (base,), {"__module__": base.__module__, **members})
    return network, base


def test_code_that_differs_in_training_alone():
    network, base = other_version(
        forward=lambda self, x: nn.functional.dropout(base.forward(self, x), 0.5, self.training)
    )
    assert_left(network.eval(), "does not compute")


def test_code_that_changes_the_module_is_not_run_on_it():
    def forward(self, x):
        self.calls += 1
        self.seen.append(x)
        self.mean.mul_(0.9)
        return base.forward(self, x)

    network, base = other_version(forward=forward)
    network.calls, network.seen = 0, []
    network.register_buffer("mean", torch.ones(8))
    assert_left(network, "own code failed.*it uses mean")


@pytest.mark.parametrize("attribute", ["scale", "enabled", "mode"])
def test_code_that_asks_another_object(attribute):
    """Compared, tested or called, it decides what is computed, and is not there to ask."""

    def forward(self, x):
        y = base.forward(self, x)
        if self.attribute == "scale" and self.scale == 2:
            return 2 * y
        if self.attribute == "enabled" and self.enabled:
            return 2 * y
        return 2 * y if self.attribute == "mode" and self.mode() else y

    network, base = other_version(forward=forward)
    network.attribute = attribute
    network.scale, network.enabled, network.mode = torch.tensor(2), object(), dict
    assert_left(network, f"it uses {attribute}")


def test_an_error_on_the_way_changes_nothing(monkeypatch):
    """Asked about the third module an interrupt arrives: the first two are as they were."""
    model = nn.Sequential(torchfm(8, 2), deepctr(8, 2), torchrec(8, 2))
    recognise, calls = fastcross.swap.__globals__["recognise"], []

    def interrupted(module):
        calls.append(module)
        if module is model[2]:
            raise KeyboardInterrupt
        return recognise(module)

    monkeypatch.setitem(fastcross.swap.__globals__, "recognise", interrupted)
    before = snapshot(model)
    with pytest.raises(KeyboardInterrupt):
        fastcross.swap(model)
    assert calls[-1] is model[2]
    assert snapshot(model) == before


def _refuses_subclasses(base):
    def refuse(cls, **kwargs):
        raise TypeError("no more subclasses")

    mine = type("Mine", (base,), {})
    mine.__init_subclass__ = classmethod(refuse)
    return mine


def test_a_class_that_cannot_be_extended():
    model = nn.Sequential(deepctr(8, 2), torchfm(8, 2))
    model[1].__class__ = _refuses_subclasses(type(model[1]))
    before = snapshot(model[1])
    report = fastcross.swap(model)
    assert [entry.name for entry in report.swapped] == ["0"]
    assert "cannot be changed: TypeError: no more subclasses" in report.left[0].note
    assert snapshot(model[1]) == before


def test_a_method_with_another_signature():
    network, base = other_version(forward=lambda self, *inputs, scale=1.0: scale * base.forward(self, *inputs))
    x = torch.randn(3, 8)
    expected = network(x), network(x, scale=2.0)
    assert fastcross.swap(network).swapped
    torch.testing.assert_close(network(x), expected[0])
    assert torch.equal(network(x, scale=2.0), expected[1])
