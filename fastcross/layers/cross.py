"""The cross layer and the cross networks as modules: parameters and initialisation only."""

from typing import Any

import torch
from torch import Tensor, nn

from fastcross.layers.peers import VECTOR, cross_parameters
from fastcross.ops import (
    cross_fcn,
    cross_gated,
    cross_layer,
    cross_logits,
    cross_low_rank,
    cross_matrix,
    cross_mixture,
    cross_network,
)
from fastcross.ops.multiplicative import check_activation


class CrossLayer(nn.Module):
    """One cross layer (eq. 3): ``y = x0 (xᵀ w) + b + x``.

    Initialisation: w ~ N(0, 1/d), so that xᵀw has unit variance for unit-variance x; b = 0.

    Args:
        in_features: d.
        bias: whether the layer has a bias b.
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
    second moment 1 + 1/L, and their product at most e at any depth. So an untrained deep network stays finite in half
    precision.

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
        """A copy of another package's cross network; :func:`fastcross.swap` lists the packages."""
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
        """``x_L Vᵀ`` with ``head`` = V, (C, d): equals ``self(x0) @ head.T``, without writing ``x_L``."""
        return cross_logits(x0, self.weight, self.bias, head, backend=self.backend)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, num_layers={self.num_layers}, "
            f"bias={self.bias is not None}, backend={self.backend!r}"
        )


