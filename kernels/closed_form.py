"""Every cross operator in PyTorch's own operators: the paper's in closed form, DCN-V2's family in the fewest GEMMs.

They run on any device, for any floating dtype and any number of derivatives: the fallback if no kernel fits, and the
path of second derivatives.

The layers of the paper's network share x0, so every x_l is a per-row scalar times x0 plus a vector common to all rows:

    x_l = α_l x0 + β_l
    p_l = x0·w_l        c_l = β_l·w_l
    α_0 = 1,  α_{l+1} = α_l (1 + p_l) + c_l
    β_0 = 0,  β_{l+1} = β_l + b_l

so that y = x_L = α_L x0 + β_L, and for a head V the logits are z = α_L (x0 Vᵀ) + β_L Vᵀ.

Dots run in float32 for half precision and in float64 for float64. At any depth x0 is read twice and written once; the
fused kernels read it once.

DCN-V2's, GDCN's and FCN's layers are x_{l+1} = x0 ⊙ h(x_l) + x_l. All operands have one dtype:

    matrix      h = W x + b
    low rank    h = f(U V x + b) + diag x
    mixture     h = [U_1 … U_K] [p_1 h_1; …; p_K h_K] + b,  h_k = f(C_k f(V_k x)),  p = softmax(G x):  Σ p_k = 1
    gated       h = (W x + b) ⊙ σ(G x)
    FCN         h = [s, s ⊙ relu(LayerNorm(s))] + b,  s = W x  (d/2 numbers)

The mixture takes three GEMMs per layer for any number of experts, the gated layer one.
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


def cross_matrix(x0: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    x = x0
    for layer, w in enumerate(weight.unbind()):
        x = torch.addcmul(x, x0, F.linear(x, w, _of(bias, layer)))
    return x


def cross_low_rank(
    x0: Tensor,
    u: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    diag_scale: float = 0.0,
) -> Tensor:
    x = x0
    for layer in range(u.shape[0]):
        h = activated(F.linear(F.linear(x, v[layer]), u[layer], _of(bias, layer)), activation)
        x = torch.addcmul(x, x0, h if diag_scale == 0 else h + diag_scale * x)
    return x


def cross_mixture(
    x0: Tensor,
    u: Tensor,
    c: Tensor,
    v: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
    gate_bias: Tensor | None = None,
    *,
    activation: str | None = "tanh",
) -> Tensor:
    x, (layers, experts, _, rank) = x0, u.shape
    down, up = stacked_experts(u, v, gate)
    for layer in range(layers):
        a = F.linear(x, down[layer])
        h = activated(a[..., : experts * rank], activation).unflatten(-1, (experts, rank))
        h = activated(torch.einsum("...kr,ksr->...ks", h, c[layer]), activation)
        if gate is not None:
            # A gate's gradient sums small differences of both signs: in float64, for K numbers per row.
            logits = a[..., experts * rank :].double()
            if gate_bias is not None:
                logits = logits + (gate_bias if gate_bias.dim() == 1 else gate_bias[layer]).double()
            h = h * torch.softmax(logits, -1).to(h.dtype).unsqueeze(-1)
        x = torch.addcmul(x, x0, F.linear(h.flatten(-2), up[layer], _of(bias, layer)))
    return x


def stacked_experts(u: Tensor, v: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor]:
    """[V_1; …; V_K; G] of each layer, (L, K (r + 1), d), and [U_1 … U_K], (L, d, K r)."""
    down = v.flatten(1, 2)
    if gate is not None:
        down = torch.cat((down, gate if gate.dim() == 3 else gate.expand(v.shape[0], -1, -1)), 1)
    return down, u.transpose(1, 2).flatten(2)


def cross_gated(x0: Tensor, weight: Tensor, gate: Tensor, bias: Tensor | None = None) -> Tensor:
    x, both = x0, torch.cat((weight, gate), 1)
    for layer in range(weight.shape[0]):
        u, t = F.linear(x, both[layer]).chunk(2, -1)
        u = u if bias is None else u + bias[layer]
        x = torch.addcmul(x, x0, u * torch.sigmoid(t))
    return x


def cross_fcn(
    x0: Tensor,
    weight: Tensor,
    bias: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    *,
    exponential: bool = False,
    eps: float = 1e-5,
) -> Tensor:
    x = x0
    for layer in range(weight.shape[0]):
        s = F.linear(x, weight[layer])
        mask = torch.relu(F.layer_norm(s, s.shape[-1:], norm_weight[layer], norm_bias[layer], eps))
        x = torch.addcmul(x, x if exponential else x0, torch.cat((s, s * mask), -1) + bias[layer])
    return x


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


def activated(h: Tensor, activation: str | None) -> Tensor:
    """f(h): None is the identity."""
    return h if activation is None else torch.relu(h) if activation == "relu" else torch.tanh(h)


def _of(bias: Tensor | None, layer: int) -> Tensor | None:
    return None if bias is None else bias[layer]
