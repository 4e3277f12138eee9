"""The cross layers of other packages: the paths of their classes, their formulas and parameters, and how a module is
recognised as one of them. A new one is one entry of PEERS. The packages are not imported.

A module is recognised by the path of its class, by its registered parameters, and by a test: its own code runs once on
random numbers in float64. The code runs on a skeleton of the module: a new object of the same class, with new
parameters under the same names and copies of its plain attributes. Everything else of the module (buffers, other
modules, hooks, other objects) is absent, and code that uses it fails. PyTorch's activations, which have no state, are
present. So the test cannot change the module, or anything that it refers to or shares.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as torch_module

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
    (r"CrossNetV2$|\.dcnv2\.DCNV2$|FeatureCross$", "matrices; no class of a package that fastcross knows"),
    (r"Cross(Net|Network|Layer)?$", "no class of a package that fastcross knows"),
)

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_ACTIVATIONS = (torch.relu, torch.tanh, functional.relu, functional.tanh)
_ACTIVATION_MODULES = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Softmax, nn.Identity)


def class_path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def peers_of(cls: type) -> list[Peer]:
    """The entries for a class itself, without its base classes."""
    path = f".{class_path(cls)}"
    return [peer for peer in PEERS if path.endswith(f".{peer.path}")]


def recognise(module: nn.Module) -> Peer | str | None:
    """The module's entry in PEERS; the reason if it only looks like a cross network; None for other modules."""
    if isinstance(module, torch.jit.ScriptModule):
        looks_like = any(re.search(pattern, f".{module.original_name}") for pattern, _ in LOOKS_LIKE)
        return "compiled to TorchScript, which fixes its code; swap before scripting" if looks_like else None
    for cls in _own_classes(module):
        if peers := peers_of(cls):
            fitting = [peer for peer in peers if _misfit(module, peer) is None] or peers[:1]
            reasons = [_reason_to_leave(module, cls, peer) for peer in fitting]
            return fitting[reasons.index(None)] if None in reasons else reasons[0]
    name = class_path(type(module))
    if name.startswith("fastcross."):
        return None
    return next((what for pattern, what in LOOKS_LIKE if re.search(pattern, name)), None)


def cross_parameters(module: nn.Module, formula: Formula) -> dict[str, Tensor]:
    """The parameters of another package's cross layers; TypeError if they are not known with this formula."""
    peer = recognise(module)
    if isinstance(peer, Peer) and peer.formula is formula:
        return peer.parameters(module)
    what = peer.formula.text if isinstance(peer, Peer) else peer
    reason = f": {what}" if what else ""
    raise TypeError(f"no cross network of a package that fastcross knows: {class_path(type(module))}{reason}")


def cross_sizes(module: nn.Module, peer: Peer) -> dict[str, int]:
    """The number for each symbol of the formula's shapes, also for parameters that are sharded over processes."""
    return peer.formula.sizes(peer.stacked({name: _on_meta(module, key) for name, key in peer.keys.items()}))


def _own_classes(module: nn.Module) -> list[type]:
    """The classes of a module; for a swapped one, its classes before the swap."""
    return [cls for cls in type(module).__mro__ if "peer_class" not in vars(cls)]


def _reason_to_leave(module: nn.Module, cls: type, peer: Peer) -> str | None:
    if peer.method in vars(module):
        return f"this instance has its own {peer.method}"
    defined_by = next((c for c in _own_classes(module) if peer.method in vars(c)), None)
    if defined_by is not cls:
        return f"{class_path(defined_by or cls)} has {'its own' if defined_by else 'no'} {peer.method}"
    if misfit := _misfit(module, peer):
        return misfit
    sizes = cross_sizes(module, peer)
    if peer.method == "forward":
        names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        if extra := sorted(names - set(peer.state_keys(sizes))):
            return f"unexpected parameters: {', '.join(extra)}"
    if _hooks_on_parts(module, peer):
        return "a hook on one of its parts would no longer run"
    return _difference(module, cls, peer, sizes)


def _misfit(module: nn.Module, peer: Peer) -> str | None:
    """Why the module's parameters differ from the entry's; None if they agree."""
    try:
        cross_sizes(module, peer)
    except ValueError as error:
        return str(error)
    except (AttributeError, TypeError, RuntimeError, LookupError) as error:
        return f"unexpected parameters: {error}"
    return None


def _on_meta(module: nn.Module, key: str) -> Tensor | list[Tensor]:
    own = key.removesuffix(".mT")
    names = [own.format(layer) for layer in range(_count_layers(module, key))] if "{}" in key else [own]
    found = [_registered(module, name) for name in names]
    tensors = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in found]
    tensors = [t.mT for t in tensors] if key != own else tensors
    return tensors if "{}" in key else tensors[0]


def _count_layers(module: nn.Module, key: str) -> int:
    container = key.partition(".{}")[0]
    owner = module._modules.get(container)
    if owner is None:
        raise AttributeError(f"there is no {container}")
    layer = 0
    while str(layer) in owner._parameters or str(layer) in owner._modules:
        layer += 1
    return layer


