"""What fastcross knows of another package's cross network: the path of its class and where its parameters lie."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

MATRICES = "matrices, not one vector per layer"
LOW_RANK = "low-rank matrices, not one vector per layer"


@dataclass(frozen=True)
class Peer:
    """One package's rank-one cross network. Nothing of the package is imported.

    Args:
        path: where its class is defined, ``package.module.Class``.
        weight, bias: its keys in a state_dict; ``{}`` stands for the layer, and a key without it holds all layers.
        method: the method that computes the cross network.
        leading_dimensions: whether it takes (..., d); otherwise (B, d) only.
        others: classes of the package that only look like this one, each with what it computes instead.
    """

    path: str
    weight: str
    bias: str
    method: str = "forward"
    leading_dimensions: bool = True
    others: tuple[tuple[str, str], ...] = ()

    def parameters(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        """(L, d) weights and biases: views where the package keeps one tensor, else stacked, differentiably."""
        return stack_layers(_tensors(module, self.weight)), stack_layers(_tensors(module, self.bias))

    def keys(self, num_layers: int) -> list[str]:
        """The state_dict keys of a network of ``num_layers`` layers."""
        names = (key.format(layer) for key in (self.weight, self.bias) for layer in range(num_layers))
        return list(dict.fromkeys(names))


def stack_layers(tensors: Tensor | list[Tensor]) -> Tensor:
    """(L, d), from (L, d, 1) or from L tensors (d,), (d, 1) or (1, d)."""
    return tensors.flatten(1) if isinstance(tensors, Tensor) else torch.stack([t.flatten() for t in tensors])


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
