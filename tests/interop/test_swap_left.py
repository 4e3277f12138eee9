"""What swap leaves, with the reason; and nothing of it has changed."""

import re

import pytest
import torch
from peer_modules import deepctr, fuxictr, torchfm, torchrec
from torch import nn

import fastcross


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
