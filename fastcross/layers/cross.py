"""The cross layer and the cross network as modules: parameters and initialisation only."""

import torch
from torch import Tensor, nn

from fastcross.layers.peers import VECTOR
from fastcross.layers.recognise import cross_parameters
from fastcross.ops import cross_layer, cross_logits, cross_network


class CrossLayer(nn.Module):
    """One cross layer (eq. 3): ``y = x0 (xᵀ w) + b + x``.

    Initialisation: w ~ N(0, 1/d), so that xᵀw has unit variance for unit-variance x; b = 0.

    Args:
        in_features: d.
        bias: whether there is a b.
        backend: see :func:`fastcross.cross_layer`.
    """

    def __init__(
        self,
        in_features: int,
        bias: bool = True,
        *,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_positive(in_features=in_features)
        self.in_features, self.backend = in_features, backend
        self.weight = nn.Parameter(torch.empty(in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty_like(self.weight)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.in_features**-0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        return cross_layer(x0, x, self.weight, self.bias, backend=self.backend)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, bias={self.bias is not None}, backend={self.backend!r}"


class CrossNetwork(nn.Module):
    """L cross layers: ``x_{l+1} = x0 (x_lᵀ w_l) + b_l + x_l``, returning ``x_L``, in one pass over ``x0``.

    Initialisation: w_l ~ N(0, 1/(d·L)), b_l = 0. For unit-variance x0 each factor 1 + x0ᵀw_l of the output then has
    second moment 1 + 1/L, and their product at most e whatever the depth: an untrained deep network stays finite in
    half precision.

    Args:
        in_features: d.
        num_layers: L.
        bias: whether the layers have b_l.
        backend: see :func:`fastcross.cross_layer`.
    """

    def __init__(
        self,
        in_features: int,
        num_layers: int,
        bias: bool = True,
        *,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_positive(in_features=in_features, num_layers=num_layers)
        self.in_features, self.num_layers, self.backend = in_features, num_layers, backend
        self.weight = nn.Parameter(torch.empty(num_layers, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty_like(self.weight)) if bias else None
        self.reset_parameters()

    @classmethod
    def from_module(cls, module: nn.Module, *, backend: str = "auto") -> "CrossNetwork":
        """A copy of another package's cross network: see :func:`fastcross.swap` for those that are known."""
        parameters = {name: value.detach() for name, value in cross_parameters(module, VECTOR).items()}
        weight = parameters["weight"]
        network = cls(weight.shape[1], len(weight), backend=backend, device=weight.device, dtype=weight.dtype)
        network.load_state_dict(parameters)
        return network

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=(self.in_features * self.num_layers) ** -0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x0: Tensor) -> Tensor:
        return cross_network(x0, self.weight, self.bias, backend=self.backend)

    def logits(self, x0: Tensor, head: Tensor) -> Tensor:
        """``x_L Vᵀ`` with ``head`` = V, (C, d): the same as ``self(x0) @ head.T``, without writing ``x_L``."""
        return cross_logits(x0, self.weight, self.bias, head, backend=self.backend)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, num_layers={self.num_layers}, "
            f"bias={self.bias is not None}, backend={self.backend!r}"
        )


def _check_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1; got {name} = {size}")