def _hooks_on_parts(module: nn.Module, peer: Peer) -> bool:
    containers = {key.partition(".")[0] for key in peer.keys.values()}
    owners = [
        part
        for name, part in module.named_children()
        if peer.method == "forward" or name in containers or type(part) in _ACTIVATION_MODULES
    ]
    parts = [part for owner in owners for part in owner.modules()]
    calls_parts = any(not isinstance(part, nn.ParameterList | nn.ModuleList) for part in parts)
    # Global hooks run for every module that is called: torch keeps no public way to ask whether there are any.
    any_global = getattr(torch_module, "_has_any_global_hook", bool)
    return (calls_parts and any_global()) or any(
        part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
        for part in parts
    )


def _difference(module: nn.Module, cls: type, peer: Peer, sizes: dict[str, int]) -> str | None:
    """Why the module's code differs from the formula, as in another version of a package; None if it agrees."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator, device="cpu")

    # The caller's default device, autocast and gradient mode must not matter, and its random state must not change.
    with torch.device("cpu"), torch.autocast("cpu", enabled=False), torch.no_grad(), torch.random.fork_rng(devices=()):
        shapes = {name: [sizes.get(s) or int(s) for s in symbols] for name, symbols in peer.formula.shapes.items()}
        # Sums of about 1: an activation bends them.
        parameters = {name: random(*shape) * shape[-1] ** -0.5 for name, shape in shapes.items()}
        try:
            values = {name: random(*_registered(module, name).shape) for name in peer.head}
            for name, key in peer.keys.items():
                whole = parameters[name].mT if key.endswith(".mT") else parameters[name]
                for index, own in enumerate(peer.keys_of(name, len(parameters[name]))):
                    values[own] = (whole[index] if "{}" in key else whole).reshape(_registered(module, own).shape)
            for rows, training in ((3, True), (3, False), (1, False)):
                x0 = random(rows, sizes["d"])
                expected = peer.formula(peer.prepare(x0), parameters, backend="torch")
                expected = peer.finish(_skeleton(module, values, training), expected)
                theirs = getattr(cls, peer.method)(_skeleton(module, values, training), x0.clone())
                if theirs.shape != expected.shape:
                    got, needed = tuple(theirs.shape), tuple(expected.shape)
                    return f"it does not compute {peer.formula.text}: its output is {got}, not {needed}"
                error = ((theirs - expected).abs().max() / expected.abs().max()).item()
                if not error < 1e-9:
                    return f"it does not compute {peer.formula.text}: off by {error:.2g} on a small input"
        except Exception as failure:  # another package's code may raise anything
            return f"its own code failed on a small input: {type(failure).__name__}: {failure}"
    return None


def _registered(module: nn.Module, name: str) -> Tensor:
    """The parameter registered under a dotted name, without running properties such as a parametrised weight's."""
    *path, leaf = name.split(".")
    part: Any = module
    for step in path:
        part = None if part is None else part._modules.get(step)
    if isinstance(part, torch.jit.ScriptModule):
        raise AttributeError(f"{'.'.join(path)} is compiled to TorchScript")
    found = None if part is None else part._parameters.get(leaf)
    if found is None:
        raise AttributeError(f"there is no parameter {name}")
    return found


class _Absent:
    """Replaces an attribute that the cross network must not need: any use of it raises."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _raise(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"it uses {self._name}, which is no part of the cross network that fastcross knows")

    __getattr__ = __call__ = __bool__ = __eq__ = __hash__ = _raise


def _skeleton(module: nn.Module, values: dict[str, Tensor], training: bool) -> Any:
    """A new module of the same class with only ``values``, by dotted name, and the plain attributes."""
    cls = _own_classes(module)[0]
    skeleton: Any = object.__new__(cls)
    nn.Module.__init__(skeleton)
    own = vars(skeleton)
    own.update({name: _plain(value, name) for name, value in vars(module).items() if name not in own})
    own["training"] = training
    for name, value in (module._parameters | module._buffers).items():
        kind = skeleton._parameters if name in module._parameters else skeleton._buffers
        kind[name] = None if value is None else _Absent(name)
    for name, part in module._modules.items():
        inner = {key.removeprefix(f"{name}."): v for key, v in values.items() if key.startswith(f"{name}.")}
        if part is not None and (inner or type(part) in _ACTIVATION_MODULES):
            skeleton._modules[name] = _skeleton(part, inner, training)
        else:
            skeleton._modules[name] = None if part is None else _Absent(name)
    for name, value in values.items():
        if "." not in name:
            skeleton._parameters[name] = nn.Parameter(value, requires_grad=False)
    return skeleton


def _plain(value: Any, name: str) -> Any:
    """A copy of a plain value. Any other value could be changed, or change the result, and is absent."""
    if type(value) in _PLAIN or any(value is function for function in _ACTIVATIONS):
        return value
    if type(value) in (list, tuple, set):
        return type(value)(_plain(each, name) for each in value)
    if type(value) is dict:
        return {_plain(key, name): _plain(each, name) for key, each in value.items()}
    return _Absent(name)
