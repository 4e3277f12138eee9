"""Weights of other packages: as a module, as a checkpoint."""

import subprocess
import sys

import pytest
import torch
from peer_modules import cross, peer_of, randomise, torchrec
from torch import nn

import fastcross
from fastcross.layers.peers import recognise


def test_from_module(build_rank_one):
    module = randomise(build_rank_one(8, 3))
    native = fastcross.CrossNetwork.from_module(module)
    x = torch.randn(5, 8)
    torch.testing.assert_close(native(x), cross(module)(x))
    native.weight.data.zero_()
    assert peer_of(module).parameters(module)["weight"].abs().min() > 0
    fastcross.swap(module)
    assert fastcross.CrossNetwork.from_module(module).num_layers == 3


def test_from_module_names_what_it_cannot_take():
    with pytest.raises(TypeError, match=r"torch\.nn\.modules\.linear\.Linear"):
        fastcross.CrossNetwork.from_module(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"LowRankCrossNet: x0 \(U V x \+ b\) \+ x"):
        fastcross.CrossNetwork.from_module(pytest.importorskip("torchrec.modules.crossnet").LowRankCrossNet(4, 2))


def test_cross_state_dict(build_rank_one):
    module = randomise(build_rank_one(8, 12))  # layer 10 sorts before layer 2 as text
    model = nn.ModuleDict({"deep": nn.Linear(8, 8), "crossnet": module})
    weight, bias = peer_of(module).parameters(module).values()
    for state in (
        fastcross.cross_state_dict(module.state_dict()),
        fastcross.cross_state_dict(model.state_dict(), prefix="crossnet."),
    ):
        native = fastcross.CrossNetwork(8, 12)
        native.load_state_dict(state)
        assert torch.equal(native.weight, weight)
        assert torch.equal(native.bias, bias)
    assert recognise(module) is peer_of(module)


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


def test_from_module_of_the_class_alone():
    """However CrossNetwork was imported: nothing else of fastcross has been asked for before."""
    pytest.importorskip("torchfm")
    code = (
        "import sys; from fastcross.layers.cross import CrossNetwork;"
        "assert not any(name.startswith('fastcross.interop') for name in sys.modules);"
        "import torchfm.layer; assert CrossNetwork.from_module(torchfm.layer.CrossNetwork(4, 2)).num_layers == 2"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
