"""The other packages' own cross networks, for the tests and the fuzzer; what is not installed is skipped.

Each package is a `pip install --no-deps -r requirements-peers.txt` away.
"""

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fastcross.layers.peers import cross_sizes, peers_of, recognise


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
    return recbole_model("dcn", "DCN", d, num_layers)


def recbole_model(module, model, d, num_layers, **options):
    dcn = pytest.importorskip(f"recbole.model.context_aware_recommender.{module}")
    token = pytest.importorskip("recbole.utils").FeatureType.TOKEN
    fields = ["user", "item"]
    dataset = SimpleNamespace(
        fields=lambda source: fields, field2type=dict.fromkeys(fields, token), num=lambda field: 50
    )
    config = {"LABEL_FIELD": "label", "embedding_size": d // 2, "device": "cpu", "double_tower": None}
    config |= {"numerical_features": [], "mlp_hidden_size": [8], "cross_layer_num": num_layers}
    return getattr(dcn, model)(config | {"reg_weight": 0.1, "dropout_prob": 0.0} | options, dataset)


def deepctr_matrix(d, num_layers):
    layers = pytest.importorskip("deepctr_torch.layers.interaction")
    return layers.CrossNet(d, num_layers, parameterization="matrix")


def deepctr_mixture(d, num_layers):
    return pytest.importorskip("deepctr_torch.layers.interaction").CrossNetMix(d, 3, 2, num_layers)


def torchrec_matrix(d, num_layers):
    return pytest.importorskip("torchrec.modules.crossnet").CrossNet(d, num_layers)


def torchrec_low_rank(d, num_layers):
    return pytest.importorskip("torchrec.modules.crossnet").LowRankCrossNet(d, num_layers, 3)


def torchrec_mixture(d, num_layers):
    return pytest.importorskip("torchrec.modules.crossnet").LowRankMixtureCrossNet(d, num_layers, 3, 2)


def torchrec_expert(d, num_layers):
    """A single expert has no gate; the activation is a function or a module."""
    layers = pytest.importorskip("torchrec.modules.crossnet")
    return layers.LowRankMixtureCrossNet(d, num_layers, 1, 3, activation=nn.Tanh())


def fuxictr_matrix(d, num_layers):
    return pytest.importorskip("fuxictr.pytorch.layers.interactions.cross_net").CrossNetV2(d, num_layers)


def fuxictr_mixture(d, num_layers):
    layers = pytest.importorskip("fuxictr.pytorch.layers.interactions.cross_net")
    return layers.CrossNetMix(d, num_layers, low_rank=2, num_experts=3)


class GateCorssLayer(nn.Module):
    """FuxiCTR's model zoo is not on PyPI: a class with the name, the parameters and the formula of GDCN's layer."""

    __module__ = "src.GDCN"

    def __init__(self, input_dim, cn_layers=3):
        super().__init__()
        self.cn_layers = cn_layers
        self.w, self.wg = (
            nn.ModuleList(nn.Linear(input_dim, input_dim, bias=False) for _ in range(cn_layers)) for _ in range(2)
        )
        self.b = nn.ParameterList(nn.Parameter(torch.rand(input_dim)) for _ in range(cn_layers))
        self.activation = nn.Sigmoid()

    def forward(self, x):
        y = x
        for weight, gate, bias in zip(self.w, self.wg, self.b, strict=True):
            y = y + x * (weight(y) + bias) * self.activation(gate(y))
        return y


def fuxictr_gated(d, num_layers):
    return GateCorssLayer(d, num_layers)


class CrossV2(nn.Module):
    """TorchEasyRec's low-rank cross network: u goes down, v up with the bias."""

    __module__ = "tzrec.modules.interaction"

    def __init__(self, input_dim, cross_num=3, low_rank=32):
        super().__init__()
        self.cross_num = cross_num
        self.u_kernels = nn.ModuleList(nn.Linear(input_dim, low_rank, bias=False) for _ in range(cross_num))
        self.v_kernels = nn.ModuleList(nn.Linear(low_rank, input_dim) for _ in range(cross_num))

    def forward(self, input):
        y = input
        for down, up in zip(self.u_kernels, self.v_kernels, strict=True):
            y = input * up(down(y)) + y
        return y


def tzrec_low_rank(d, num_layers):
    return CrossV2(d, num_layers, 3)


def recbole_matrix(d, num_layers):
    return recbole_model("dcnv2", "DCNV2", d, num_layers, mixed=False, structure="parallel")


def recbole_mixture(d, num_layers):
    options = {"mixed": True, "structure": "parallel", "expert_num": 3, "low_rank": 2}
    return recbole_model("dcnv2", "DCNV2", d, num_layers, **options)


def recbole_teacher(d, num_layers):
    """KD_DAGFM's teacher: a method computes the cross network, a head and a sigmoid."""
    models = pytest.importorskip("recbole.model.context_aware_recommender.kd_dagfm")
    return models.CrossNet({"depth": num_layers, "embedding_size": d // 2, "feature_num": 2})


RANK_ONE = (deepctr, torchrec, fuxictr, torchfm, tzrec, recbole)
MATRICES = (deepctr_matrix, torchrec_matrix, fuxictr_matrix, recbole_matrix, recbole_teacher)
LOW_RANK = (torchrec_low_rank, tzrec_low_rank)
MIXTURES = (deepctr_mixture, torchrec_mixture, torchrec_expert, fuxictr_mixture, recbole_mixture)
BUILDERS = RANK_ONE + MATRICES + LOW_RANK + MIXTURES + (fuxictr_gated,)
SAME_PRODUCTS = (*MATRICES, *LOW_RANK, fuxictr_gated)  # with as few GEMMs as fastcross's operators have
STAND_INS = (tzrec, tzrec_low_rank, fuxictr_gated)


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
    """What it is recognised as; of a network that is left, the entry of its class that has its parameters."""
    if not isinstance(peer := recognise(module), str):
        return peer
    peers = [peer for cls in type(module).__mro__ for peer in peers_of(cls)]
    return next((peer for peer in peers if set(peer.keys.values()) <= _templates(module)), peers[0])


def _templates(module):
    """The names of the module's parameters as keys of a peer."""
    names = {re.sub(r"\.\d+", ".{}", name) for name, _ in module.named_parameters(remove_duplicate=False)}
    return names | {f"{name}.mT" for name in names}


def cross_parameters(module):
    peer = peer_of(module)
    return {name: module.get_parameter(name) for name in peer.state_keys(cross_sizes(module, peer))}


def outputs_and_gradients(module, x, dy):
    x = x.clone().requires_grad_()
    y = cross(module)(x)
    parameters = cross_parameters(module)
    dy = dy.flatten()[: y.numel()].view(y.shape).to(y.dtype)  # not all of them return (B, d)
    grads = torch.autograd.grad(y, [x, *parameters.values()], dy)
    return dict(zip(["y", "dx0", *parameters], [y.detach(), *grads], strict=True))


def with_gradients(model, d=8):
    """As in the middle of training: gradients are there, and one parameter has a hook."""
    if all(parameter.device.type == "cpu" for parameter in model.parameters()):
        randomise(model)
        (cross(model)(torch.randn(5, d)) ** 2).sum().backward()
        next(model.parameters()).register_hook(lambda grad: grad)
    return model