class _Multiplicative(nn.Module):
    """The base of the networks ``x_{l+1} = x0 ⊙ h(x_l) + x_l``. Parameters are stacked over L layers."""

    def __init__(self, in_features: int, num_layers: int, backend: str, **sizes: int) -> None:
        super().__init__()
        _check_positive(in_features=in_features, num_layers=num_layers, **sizes)
        self.in_features, self.num_layers, self.backend = in_features, num_layers, backend

    def reset_parameters(self) -> None:
        """Xavier normal initialisation of each matrix; biases are 0."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=(2 / (parameter.shape[-1] + parameter.shape[-2])) ** 0.5)

    def extra_repr(self) -> str:
        shapes = ", ".join(f"{name}={tuple(parameter.shape)}" for name, parameter in self.named_parameters())
        return f"{shapes}, backend={self.backend!r}"


class CrossMatrix(_Multiplicative):
    """DCN-V2's cross network: ``x_{l+1} = x0 ⊙ (W_l x_l + b_l) + x_l``, returning ``x_L``.

    Args:
        in_features: d.
        num_layers: L.
        bias: whether the layers have b_l.
        backend: see :func:`fastcross.cross_layer`.
    """

    def __init__(
        self, in_features: int, num_layers: int, bias: bool = True, *, backend: str = "auto", **factory: Any
    ) -> None:
        super().__init__(in_features, num_layers, backend)
        self.weight = nn.Parameter(torch.empty(num_layers, in_features, in_features, **factory))
        self.bias = nn.Parameter(torch.empty(num_layers, in_features, **factory)) if bias else None
        self.reset_parameters()

    def forward(self, x0: Tensor) -> Tensor:
        return cross_matrix(x0, self.weight, self.bias, backend=self.backend)


class CrossLowRank(_Multiplicative):
    """DCN-V2, low rank: ``x_{l+1} = x0 ⊙ (f(U_l V_l x_l + b_l) + diag_scale x_l) + x_l``, returning ``x_L``.

    Args:
        in_features: d.
        num_layers: L.
        rank: r; the paper takes d/4 as a rule of thumb.
        activation, diag_scale: f and the factor of the identity: see :func:`fastcross.cross_low_rank`.
        bias: whether the layers have b_l.
        backend: see :func:`fastcross.cross_layer`.
    """

    def __init__(
        self,
        in_features: int,
        num_layers: int,
        rank: int,
        bias: bool = True,
        *,
        activation: str | None = None,
        diag_scale: float = 0.0,
        backend: str = "auto",
        **factory: Any,
    ) -> None:
        super().__init__(in_features, num_layers, backend, rank=rank)
        check_activation(activation)
        self.activation, self.diag_scale = activation, diag_scale
        self.u = nn.Parameter(torch.empty(num_layers, in_features, rank, **factory))
        self.v = nn.Parameter(torch.empty(num_layers, rank, in_features, **factory))
        self.bias = nn.Parameter(torch.empty(num_layers, in_features, **factory)) if bias else None
        self.reset_parameters()

    def forward(self, x0: Tensor) -> Tensor:
        return cross_low_rank(
            x0,
            self.u,
            self.v,
            self.bias,
            activation=self.activation,
            diag_scale=self.diag_scale,
            backend=self.backend,
        )


class CrossMixture(_Multiplicative):
    """DCN-V2, a mixture of K low-rank experts, returning ``x_L`` of

    ``x_{l+1} = x_l + Σ_k softmax_k(G x_l) x0 ⊙ (U_k f(C_k f(V_k x_l)) + b_l)``.

    Args:
        in_features: d.
        num_layers: L.
        rank: r.
        experts: K.
        shared_gate: whether all layers share one G, (K, d).
        gate_bias: whether G has a bias.
        bias: whether the layers have b_l.
        activation: f: None, "relu" or "tanh".
        backend: see :func:`fastcross.cross_layer`.
    """

    def __init__(
        self,
        in_features: int,
        num_layers: int,
        rank: int,
        experts: int,
        *,
        shared_gate: bool = True,
        gate_bias: bool = False,
        bias: bool = True,
        activation: str | None = "tanh",
        backend: str = "auto",
        **factory: Any,
    ) -> None:
        super().__init__(in_features, num_layers, backend, rank=rank, experts=experts)
        check_activation(activation)
        self.activation = activation
        gates = (experts,) if shared_gate else (num_layers, experts)
        self.u = nn.Parameter(torch.empty(num_layers, experts, in_features, rank, **factory))
        self.c = nn.Parameter(torch.empty(num_layers, experts, rank, rank, **factory))
        self.v = nn.Parameter(torch.empty(num_layers, experts, rank, in_features, **factory))
        self.bias = nn.Parameter(torch.empty(num_layers, in_features, **factory)) if bias else None
        self.gate = nn.Parameter(torch.empty(*gates, in_features, **factory))
        self.gate_bias = nn.Parameter(torch.empty(gates, **factory)) if gate_bias else None
        self.reset_parameters()

    def forward(self, x0: Tensor) -> Tensor:
        parameters = self.u, self.c, self.v, self.bias, self.gate, self.gate_bias
        return cross_mixture(x0, *parameters, activation=self.activation, backend=self.backend)


class CrossGated(_Multiplicative):
    """GDCN's gated cross network: ``x_{l+1} = x0 ⊙ (W_l x_l + b_l) ⊙ σ(G_l x_l) + x_l``, returning ``x_L``.

    Args:
        in_features: d.
        num_layers: L.
        bias: whether the layers have b_l.
        backend: see :func:`fastcross.cross_layer`.
    """

    def __init__(
        self, in_features: int, num_layers: int, bias: bool = True, *, backend: str = "auto", **factory: Any
    ) -> None:
        super().__init__(in_features, num_layers, backend)
        self.weight = nn.Parameter(torch.empty(num_layers, in_features, in_features, **factory))
        self.gate = nn.Parameter(torch.empty_like(self.weight))
        self.bias = nn.Parameter(torch.empty(num_layers, in_features, **factory)) if bias else None
        self.reset_parameters()

    def forward(self, x0: Tensor) -> Tensor:
        return cross_gated(x0, self.weight, self.gate, self.bias, backend=self.backend)


class CrossFCN(_Multiplicative):
    """FCN's cross network (earlier DCNv3), returning ``x_L`` of ``x_{l+1} = x0 ⊙ ([h, h ⊙ m] + b_l) + x_l``

    with ``h = W_l x_l``, d/2 numbers, and ``m = relu(LayerNorm(h))``. b starts uniform in (0, 1), as in FCN.

    Args:
        in_features: d, even. FCN arranges x0 so that the first halves of all embeddings come first.
        num_layers: L.
        exponential: use ``x_l`` instead of ``x0`` as the first factor; the degree then doubles with each layer.
        eps: ε of the LayerNorm.
        backend: see :func:`fastcross.cross_layer`.
    """

    def __init__(
        self,
        in_features: int,
        num_layers: int,
        *,
        exponential: bool = False,
        eps: float = 1e-5,
        backend: str = "auto",
        **factory: Any,
    ) -> None:
        super().__init__(in_features, num_layers, backend)
        if in_features % 2:
            raise ValueError(f"in_features must be even; got in_features = {in_features}")
        self.exponential, self.eps = exponential, eps
        self.weight = nn.Parameter(torch.empty(num_layers, in_features // 2, in_features, **factory))
        self.bias = nn.Parameter(torch.empty(num_layers, in_features, **factory))
        self.norm_weight = nn.Parameter(torch.empty(num_layers, in_features // 2, **factory))
        self.norm_bias = nn.Parameter(torch.empty_like(self.norm_weight))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.uniform_(self.bias)
        nn.init.ones_(self.norm_weight)

    def forward(self, x0: Tensor) -> Tensor:
        parameters = self.weight, self.bias, self.norm_weight, self.norm_bias
        return cross_fcn(x0, *parameters, exponential=self.exponential, eps=self.eps, backend=self.backend)


def _check_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1; got {name} = {size}")
