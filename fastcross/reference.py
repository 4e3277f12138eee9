"""The paper's equations, layer by layer, in plain PyTorch: the definition of correct.

Nothing here is fast. Every other backend is tested against these functions.
"""

import itertools
from collections.abc import Sequence

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
