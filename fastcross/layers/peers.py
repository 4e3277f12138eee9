"""The cross layers of other packages: the paths of their classes, their formulas, and their parameters.

A new one is one entry of PEERS. The packages are not imported.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fastcross.ops import cross_network
from fastcross.ops.multiplicative import cross_gated, cross_low_rank, cross_matrix, cross_mixture


@dataclass(frozen=True)
class Formula:
    """The formula of a cross layer.

    Args:
        text: the formula.
        operator: fastcross's, called with x0, the parameters under the names in ``shapes``, and ``options``.
        shapes: of the operator's parameters, stacked over layers, in symbols. A symbol is the same number everywhere; a
            digit is itself.
        options: further arguments of the operator.
        autocast: whether the operator is as accurate as the packages under autocast. They add half-precision products
            to x_l in float32; the operators of DCN-V2's family keep x_l in half precision.
        fewer_products: whether the operator has fewer GEMMs than the packages, and so gains without C++, too.
    """

    text: str
    operator: Callable[..., Tensor]
    shapes: Mapping[str, Sequence[str]]
    options: Mapping[str, Any] = field(default_factory=dict)
    autocast: bool = False
    fewer_products: bool = False

    def __call__(self, x0: Tensor, parameters: Mapping[str, Tensor], backend: str = "auto") -> Tensor:
        return self.operator(x0, **parameters, **self.options, backend=backend)

    def sizes(self, parameters: Mapping[str, Tensor]) -> dict[str, int]:
        """The number for each symbol; ValueError if the parameters have other shapes."""
        found: dict[str, int] = {}
        for name, symbols in self.shapes.items():
            numbers = parameters[name].shape
            agree = len(numbers) == len(symbols) and all(
                number > 0 and number == (int(symbol) if symbol.isdigit() else found.setdefault(symbol, number))
                for symbol, number in zip(symbols, numbers, strict=True)
            )
            if not agree or not parameters[name].is_floating_point():
                shapes = (f"{name} {tuple(value.shape)} {value.dtype}" for name, value in parameters.items())
                raise ValueError(f"unexpected shapes: {', '.join(shapes)}")
        return found


def mixture(activation: str | None, *, gate: bool = True, gate_bias: bool = False) -> Formula:
    """The formula of a mixture; without a gate there is one expert."""
    experts = "K" if gate else "1"
    shapes = {"u": f"L{experts}dr", "c": f"L{experts}rr", "v": f"L{experts}rd", "bias": "Ld"}
    shapes |= ({"gate": "Kd"} if gate else {}) | ({"gate_bias": "K"} if gate_bias else {})
    f, logits = activation or "", "G x + g" if gate_bias else "G x"
    layer = f"x0 (U {f}(C {f}(V x)) + b)"
    text = f"x + Σ softmax({logits}) {layer}" if gate else f"x + {layer}"
    options = {"activation": activation} | ({} if gate else {"gate": None})
    return Formula(text, cross_mixture, shapes, options, fewer_products=True)


VECTOR = Formula("x0 (x·w) + b + x", cross_network, {"weight": "Ld", "bias": "Ld"}, autocast=True, fewer_products=True)
MATRIX = Formula("x0 (W x + b) + x", cross_matrix, {"weight": "Ldd", "bias": "Ld"})
LOW_RANK = Formula("x0 (U V x + b) + x", cross_low_rank, {"u": "Ldr", "v": "Lrd", "bias": "Ld"})
GATED = Formula("x0 (W x + b) σ(G x) + x", cross_gated, {"weight": "Ldd", "gate": "Ldd", "bias": "Ld"})


@dataclass(frozen=True, eq=False)
class Peer:
    """A class of another package.

    Args:
        path: its path, ``package.module.Class``; a copy of the package within another one is recognised too.
        formula: its formula.
        keys: for each parameter of the formula its keys in a state_dict. ``{}`` stands for the index of the first
            dimension; a key without it holds all layers. ``.mT`` at the end transposes the stored tensor.
        method: the method that computes it.
        leading_dimensions: whether it takes (..., d); otherwise (B, d) only.
        prepare: the method's first step, on its input.
        finish: the method's last step, given the module and x_L.
        head: state_dict keys of the parameters that ``finish`` reads.
    """

    path: str
    formula: Formula
    keys: Mapping[str, str]
    method: str = "forward"
    leading_dimensions: bool = True
    prepare: Callable[[Tensor], Tensor] = lambda x0: x0
    finish: Callable[[Any, Tensor], Tensor] = lambda module, y: y
    head: Sequence[str] = ()

    def state_keys(self, sizes: Mapping[str, int]) -> list[str]:
        """The state_dict keys of a network, given the number for each symbol of the formula."""
        counts = {name: sizes[symbols[0]] for name, symbols in self.formula.shapes.items()}
        names = (own for name in self.keys for own in self.keys_of(name, counts[name]))
        return list(dict.fromkeys((*names, *self.head)))

    def keys_of(self, name: str, count: int) -> list[str]:
        """The state_dict keys of one parameter of the formula, whose first dimension is ``count``."""
        key = self.keys[name].removesuffix(".mT")
        return [key.format(index) for index in range(count)] if "{}" in key else [key]

    def parameters(self, module: nn.Module) -> dict[str, Tensor]:
        """The formula's parameters: views of the package's tensor, or its tensors stacked, differentiably."""
        return {name: self._stack(name, _tensors(module, key)) for name, key in self.keys.items()}

    def stacked(self, tensors: Mapping[str, Tensor | list[Tensor]]) -> dict[str, Tensor]:
        """Parameters stacked over layers. In the package a vector may be (d,), (d, 1) or (1, d), and a number (1,)."""
        return {name: self._stack(name, value) for name, value in tensors.items()}

    def multiplications(self, module: nn.Module) -> int:
        """Of one layer and row, by matrices."""
        keys = [key for name, key in self.keys.items() if len(self.formula.shapes[name]) > 2]
        return sum(_tensors(module, key)[0].numel() for key in keys)

    def _stack(self, name: str, tensors: Tensor | list[Tensor]) -> Tensor:
        dimensions = len(self.formula.shapes[name]) - 1
        if isinstance(tensors, Tensor):
            return tensors.flatten(1) if dimensions == 1 else tensors
        if dimensions == 1:
            return torch.stack([tensor.flatten() for tensor in tensors])
        return torch.cat(tensors) if dimensions == 0 else torch.stack(tensors)


def _tensors(module: nn.Module, key: str) -> Tensor | list[Tensor]:
    """The one tensor that a key without ``{}`` names, or one tensor per layer."""
    container, *path = key.replace(".{}", "").split(".")
    values = getattr(module, container)
    layers = list(values) if "{}" in key else [values]
    for name in path:
        layers = [getattr(layer, name) for layer in layers]
    return layers if "{}" in key else layers[0]


def _teacher(module: Any, y: Tensor) -> Tensor:
    """Store the logits where KD_DAGFM reads its teacher's."""
    module.logits = module.linear(y)
    module.outputs = torch.sigmoid(module.logits)
    return module.outputs


