"""The rank-one cross networks of other packages: how to recognise them, where their parameters lie.

No package is imported here: a module is known by the path of its class, and proved by running it once.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fastcross.kernels import closed_form


@dataclass(frozen=True)
class Peer:
    """One package's cross network: its state_dict keys (``{}`` stands for the layer) and the method that runs it."""

    weight: str
    bias: str
    method: str = "forward"
    leading_dimensions: bool = True  # takes (..., d); otherwise (B, d) only

    def parameters(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        """(L, d) weights and biases: views where the package keeps one tensor, else stacked, differentiably."""
        return _stack(_tensors(module, self.weight)), _stack(_tensors(module, self.bias))

    def parameters_on_meta(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        """The shapes and dtypes of :meth:`parameters`, wherever the parameters are: sharded over processes, too."""

        def on_meta(tensors: Tensor | list[Tensor]) -> Any:
            return pytree.tree_map(lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), tensors)

        return _stack(on_meta(_tensors(module, self.weight))), _stack(on_meta(_tensors(module, self.bias)))

    def keys(self, num_layers: int) -> list[str]:
        """The state_dict keys of a network of ``num_layers`` layers."""
        names = (key.format(layer) for key in (self.weight, self.bias) for layer in range(num_layers))
        return list(dict.fromkeys(names))


PEERS = {
    "deepctr_torch.layers.interaction.CrossNet": Peer("kernels", "bias", leading_dimensions=False),
    "torchrec.modules.crossnet.VectorCrossNet": Peer("kernels.{}", "bias.{}", leading_dimensions=False),
    "fuxictr.pytorch.layers.interactions.cross_net.CrossNet": Peer("cross_net.{}.weight.weight", "cross_net.{}.bias"),
    "torchfm.layer.CrossNetwork": Peer("w.{}.weight", "b.{}"),
    "tzrec.modules.interaction.Cross": Peer("w.{}.weight", "b.{}"),
    "recbole.model.context_aware_recommender.dcn.DCN": Peer(
        "cross_layer_w.{}", "cross_layer_b.{}", method="cross_network", leading_dimensions=False
    ),
}

# What looks like a cross layer and is none that these operators compute. The first match gives the reason.
_OTHERS = (
    (r"Gate\w*(Cross|Corss)", "gated"),
    (r"Cross\w*Mix|Mixture\w*Cross", "mixture of low-rank experts, not one vector per layer"),
    (r"LowRankCross|\.CrossV2$", "low-rank matrices, not one vector per layer"),
    (r"^torchrec\..*\.CrossNet$|CrossNetV2$|\.DCNV2$|FeatureCross$", "matrices, not one vector per layer"),
    (r"Cross(Net|Network|Layer)?$", "no class of a package that fastcross knows"),
)


def path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def recognise(module: nn.Module) -> Peer | str | None:
    """The peer whose cross network ``module`` is; why not, if it only looks like one; None for anything else."""
    if isinstance(module, torch.jit.ScriptModule):
        looks_like = any(re.search(pattern, f".{module.original_name}") for pattern, _ in _OTHERS)
        return "compiled to TorchScript, which fixes its code; swap before scripting" if looks_like else None
    classes = [cls for cls in type(module).__mro__ if "peer_class" not in vars(cls)]  # swapped: as it was before
    for cls in classes:
        peer = PEERS.get(path(cls))
        if peer is not None:
            defined_by = next(c for c in classes if peer.method in vars(c))
            return _reason_to_leave(module, cls, defined_by, peer) or peer
    name = path(type(module))
    if name.startswith("fastcross."):
        return None
    return next((reason for pattern, reason in _OTHERS if re.search(pattern, name)), None)


def _reason_to_leave(module: nn.Module, cls: type, defined_by: type, peer: Peer) -> str | None:
    if peer.method in vars(module):
        return f"this instance has its own {peer.method}"
    if defined_by is not cls:
        return f"{path(defined_by)} has its own {peer.method}"
    try:
        weight, bias = peer.parameters_on_meta(module)
    except (AttributeError, TypeError, RuntimeError, IndexError) as error:
        return f"unexpected parameters: {error}"
    if weight.shape != bias.shape and weight.numel() == bias.numel() * bias.shape[-1]:
        return "matrices, not one vector per layer"
    if weight.shape != bias.shape or weight.dim() != 2 or weight.numel() == 0 or not weight.is_floating_point():
        shapes = f"weights {tuple(weight.shape)} {weight.dtype} and biases {tuple(bias.shape)} {bias.dtype}"
        return f"unexpected shapes: {shapes}"
    if peer.method == "forward":
        names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        if extra := sorted(names - set(peer.keys(len(weight)))):
            return f"unexpected parameters: {', '.join(extra)}"
        if any(_has_hooks(part) for part in module.modules() if part is not module):
            return "a hook on one of its parts would no longer run"
    return _difference(module, getattr(cls, peer.method), peer, *weight.shape)


def _difference(module: nn.Module, method: Callable, peer: Peer, num_layers: int, in_features: int) -> str | None:
    """Runs the module's own code on random float64 numbers: another version may compute something else."""
    generator = torch.Generator().manual_seed(0)

    def random(rows: int) -> Tensor:
        return torch.randn(rows, in_features, dtype=torch.float64, generator=generator) * in_features**-0.5

    x0, weight, bias = random(3), random(num_layers), random(num_layers)
    try:
        state = {}
        for key, values in ((peer.weight, weight), (peer.bias, bias)):
            for layer in range(num_layers):
                shape = module.get_parameter(key.format(layer)).shape
                state[f"module.{key.format(layer)}"] = (values[layer] if "{}" in key else values).view(shape)
        with torch.no_grad(), torch.random.fork_rng(devices=()):
            theirs = torch.func.functional_call(_Call(module, method), state, x0, tie_weights=False)
        error = (theirs - closed_form.cross_network(x0, weight, bias)).abs().max().item()
    except Exception as failure:  # whatever another package's code may raise
        return f"its own code failed on a small input: {type(failure).__name__}: {failure}"
    return None if error < 1e-9 else f"it does not compute x0 (x·w) + b + x: off by {error:.2g} on a small input"


class _Call(nn.Module):
    """``method(module, x)``, without the hooks that calling the module would run."""

    def __init__(self, module: nn.Module, method: Callable) -> None:
        super().__init__()
        self.module, self.method = module, method

    def forward(self, x: Tensor) -> Tensor:
        return self.method(self.module, x)


def _has_hooks(module: nn.Module) -> bool:
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


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


def _stack(tensors: Tensor | list[Tensor]) -> Tensor:
    """(L, d), from (L, d, 1) or from L tensors (d,), (d, 1) or (1, d)."""
    return tensors.flatten(1) if isinstance(tensors, Tensor) else torch.stack([t.flatten() for t in tensors])


def cross_state_dict(state_dict: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """The state_dict of a :class:`fastcross.CrossNetwork`, from the checkpoint of any package in ``PEERS``.

    Args:
        state_dict: a checkpoint of a cross network, or of a whole model.
        prefix: what stands before the cross network's keys, such as ``"crossnet."``.

    Returns:
        ``{"weight": (L, d), "bias": (L, d)}``.
    """
    found = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
    formats = (Peer("weight", "bias"), *PEERS.values())
    peer = max(formats, key=lambda peer: len(_layers((peer.weight, peer.bias), found)))
    layers = _layers((peer.weight, peer.bias), found)
    if not layers:
        prefixes = sorted({p for key in state_dict for p in _prefixes(key)})
        hint = f"; there are some under {', '.join(map(repr, prefixes))}" if prefixes else ""
        raise ValueError(f"no keys of a cross network under the prefix {prefix!r}, of {len(state_dict)} keys{hint}")
    expected = peer.keys(max(layers) + 1)
    # RecBole's cross network is part of its model: the model's other keys lie beside it.
    mine = found if peer.method == "forward" else [key for key in found if key.startswith("cross_layer_")]
    missing = [prefix + key for key in expected if key not in found]
    extra = [prefix + key for key in mine if key not in expected]
    if missing or extra:
        raise ValueError(f"not a cross network's keys: missing {_listed(missing)}; extra {_listed(extra)}")

    def rows(key: str) -> Tensor:
        return _stack([found[key.format(layer)] for layer in range(max(layers) + 1)] if "{}" in key else found[key])

    shapes = ", ".join(f"{prefix + key} {tuple(found[key].shape)}" for key in expected)
    try:
        cross = {"weight": rows(peer.weight), "bias": rows(peer.bias)}
    except (RuntimeError, IndexError) as error:
        raise ValueError(f"the layers have different shapes: {shapes}") from error
    if cross["weight"].shape != cross["bias"].shape:
        raise ValueError(f"not one vector per layer: {shapes}")
    return cross


def _layers(templates: Iterable[str], keys: Iterable[str]) -> list[int]:
    """The layer number in each of the keys that fits one of the templates."""
    pattern = "|".join(re.escape(template).replace(r"\{\}", r"(\d+)") for template in templates)
    matches = [match for key in keys if (match := re.fullmatch(pattern, key))]
    return [int(match[match.lastindex] if match.lastindex else 0) for match in matches]


def _prefixes(key: str) -> Iterable[str]:
    """What stands before a key that ends like one of a cross network's weights."""
    ends = [key[dot.end() :] for dot in re.finditer(r"\.", key)]
    return (key.removesuffix(end) for end in ends if _layers((peer.weight for peer in PEERS.values()), [end]))


def _listed(keys: list[str]) -> str:
    return ", ".join(keys[:8]) + (f" and {len(keys) - 8} more" if len(keys) > 8 else "") if keys else "none"
