"""DCN-V2's, GDCN's and FCN's layers in PyTorch's operators: ``x_{l+1} = x0 ⊙ h(x_l) + x_l``.

They run on any device, for any floating dtype and any number of derivatives: the fallback if no kernel fits, and the
path of second derivatives. All operands have one dtype. The number of GEMMs is minimal: the mixture takes three per
layer for any number of experts, the gated layer one.

    matrix      h = W x + b
    low rank    h = f(U V x + b) + diag x
    mixture     h = [U_1 … U_K] [p_1 h_1; …; p_K h_K] + b,  h_k = f(C_k f(V_k x)),  p = softmax(G x):  Σ p_k = 1
    gated       h = (W x + b) ⊙ σ(G x)
    FCN         h = [s, s ⊙ relu(LayerNorm(s))] + b,  s = W x  (d/2 numbers)
"""

import torch
import torch.nn.functional as F
from torch import Tensor


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


def activated(h: Tensor, activation: str | None) -> Tensor:
    """f(h): None is the identity."""
    return h if activation is None else torch.relu(h) if activation == "relu" else torch.tanh(h)


def _of(bias: Tensor | None, layer: int) -> Tensor | None:
    return None if bias is None else bias[layer]
