"""The other packages' own cross networks, for the tests and the fuzzer; what is not installed is skipped.

Each package is a `pip install --no-deps -r requirements-peers.txt` away.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fastcross.layers.peers import PEERS


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


def randomise(module, scale=0.4):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return module


def cross(module):
    """The module's cross network as a function: RecBole's is a method of the model."""
    return getattr(module, peer_of(module).method) if not isinstance(module, nn.Sequential) else module


def peer_of(module):
    paths = [f"{cls.__module__}.{cls.__qualname__}" for cls in type(module).__mro__]
    return next(peer for path in paths for peer in PEERS if peer.path == path)


def cross_parameters(module):
    peer = peer_of(module)
    names = peer.state_keys(len(peer.parameters(module)["weight"]))
    return {name: module.get_parameter(name) for name in names}


def outputs_and_gradients(module, x, dy):
    x = x.clone().requires_grad_()
    y = cross(module)(x)
    parameters = cross_parameters(module)
    grads = torch.autograd.grad(y, [x, *parameters.values()], dy.to(y.dtype))
    return dict(zip(["y", "dx0", *parameters], [y.detach(), *grads], strict=True))


def with_gradients(model, d=8):
    """As in the middle of training: gradients are there, and one parameter has a hook."""
    if all(parameter.device.type == "cpu" for parameter in model.parameters()):
        randomise(model)
        (cross(model)(torch.randn(5, d)) ** 2).sum().backward()
        next(model.parameters()).register_hook(lambda grad: grad)
    return model
