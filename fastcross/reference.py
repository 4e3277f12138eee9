"""The paper's equations, layer by layer, in plain PyTorch: the definition of correct.

Nothing here is fast. Every other backend is tested against these functions.
"""

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
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
    return F.linear(cross_network(x0, weight, bias), head)


def cross_matrix(x0: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """DCN-V2: ``x_{l+1} = x0 ⊙ (W_l x_l + b_l) + x_l`` with ``weight`` (L, d, d); returns ``x_L``."""
    x = x0
    for layer, w in enumerate(weight):
        x = x0 * F.linear(x, w, None if bias is None else bias[layer]) + x
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
    """DCN-V2, low rank: ``x_{l+1} = x0 ⊙ (f(U_l V_l x_l + b_l) + diag_scale x_l) + x_l``, U_l (d, r) and V_l (r, d)."""
    x = x0
    for layer in range(len(u)):
        h = F.linear(F.linear(x, v[layer]), u[layer], None if bias is None else bias[layer])
        x = x0 * (_activated(h, activation) + diag_scale * x) + x
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
    """DCN-V2, a mixture of K low-rank experts, each with U (d, r), C (r, r) and V (r, d):

    ``x_{l+1} = x_l + Σ_k softmax_k(G x_l) x0 ⊙ (U_k f(C_k f(V_k x_l)) + b_l)``.

    ``gate`` is (K, d) for all layers or (L, K, d); it may be None for K = 1, whose softmax is 1.
    """
    x = x0
    for layer in range(len(u)):
        total = x
        if gate is None:
            p = torch.ones_like(x[..., :1])
        else:
            g, g_bias = (
                (gate, gate_bias) if gate.dim() == 2 else (gate[layer], None if gate_bias is None else gate_bias[layer])
            )
            p = torch.softmax(F.linear(x, g, g_bias), -1)
        for k in range(u.shape[1]):
            h = _activated(F.linear(x, v[layer, k]), activation)
            h = _activated(F.linear(h, c[layer, k]), activation)
            expert = x0 * F.linear(h, u[layer, k], None if bias is None else bias[layer])
            total = total + p[..., k : k + 1] * expert
        x = total
    return x


def cross_gated(x0: Tensor, weight: Tensor, gate: Tensor, bias: Tensor | None = None) -> Tensor:
    """GDCN: ``x_{l+1} = x0 ⊙ (W_l x_l + b_l) ⊙ σ(G_l x_l) + x_l``."""
    x = x0
    for layer, (w, g) in enumerate(zip(weight, gate, strict=True)):
        x = x0 * F.linear(x, w, None if bias is None else bias[layer]) * torch.sigmoid(F.linear(x, g)) + x
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
    """FCN: with h = W_l x_l (d/2) and h' = [h, h ⊙ relu(LayerNorm(h))],

    ``x_{l+1} = x0 ⊙ (h' + b_l) + x_l``, or with ``x_l`` in place of ``x0`` in the exponential network.
    """
    x = x0
    for layer, w in enumerate(weight):
        h = F.linear(x, w)
        mask = torch.relu(F.layer_norm(h, h.shape[-1:], norm_weight[layer], norm_bias[layer], eps))
        x = (x if exponential else x0) * (torch.cat((h, h * mask), -1) + bias[layer]) + x
    return x


def _activated(h: Tensor, activation: str | None) -> Tensor:
    return h if activation is None else {"relu": torch.relu, "tanh": torch.tanh}[activation](h)


def embedding_stack(
    dense: Tensor,
    categorical: Tensor,
    tables: Sequence[Tensor],
    bags: Sequence[tuple[Tensor, Tensor, Tensor | None]] = (),
    pooling: str = "mean",
) -> Tensor:
    """Equations 1 and 2: ``x0 = [W_1 x_1, …, W_k x_k, x_dense]``, W_i x_i being the row of table i that the id names.

    For a bag (values, offsets, weights), row m owns values[offsets[m] : offsets[m + 1]], and the rows that these name
    are summed, each times its weight; "mean" divides by the sum of the weights, and gives 0 where that is 0.
    """
    parts = [table[ids] for table, ids in zip(tables, categorical.unbind(1), strict=False)]
    for table, (values, offsets, weights) in zip(tables[len(parts) :], bags, strict=True):
        weights = torch.ones(len(values)) if weights is None else weights
        bounds, rows = [*offsets.tolist(), len(values)], []
        for start, end in itertools.pairwise(bounds):
            weight = weights[start:end].to(table).unsqueeze(1)
            rows.append((weight * table[values[start:end]]).sum(0))
            if pooling == "mean":
                rows[-1] = rows[-1] / weight.sum() if weight.sum() != 0 else 0 * rows[-1]
        parts.append(torch.stack(rows) if rows else table[:0])
    embedded = torch.cat(parts, dim=1) if parts else dense[:, :0]
    return torch.cat((embedded, dense.to(embedded.dtype)), dim=1)
