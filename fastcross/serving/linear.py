"""Linear layers with weights that no longer change."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# oneDNN's linear with packed weights is private, and PyTorch itself uses it in torch.compile alone: (10, 1056) by
# (1056, 1024) takes 0.25 ms in float32, and 0.39 with MKL's sgemm, which F.linear calls; 64 rows 1.27 and 1.52 (AMD
# EPYC, one thread; an earlier measurement had 0.58 and 1.46).
_LINEAR = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None
_PACK = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
ROWS = 64  # for which the weights are packed; other numbers of rows take them as they are


class Linear:
    """x Wᵀ + b, and its ReLU.

    Args:
        weight, bias: (n, d) and (n,).
        relu: whether the ReLU is taken.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, relu: bool = False) -> None:
        self.weight, self.bias, self.relu = weight, bias, relu
        fits = weight.is_cpu and weight.dtype == torch.float32 and weight.numel() > 0
        self.packed = _PACK(weight.contiguous(), ROWS) if fits and _LINEAR is not None and _PACK is not None else None

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed is not None and len(x):
            assert _LINEAR is not None
            return _LINEAR(x, self.packed, self.bias, "relu" if self.relu else "none", [], "")
        h = F.linear(x, self.weight, self.bias)
        return h.relu_() if self.relu else h


class Deep(nn.Module):
    """A deep network in evaluation, as (W, b) of layers with a ReLU each."""

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.layers = [Linear(weight, bias, relu=True) for weight, bias in layers]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def linear_layers(deep: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """The W and b of a deep network in evaluation, ``h = ReLU(W h + b)`` for each; batch normalisation is in them."""
    weights: list[Tensor] = []
    biases: list[Tensor] = []
    for module in deep.children():
        if isinstance(module, nn.Linear):
            weights.append(module.weight.detach())
            missing = module.weight.new_zeros(len(module.weight))
            biases.append(missing if module.bias is None else module.bias.detach())
        elif isinstance(module, nn.BatchNorm1d):
            mean, variance = module.running_mean, module.running_var
            assert mean is not None
            assert variance is not None
            scale = module.weight.detach() * (variance + module.eps).rsqrt()
            weights[-1] = weights[-1] * scale[:, None]
            biases[-1] = (biases[-1] - mean) * scale + module.bias.detach()
        elif not isinstance(module, nn.ReLU | nn.Dropout):
            raise ValueError(f"Linear, BatchNorm1d, ReLU and Dropout are known in a deep network; got {module}")
    return [*zip(weights, biases, strict=True)]
