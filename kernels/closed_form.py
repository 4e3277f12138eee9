"""The closed form of the cross network in plain PyTorch operations.

The layers of one network share x0, so every x_l is a per-row scalar times x0 plus a vector common to all rows:

    x_l = α_l x0 + β_l
    p_l = x0·w_l        c_l = β_l·w_l
    α_0 = 1,  α_{l+1} = α_l (1 + p_l) + c_l
    β_0 = 0,  β_{l+1} = β_l + b_l

so that y = x_L = α_L x0 + β_L, and for a head V the logits are z = α_L (x0 Vᵀ) + β_L Vᵀ.

It runs on any device, for any floating dtype and any number of derivatives: the fallback if no kernel fits, and the
path of second derivatives. Dots run in float32 for half precision and in float64 for float64. These are PyTorch's
operators: they read x0 twice and write it once, at any depth. The fused kernels read it once.
"""

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor

from fastcross.kernels.layout import accumulation_dtype


def cross_layer(x0: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x0 (x·w) + b + x."""
    dtype = accumulation_dtype(x0, x, weight, bias)
    with without_autocast(x0):
        s = (x.to(dtype) @ weight.to(dtype)).unsqueeze(-1)
        y = x + s * x0 if bias is None else x + s * x0 + bias
        return y.to(x0.dtype)


def cross_network(x0: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = α_L x0 + β_L."""
    dtype = accumulation_dtype(x0, weight, bias)
    with without_autocast(x0):
        alpha, beta = _alpha_beta(x0.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        y = alpha.unsqueeze(-1) * x0
        return (y if beta is None else y + beta).to(x0.dtype)


def cross_logits(x0: Tensor, weight: Tensor, bias: Tensor | None, head: Tensor) -> Tensor:
    """z = α_L q + β_L Vᵀ with q = x0 Vᵀ, without forming x_L."""
    dtype = accumulation_dtype(x0, weight, bias, head)
    with without_autocast(x0):
        rows, v = x0.to(dtype), head.to(dtype)
        alpha, beta = _alpha_beta(rows, weight.to(dtype), None if bias is None else bias.to(dtype))
        z = alpha.unsqueeze(-1) * (rows @ v.T)
        return (z if beta is None else z + v @ beta).to(x0.dtype)


def folded_logits(
    table: Tensor, ids: Tensor | None, starts: Tensor | None, base: Tensor, constants: Tensor, layers: int
) -> Tensor:
    """z = α_L q + constant, the dots p and q being base + Σ_j table[starts_j + ids_j], or base + table without ids."""
    if ids is None:
        sums = base + table
    else:
        assert starts is not None
        # An id that is none must not be another feature's: it becomes one that the lookup refuses.
        place = torch.where((ids >= 0) & (ids < starts.diff()), ids + starts[:-1], table.shape[0])
        sums = base + F.embedding(place, table).sum(1)
    p = sums.to(sums.dtype if sums.device.type == "mps" else torch.float64)
    alpha = torch.ones_like(p[:, 0])
    for layer in range(layers):
        alpha = alpha * (1 + p[:, layer]) + constants[layer]
    return (alpha.unsqueeze(-1) * p[:, layers:] + constants[layers:]).to(table.dtype)


def _alpha_beta(x0: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The recurrence: α_L per row, β_L per feature (None without biases)."""
    # Rounding errors grow with the depth, and the recurrence is small: float64 if the device has it.
    wide = x0.dtype if x0.device.type == "mps" else torch.float64
    p = (x0 @ weight.T).to(wide)
    alpha, beta = torch.ones_like(p[..., 0]), None
    for layer in range(weight.shape[0]):
        step = alpha * (1 + p[..., layer])
        alpha = step if beta is None else step + beta @ weight[layer].to(wide)
        if bias is not None:
            beta = bias[layer].to(wide) if beta is None else beta + bias[layer].to(wide)
    return alpha.to(x0.dtype), None if beta is None else beta.to(x0.dtype)


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Disables autocast, which would round the dots to half precision."""
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):  # meta has no autocast
        return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()