_DEEPCTR = "deepctr_torch.layers.interaction"
_FUXICTR = "fuxictr.pytorch.layers.interactions.cross_net"
_RECBOLE = "recbole.model.context_aware_recommender"
_TORCHREC = "torchrec.modules.crossnet"
_TZREC = "tzrec.modules.interaction"
_MIX = {"u": "U_list.{}", "c": "C_list.{}", "v": "V_list.{}.mT", "bias": "bias.{}", "gate": "gating.{}.weight"}

# If a class has several entries, the one with the module's shapes and formula applies.
PEERS: tuple[Peer, ...] = (
    # DeepCTR-Torch: kernels are (L, d, 1), or (L, d, d) in the same class; V is kept as (L, K, d, r).
    Peer(f"{_DEEPCTR}.CrossNet", VECTOR, {"weight": "kernels", "bias": "bias"}, leading_dimensions=False),
    Peer(f"{_DEEPCTR}.CrossNet", MATRIX, {"weight": "kernels", "bias": "bias"}, leading_dimensions=False),
    Peer(
        f"{_DEEPCTR}.CrossNetMix",
        mixture("tanh"),
        {name: key.replace(".{}", "") if name != "gate" else key for name, key in _MIX.items()},
        leading_dimensions=False,
        finish=lambda module, y: y.squeeze(),
    ),
    # TorchRec: a ParameterList of (d, 1) each. Its CrossNet is the second version of the paper; its mixture has any
    # activation, and no gate for a single expert.
    Peer(f"{_TORCHREC}.VectorCrossNet", VECTOR, {"weight": "kernels.{}", "bias": "bias.{}"}, leading_dimensions=False),
    Peer(f"{_TORCHREC}.CrossNet", MATRIX, {"weight": "kernels.{}", "bias": "bias.{}"}, leading_dimensions=False),
    Peer(f"{_TORCHREC}.LowRankCrossNet", LOW_RANK, {"u": "W_kernels.{}", "v": "V_kernels.{}", "bias": "bias.{}"}),
    *(
        Peer(
            f"{_TORCHREC}.LowRankMixtureCrossNet",
            mixture(activation, gate=gate),
            {"u": "U_kernels.{}", "c": "C_kernels.{}", "v": "V_kernels.{}", "bias": "bias.{}"}
            | ({"gate": "gates.{}.weight"} if gate else {}),
            leading_dimensions=False,
        )
        for gate in (True, False)
        for activation in ("relu", "tanh", None)
    ),
    # FuxiCTR: a module per layer, with a Linear of (1, d) and a bias of (d,); GDCN lies in its model zoo.
    Peer(f"{_FUXICTR}.CrossNet", VECTOR, {"weight": "cross_net.{}.weight.weight", "bias": "cross_net.{}.bias"}),
    Peer(
        f"{_FUXICTR}.CrossNetV2",
        MATRIX,
        {"weight": "cross_layers.{}.weight", "bias": "cross_layers.{}.bias"},
    ),
    Peer(
        f"{_FUXICTR}.CrossNetMix",
        mixture("tanh"),
        _MIX,
        leading_dimensions=False,
        finish=lambda module, y: y.squeeze(),
    ),
    Peer("src.GDCN.GateCorssLayer", GATED, {"weight": "w.{}.weight", "gate": "wg.{}.weight", "bias": "b.{}"}),
    # torchfm (pytorch-fm) and TorchEasyRec: Linears of (1, d) and biases of (d,). In CrossV2 u goes down and v up.
    Peer("torchfm.layer.CrossNetwork", VECTOR, {"weight": "w.{}.weight", "bias": "b.{}"}),
    Peer(f"{_TZREC}.Cross", VECTOR, {"weight": "w.{}.weight", "bias": "b.{}"}),
    Peer(
        f"{_TZREC}.CrossV2",
        LOW_RANK,
        {"u": "v_kernels.{}.weight", "v": "u_kernels.{}.weight", "bias": "v_kernels.{}.bias"},
    ),
    # RecBole: the cross network is a method of the whole model, its parameters lie among the model's.
    Peer(
        f"{_RECBOLE}.dcn.DCN",
        VECTOR,
        {"weight": "cross_layer_w.{}", "bias": "cross_layer_b.{}"},
        method="cross_network",
        leading_dimensions=False,
    ),
    Peer(
        f"{_RECBOLE}.dcnv2.DCNV2",
        MATRIX,
        {"weight": "cross_layer_w.{}", "bias": "bias.{}"},
        method="cross_network",
        leading_dimensions=False,
    ),
    Peer(
        f"{_RECBOLE}.dcnv2.DCNV2",
        mixture("tanh", gate_bias=True),
        {"u": "cross_layer_u.{}", "c": "cross_layer_c.{}", "v": "cross_layer_v.{}.mT", "bias": "bias.{}"}
        | {"gate": "gating.{}.weight", "gate_bias": "gating.{}.bias"},
        method="cross_network_mix",
        leading_dimensions=False,
    ),
    Peer(
        f"{_RECBOLE}.kd_dagfm.CrossNet",
        MATRIX,
        {"weight": "cross_layer_w.{}", "bias": "bias.{}"},
        method="FeatureInteraction",
        leading_dimensions=False,
        prepare=lambda x0: x0.reshape(x0.shape[0], -1),
        finish=_teacher,
        head=("linear.weight", "linear.bias"),
    ),
)

# Classes that look like a cross layer and are not in PEERS. The first match gives the reason.
LOOKS_LIKE = (
    (r"CrossInteraction$", "x0 (x·w) + b without x: two operators of PyTorch, nothing to gain"),
    (r"(Exponential|Linear)CrossNetwork$", "FCN: dropout between the layers, and a head"),
    (r"Gate\w*(Cross|Corss)", "gated; no class of a package that fastcross knows"),
    (r"Cross\w*Mix|Mixture\w*Cross", "mixture of low-rank experts; no class of a package that fastcross knows"),
    (r"LowRankCross|\.CrossV2$", "low-rank matrices; no class of a package that fastcross knows"),
    (r"CrossNetV2$|\.DCNV2$|FeatureCross$", "matrices; no class of a package that fastcross knows"),
    (r"Cross(Net|Network|Layer)?$", "no class of a package that fastcross knows"),
)
