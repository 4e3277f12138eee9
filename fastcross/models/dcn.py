"""The Deep & Cross Network, beside section 2 of the paper: embedding and stacking, cross ∥ deep, combination, loss."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcross.fields import layer_sizes
from fastcross.layers.cross import (
    CrossFCN,
    CrossGated,
    CrossLowRank,
    CrossMatrix,
    CrossMixture,
    CrossNetwork,
)
from fastcross.models import CROSS_TYPES
from fastcross.models.base import Model, ModelConfig, embedding_layer, takes_fields_of
from fastcross.ops.embedding import Bags


@dataclass(frozen=True)
class DeepConfig(ModelConfig):
    """The deep network and the logits. The defaults are the middle of the paper's grid for Criteo (section 4.2)."""

    deep_layers: Sequence[int] = field(default=(1024, 1024), kw_only=True)  # sizes; a text such as "292x6" becomes them
    batch_norm: bool = field(default=True, kw_only=True)  # between W h and the ReLU
    dropout: float = field(default=0.0, kw_only=True)  # after each ReLU
    logits_bias: bool = field(default=True, kw_only=True)  # eq. 5 has none

    def __post_init__(self) -> None:
        if isinstance(self.deep_layers, str):
            try:
                object.__setattr__(self, "deep_layers", layer_sizes(self.deep_layers))
            except ValueError as error:
                raise TypeError(f"deep_layers must be a sequence of integers; {error}") from None
        super().__post_init__()
        if any(size < 1 for size in self.deep_layers):
            raise ValueError(f"every deep layer must be at least 1; got deep_layers = {self.deep_layers}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1); got {self.dropout}")


@dataclass(frozen=True)
class DCNConfig(DeepConfig):
    """DCN's own choices."""

    cross_layers: int = field(default=6, kw_only=True)  # L_c; 0: deep only, the paper's DNN
    cross_type: str = field(default="vector", kw_only=True)  # the paper's, or another of CROSS_TYPES
    rank: int | None = field(default=None, kw_only=True)  # r of "low_rank" and "mixture"; None: d/4, as DCN-V2 has it
    experts: int = field(default=4, kw_only=True)  # K of "mixture"
    structure: str = field(default="parallel", kw_only=True)  # or "stacked": the deep network reads x_L, not x0
    deep_start: float = field(default=1.0, kw_only=True)  # factor of the initial logits' weights for h, if parallel

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.structure not in ("parallel", "stacked"):
            raise ValueError(f'structure must be "parallel" or "stacked"; got {self.structure!r}')
        if self.cross_type not in CROSS_TYPES:
            raise ValueError(f"cross_type must be one of {', '.join(CROSS_TYPES)}; got {self.cross_type!r}")
        if self.rank is not None and self.cross_type not in ("low_rank", "mixture"):
            raise ValueError(f"rank is of low_rank and mixture; got rank = {self.rank} and {self.cross_type}")
        if self.experts < 1 or (self.rank is not None and self.rank < 1):
            raise ValueError(f"rank and experts must be at least 1; got {self.rank} and {self.experts}")
        if self.cross_layers < 0:
            raise ValueError(f"cross_layers must be at least 0; got cross_layers = {self.cross_layers}")
        if not 0 <= self.deep_start < math.inf:
            raise ValueError(f"deep_start must be at least 0; got {self.deep_start}")
        if not self.cross_layers and not self.deep_layers:
            raise ValueError("there must be a network; got cross_layers = 0 and deep_layers = ()")


