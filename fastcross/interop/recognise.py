"""Which modules are rank-one cross networks of a package that fastcross knows.

A module is known by the path of its class, by its registered parameters and by a proof (:mod:`.proof`). Recognition
only reads: it calls nothing of the module itself, so whatever is left is bit for bit what it was.
"""

import re

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from fastcross.interop.peers import PEERS, Peer
from fastcross.interop.peers.peer import LOW_RANK, MATRICES, stack_layers
from fastcross.interop.proof import difference, registered

# What looks like a cross layer and is none that these operators compute. The first match gives the reason.
_OTHERS = (
    (r"Gate\w*(Cross|Corss)", "gated"),
    (r"Cross\w*Mix|Mixture\w*Cross", "mixture of low-rank experts, not one vector per layer"),
    (r"LowRankCross|\.CrossV2$", LOW_RANK),
    (r"CrossNetV2$|\.DCNV2$|FeatureCross$", MATRICES),
    (r"Cross(Net|Network|Layer)?$", "no class of a package that fastcross knows"),
)


def class_path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def recognise(module: nn.Module) -> Peer | str | None:
    """The peer whose cross network ``module`` is; why not, if it only looks like one; None for anything else."""
    if isinstance(module, torch.jit.ScriptModule):
        looks_like = any(re.search(pattern, f".{module.original_name}") for pattern, _ in _OTHERS)
        return "compiled to TorchScript, which fixes its code; swap before scripting" if looks_like else None
    classes = [cls for cls in type(module).__mro__ if "peer_class" not in vars(cls)]  # swapped: as it was before
    for cls in classes:
        peer = PEERS.get(class_path(cls))
        if peer is not None:
            defined_by = next((c for c in classes if peer.method in vars(c)), None)
            return _reason_to_leave(module, cls, defined_by, peer) or peer
    name = class_path(type(module))
    if name.startswith("fastcross."):
        return None
    known = (reason for peer in PEERS.values() for path, reason in peer.others if path == name)
    return next(known, next((reason for pattern, reason in _OTHERS if re.search(pattern, name)), None))


def cross_parameters(module: nn.Module) -> tuple[Tensor, Tensor]:
    """The (L, d) weights and biases of another package's cross network; TypeError if it is none that is known."""
    peer = recognise(module)
    if not isinstance(peer, Peer):
        kind = class_path(type(module))
        raise TypeError(f"no cross network of a package that fastcross knows: {kind}{f': {peer}' if peer else ''}")
    return peer.parameters(module)


def cross_shapes(module: nn.Module, peer: Peer) -> tuple[Tensor, Tensor]:
    """The (L, d) weights and biases on the meta device, wherever the parameters are: sharded over processes, too."""
    return _on_meta(module, peer.weight), _on_meta(module, peer.bias)


def _on_meta(module: nn.Module, key: str) -> Tensor:
    names = [key] if "{}" not in key else [key.format(layer) for layer in range(_count_layers(module, key))]
    found = [registered(module, name) for name in names]
    tensors = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in found]
    return stack_layers(tensors if "{}" in key else tensors[0])


def _count_layers(module: nn.Module, key: str) -> int:
    container = key.partition(".{}")[0]
    owner = module._modules.get(container)
    if owner is None:
        raise AttributeError(f"there is no {container}")
    layer = 0
    while str(layer) in owner._parameters or str(layer) in owner._modules:
        layer += 1
    return layer


def _reason_to_leave(module: nn.Module, cls: type, defined_by: type | None, peer: Peer) -> str | None:
    if peer.method in vars(module):
        return f"this instance has its own {peer.method}"
    if defined_by is not cls:
        return f"{class_path(defined_by or cls)} has {'its own' if defined_by else 'no'} {peer.method}"
    try:
        weight, bias = cross_shapes(module, peer)
    except (AttributeError, TypeError, RuntimeError, IndexError, ValueError) as error:
        return f"unexpected parameters: {error}"
    if weight.shape != bias.shape and weight.numel() == bias.numel() * bias.shape[-1]:
        return MATRICES
    if weight.shape != bias.shape or weight.dim() != 2 or weight.numel() == 0 or not weight.is_floating_point():
        shapes = f"weights {tuple(weight.shape)} {weight.dtype} and biases {tuple(bias.shape)} {bias.dtype}"
        return f"unexpected shapes: {shapes}"
    if peer.method == "forward":
        names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        if extra := sorted(names - set(peer.keys(len(weight)))):
            return f"unexpected parameters: {', '.join(extra)}"
        if _hooks_on_parts(module, peer):
            return "a hook on one of its parts would no longer run"
    return difference(module, cls, peer, *weight.shape)


def _hooks_on_parts(module: nn.Module, peer: Peer) -> bool:
    parts = [part for part in module.modules() if part is not module]
    calls_parts = "{}." in peer.weight
    # Global hooks run for every module that is called: torch keeps no public way to ask whether there are any.
    any_global = getattr(torch_module, "_has_any_global_hook", bool)
    return (calls_parts and any_global()) or any(
        part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
        for part in parts
    )
