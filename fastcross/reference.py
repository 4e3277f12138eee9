"""The paper's equations, layer by layer, in plain PyTorch: the definition of correct.

Nothing here is fast. Every other backend is tested against these functions.
"""

import torch
from torch import Tensor


def cross_layer(x0: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """One cross layer (eq. 3): ``y = x0 (xᵀ w) + b + x``, for each row of ``x0`` and ``x``."""
    y = x0 * (x @ weight).unsqueeze(-1)
    if bias is not None:
        y = y + bias
    return y + x


def cross_network(x0: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """L cross layers: ``x_{l+1} = x0 (x_lᵀ w_l) + b_l + x_l``; returns ``x_L``."""
    x = x0
    for layer in range(weight.shape[0]):
        x = cross_layer(x0, x, weight[layer], None if bias is None else bias[layer])
    return x


def cross_logits(x0: Tensor, weight: Tensor, bias: Tensor | None, head: Tensor) -> Tensor:
    """The cross network's part of the combination layer (eq. 5): ``z = x_L Vᵀ`` with ``head`` = V, (C, d)."""
    return torch.nn.functional.linear(cross_network(x0, weight, bias), head)