class DCN(Model):
    """The Deep & Cross Network: ``p = σ([x_Lᵀ, h_Lᵀ] w_logits)`` (eq. 5).

    Args:
        cardinalities: number of ids of each single-valued categorical feature.
        num_dense: number of dense features.
        embedding_std: standard deviation of the initial embeddings; None is n_e^(-1/2).
        embedding_dim: size of the embeddings, one for all features or one each (bags last); None is the paper's
            6 · cardinality^(1/4).
        bag_cardinalities: number of ids of each multi-valued feature.
        bag_pooling: "mean" or "sum".
        num_outputs: 1 for two classes (click or not); C for C classes.
        cross_layers: L_c; 0 is the deep network only, the paper's DNN.
        cross_type: "vector" is the paper's cross network; "matrix", "low_rank" and "mixture" are DCN-V2's, "gated" is
            GDCN's, "fcn" FCN's linear one.
        rank, experts: r (None: d/4) and K of the cross types that have them.
        deep_layers: the deep network's sizes, also as "1024,1024" or "292x6"; () leaves the cross network alone.
        structure: "parallel", or "stacked": the deep network reads x_L instead of x0.
        deep_start: factor of the initial weights that the logits give the deep network's output. Under Adam a wide deep
            network changes the logits faster than the cross network and takes what both could learn; with 0 the cross
            network comes first.
        batch_norm: batch normalisation in the deep network, between W h and the ReLU.
        dropout: dropout after each ReLU of the deep network.
        logits_bias: whether the logits have a bias; eq. 5 has none.
        l2: λ, the weight of Σ_l ‖w_l‖² in the loss.
        sparse_gradients: sparse gradients of the embedding tables; :func:`fastcross.optim.configure` sets this.
        backend: "auto", "triton", "cpu", "torch" or "reference", see :func:`fastcross.cross_layer`.
    """

    Config = DCNConfig
    config: DCNConfig

    @takes_fields_of(DCNConfig)
    def __init__(self, config: DCNConfig) -> None:
        super().__init__(config)
        self.embedding = embedding_layer(config)
        d = self.embedding.out_features
        self.cross: Any = nn.Identity()  # a cross network, or a module that a user puts in its place
        width = (
            d + d % 2 if config.cross_type == "fcn" else d
        )  # FCN's halves are alike: a column of zeros may join them
        if config.cross_layers:
            self.cross = cross_network(width, config)
        is_stacked = config.structure == "stacked" and config.cross_layers > 0
        self.deep, h = deep_network(width if is_stacked else d, config)
        # The logits layer reads [x_L, h_L] in parallel; stacked, or with one network alone, that network's output.
        self.parallel = config.cross_layers > 0 and (config.structure == "parallel" or not config.deep_layers)
        size = (width if self.parallel else 0) + (h if config.deep_layers else 0)
        self.logits = nn.Linear(size, config.num_outputs, bias=config.logits_bias)
        self.start_deep()

    @torch.no_grad()
    def start_deep(self) -> None:
        """Scale the initial weights that the logits give the deep network's output."""
        if self.parallel and self.config.deep_layers:
            self.logits.weight[:, -self.config.deep_layers[-1] :] *= self.config.deep_start

    def forward(self, dense: Tensor, categorical: Tensor, bags: Bags = ()) -> Tensor:
        """Logits, (B,) for one output and (B, C) for more; their sigmoid or softmax are the probabilities."""
        x0 = self.embedding(dense, categorical, bags)  # section 2.1, eq. 1 and 2: (B, d)
        return self._squeeze(self.logits_of(x0))

    def logits_of(self, x0: Tensor) -> Tensor:
        """What the networks make of x0: (B, C)."""
        if not self.parallel:
            x = self.cross(self._cross_input(x0))  # section 2.2, eq. 3: (B, d)
            h = self.deep(x)  # section 2.3, eq. 4: (B, m)
            return self.logits(h)
        h = self.deep(x0)  # x0 itself where there are no deep layers
        return self._combine(x0, h if self.config.deep_layers else None)

    def _combine(self, x0: Tensor, h: Tensor | None) -> Tensor:
        """Section 2.4, eq. 5: logits of [x_L, h], (B, C). x_L is computed only if another module or a hook reads it."""
        if not (_is_only(CrossNetwork, self.cross) and _is_only(nn.Linear, self.logits)):
            x = self.cross(self._cross_input(x0))
            return self.logits(x if h is None else torch.cat((x, h), 1))
        # The sum of two parts: the cross part needs no x_L, only x_L's products with the weights.
        d, weight, bias = x0.shape[1], self.logits.weight, self.logits.bias
        z = self.cross.logits(x0, weight[:, :d])
        if h is not None:
            return z + F.linear(h, weight[:, d:], bias)
        return z if bias is None else z + bias

    def _cross_input(self, x0: Tensor) -> Tensor:
        if self.config.cross_type != "fcn" or not self.config.cross_layers:
            return x0
        zeros = x0.new_zeros((x0.shape[0], x0.shape[1] % 2))
        return torch.cat([*(x0[:, at] for at in halves_first(self.embedding.columns())), zeros], 1)

    def weights(self) -> Iterator[Tensor]:
        names = (name for name, _ in self.cross.named_parameters())
        yield from (self.cross.get_parameter(name) for name in names if "bias" not in name and "norm" not in name)
        yield from linear_weights(self.deep, self.logits)


def cross_network(d: int, config: DCNConfig) -> nn.Module:
    """The cross network of the configuration's type."""
    layers, backend, rank = config.cross_layers, config.backend, config.rank or max(1, d // 4)
    match config.cross_type:
        case "matrix":
            return CrossMatrix(d, layers, backend=backend)
        case "low_rank":
            return CrossLowRank(d, layers, rank, backend=backend)
        case "mixture":
            return CrossMixture(d, layers, rank, config.experts, backend=backend)
        case "gated":
            return CrossGated(d, layers, backend=backend)
        case "fcn":
            return CrossFCN(d, layers, backend=backend)
    return CrossNetwork(d, layers, backend=backend)


def halves_first(columns: Sequence[slice]) -> list[slice]:
    """The order of x0 that FCN asks for: the first halves of all features, then the second halves.

    For features of odd width the first half and the second half are alternately the longer one, so that both sides have
    d/2 columns (the first side one more if d is odd).
    """
    first: list[slice] = []
    second: list[slice] = []
    surplus = 0  # of the first halves, in columns
    for at in columns:
        middle = at.start + (at.stop - at.start + (surplus <= 0)) // 2
        surplus += 2 * middle - at.start - at.stop
        first.append(slice(at.start, middle))
        second.append(slice(middle, at.stop))
    return first + second


def deep_network(in_features: int, config: DeepConfig) -> tuple[nn.Sequential, int]:
    """The deep network (section 2.3, eq. 4): ``h_{l+1} = ReLU(W_l h_l + b_l)``, and the size of its
    output.

    With batch normalisation, ``h_{l+1} = ReLU(BN(W_l h_l))``: its shift is the b_l.
    """
    layers: list[nn.Module] = []
    for size in config.deep_layers:
        layers.append(nn.Linear(in_features, size, bias=not config.batch_norm))
        if config.batch_norm:
            layers.append(nn.BatchNorm1d(size))
        layers.append(nn.ReLU())
        if config.dropout:
            layers.append(nn.Dropout(config.dropout))
        in_features = size
    return nn.Sequential(*layers), in_features


def linear_weights(*networks: nn.Module) -> Iterator[Tensor]:
    """The W of every linear layer."""
    return (m.weight for network in networks for m in network.modules() if isinstance(m, nn.Linear))


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _is_only(kind: type[nn.Module], module: nn.Module) -> bool:
    """Whether a module is exactly of this class, not parametrised, and has no hooks."""
    everywhere = torch.nn.modules.module
    is_observed = any(
        getattr(module, name, True) or getattr(everywhere, f"_global{name}", True) for name in _HOOKS
    ) or "forward" in vars(module)
    return type(module) is kind and not is_observed
