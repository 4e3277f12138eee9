"""The cross layers of other packages: where their classes are, what they compute, where their parameters lie.

A new one is one entry of PEERS. Nothing of the packages is imported.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fastcross.ops import cross_network


@dataclass(frozen=True)
class Formula:
    """What a cross layer computes.

    Args:
        text: the formula; where no operator computes it, what it is instead.
        operator: ours, called with x0 and the parameters under the names in ``shapes``; None: a module is left alone.
        shapes: of the operator's parameters, all layers in one, in symbols: a symbol is one number everywhere.
    """

    text: str
    operator: Callable[..., Tensor] | None = None
    shapes: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def sizes(self, parameters: Mapping[str, Tensor]) -> dict[str, int]:
        """The number for each symbol; ValueError where the parameters have other shapes."""
        found: dict[str, int] = {}
        for name, symbols in self.shapes.items():
            numbers = parameters[name].shape
            agree = len(numbers) == len(symbols) and all(
                number > 0 and found.setdefault(symbol, number) == number
                for symbol, number in zip(symbols, numbers, strict=True)
            )
            if not agree or not parameters[name].is_floating_point():
                shapes = (f"{name} {tuple(value.shape)} {value.dtype}" for name, value in parameters.items())
                raise ValueError(f"unexpected shapes: {', '.join(shapes)}")
        return found


VECTOR = Formula("x0 (x·w) + b + x", cross_network, {"weight": "Ld", "bias": "Ld"})
MATRIX = Formula("matrices, not one vector per layer", shapes={"weight": "Ldd", "bias": "Ld"})
LOW_RANK = Formula("low-rank matrices, not one vector per layer")
MIXTURE = Formula("mixture of low-rank experts, not one vector per layer")
GATED = Formula("gated")


@dataclass(frozen=True)
class Peer:
    """A class of another package.

    Args:
        path: where it is defined, ``package.module.Class``.
        formula: what it computes.
        keys: for each parameter of the formula its keys in a state_dict: ``{}`` stands for the layer, and a key without
            it holds all layers.
        method: the method that computes it.
        leading_dimensions: whether it takes (..., d); otherwise (B, d) only.
    """

    path: str
    formula: Formula
    keys: Mapping[str, str] = field(default_factory=dict)
    method: str = "forward"
    leading_dimensions: bool = True

    def state_keys(self, num_layers: int) -> list[str]:
        """The state_dict keys of a network of ``num_layers`` layers."""
        names = (key.format(layer) for key in self.keys.values() for layer in range(num_layers))
        return list(dict.fromkeys(names))

    def parameters(self, module: nn.Module) -> dict[str, Tensor]:
        """The formula's parameters: views where the package keeps one tensor, else stacked, differentiably."""
        return {name: self._stack(name, _tensors(module, key)) for name, key in self.keys.items()}

    def stacked(self, tensors: Mapping[str, Tensor | list[Tensor]]) -> dict[str, Tensor]:
        """All layers in one; a vector may be (d,), (d, 1) or (1, d) in the package."""
        return {name: self._stack(name, value) for name, value in tensors.items()}

    def _stack(self, name: str, tensors: Tensor | list[Tensor]) -> Tensor:
        vectors = len(self.formula.shapes[name]) == 2
        if isinstance(tensors, Tensor):
            return tensors.flatten(1) if vectors else tensors
        return torch.stack([tensor.flatten() if vectors else tensor for tensor in tensors])


def _tensors(module: nn.Module, key: str) -> Tensor | list[Tensor]:
    """The one tensor that a key without ``{}`` names, or one tensor per layer."""
    container, _, leaf = key.partition(".{}")
    values = getattr(module, container)
    if isinstance(values, Tensor):
        return values
    layers = list(values)
    for name in leaf.split(".")[1:]:
        layers = [getattr(layer, name) for layer in layers]
    return layers


_DEEPCTR = "deepctr_torch.layers.interaction"
_FUXICTR = "fuxictr.pytorch.layers.interactions.cross_net"
_RECBOLE = "recbole.model.context_aware_recommender"
_TORCHREC = "torchrec.modules.crossnet"
_TZREC = "tzrec.modules.interaction"

# Of the entries for one class the first is meant whose shapes the module has.
PEERS: tuple[Peer, ...] = (
    # DeepCTR-Torch: kernels are (L, d, 1), or (L, d, d) in the same class.
    Peer(f"{_DEEPCTR}.CrossNet", VECTOR, {"weight": "kernels", "bias": "bias"}, leading_dimensions=False),
    Peer(f"{_DEEPCTR}.CrossNet", MATRIX, {"weight": "kernels", "bias": "bias"}, leading_dimensions=False),
    # TorchRec: a ParameterList of (d, 1) each. Its CrossNet is the second version of the paper.
    Peer(f"{_TORCHREC}.VectorCrossNet", VECTOR, {"weight": "kernels.{}", "bias": "bias.{}"}, leading_dimensions=False),
    Peer(f"{_TORCHREC}.CrossNet", MATRIX),
    Peer(f"{_TORCHREC}.LowRankCrossNet", LOW_RANK),
    # FuxiCTR: a module per layer, with a Linear of (1, d) and a bias of (d,).
    Peer(f"{_FUXICTR}.CrossNet", VECTOR, {"weight": "cross_net.{}.weight.weight", "bias": "cross_net.{}.bias"}),
    Peer(f"{_FUXICTR}.CrossNetV2", MATRIX),
    # torchfm (pytorch-fm) and TorchEasyRec: Linears of (1, d) and biases of (d,).
    Peer("torchfm.layer.CrossNetwork", VECTOR, {"weight": "w.{}.weight", "bias": "b.{}"}),
    Peer(f"{_TZREC}.Cross", VECTOR, {"weight": "w.{}.weight", "bias": "b.{}"}),
    Peer(f"{_TZREC}.CrossV2", LOW_RANK),
    # RecBole: the cross network is a method of the whole model, its parameters (d,) lie among the model's.
    Peer(
        f"{_RECBOLE}.dcn.DCN",
        VECTOR,
        {"weight": "cross_layer_w.{}", "bias": "cross_layer_b.{}"},
        method="cross_network",
        leading_dimensions=False,
    ),
    Peer(f"{_RECBOLE}.dcnv2.DCNV2", MATRIX),
)

# What looks like a cross layer and is no entry above. The first match says what it is.
LOOKS_LIKE = (
    (r"Gate\w*(Cross|Corss)", GATED.text),
    (r"Cross\w*Mix|Mixture\w*Cross", MIXTURE.text),
    (r"LowRankCross|\.CrossV2$", LOW_RANK.text),
    (r"CrossNetV2$|\.DCNV2$|FeatureCross$", MATRIX.text),
    (r"Cross(Net|Network|Layer)?$", "no class of a package that fastcross knows"),
)
