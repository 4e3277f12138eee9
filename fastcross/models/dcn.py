"""The Deep & Cross Network, beside section 2 of the paper: embedding and stacking, cross ∥ deep, combination, loss."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcross.layers.cross import CrossNetwork
from fastcross.layers.embedding import EmbeddingStack
from fastcross.ops import backends, cross_logits
from fastcross.ops.embedding import Bags


@dataclass(frozen=True)
class ModelConfig:
    """What every model is built from: the features, the outputs, the regularisation.

    ``to_dict`` gives JSON's types, and ``Model.from_config`` takes them back.
    """

    cardinalities: tuple[int, ...]  # ids of each single-valued categorical feature
    num_dense: int  # dense features, normalised (section 4.2: a log transform)
    embedding_dim: int | tuple[int, ...] | None = None  # n_e; None is the paper's 6 · cardinality^(1/4)
    bag_cardinalities: tuple[int, ...] = field(default=(), kw_only=True)  # ids of each multi-valued feature
    bag_pooling: str = field(default="mean", kw_only=True)  # or "sum"
    num_outputs: int = field(default=1, kw_only=True)  # 1: click or not; C > 1: a class among C
    l2: float = field(default=0.0, kw_only=True)  # λ
    sparse_gradients: bool = field(default=True, kw_only=True)  # of the embedding tables
    backend: str = field(default="auto", kw_only=True)

    def __post_init__(self) -> None:
        for entry in fields(self):  # lists, from JSON or a user, become tuples
            object.__setattr__(self, entry.name, _as_tuples(getattr(self, entry.name)))
        if self.num_outputs < 1:
            raise ValueError(f"num_outputs must be at least 1; got {self.num_outputs}")
        if self.l2 < 0:
            raise ValueError(f"l2 must be at least 0; got {self.l2}")
        backends.check(self.backend)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class DCNConfig(ModelConfig):
    """DCN's own choices. The defaults are the middle of the paper's grid for Criteo (section 4.2)."""

    cross_layers: int = field(default=6, kw_only=True)  # L_c; 0: deep only, the paper's DNN
    deep_layers: tuple[int, ...] = field(default=(1024, 1024), kw_only=True)  # sizes; (): cross only
    structure: str = field(default="parallel", kw_only=True)  # or "stacked": the deep network reads x_L, not x0
    batch_norm: bool = field(default=True, kw_only=True)  # in the deep network, between W h and the ReLU
    dropout: float = field(default=0.0, kw_only=True)  # after each ReLU
    logits_bias: bool = field(default=True, kw_only=True)  # eq. 5 has none

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.structure not in ("parallel", "stacked"):
            raise ValueError(f'structure must be "parallel" or "stacked"; got {self.structure!r}')
        if self.cross_layers < 0 or any(size < 1 for size in self.deep_layers):
            raise ValueError(
                f"cross_layers must be at least 0 and every deep layer at least 1; "
                f"got cross_layers = {self.cross_layers} and deep_layers = {self.deep_layers}"
            )
        if not self.cross_layers and not self.deep_layers:
            raise ValueError("there must be a network; got cross_layers = 0 and deep_layers = ()")


class Model(nn.Module):
    """What DCN and the models it is compared with share: construction from a configuration, and the loss."""

    Config: ClassVar[type[ModelConfig]]

    def __init__(
        self,
        cardinalities: Sequence[int],
        num_dense: int,
        embedding_dim: int | Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.config: Any = self.Config(cardinalities, num_dense, embedding_dim, **options)  # type: ignore[arg-type]

    @classmethod
    def from_config(cls, config: ModelConfig | dict[str, Any]) -> Self:
        return cls(**(config if isinstance(config, dict) else asdict(config)))

    def weights(self) -> Iterator[Tensor]:
        """The w_l of the regularisation term: every weight that multiplies features or hidden units.

        Not biases, batch normalisation or embeddings: the paper's sum runs over the layers' w, and a term over whole
        tables would make every step as expensive as they are high.
        """
        raise NotImplementedError

    def regularization(self) -> Tensor:
        """λ Σ_l ‖w_l‖², as large as it says: its gradient is 2 λ w."""
        if not self.config.l2:
            return torch.zeros((), device=next(self.parameters()).device)
        return self.config.l2 * torch.stack([weight.square().sum() for weight in self.weights()]).sum()

    def loss(self, logits: Tensor, label: Tensor) -> Tensor:
        """Section 2.4: the mean log loss over the batch, and λ Σ_l ‖w_l‖²."""
        if label.shape != logits.shape[:1]:
            raise ValueError(f"label must be ({logits.shape[0]},), as logits; got {tuple(label.shape)}")
        if self.config.num_outputs == 1:
            log_loss = F.binary_cross_entropy_with_logits(logits, label.to(logits.dtype))
        else:
            log_loss = F.cross_entropy(logits, label.long())
        return log_loss + self.regularization() if self.config.l2 else log_loss

    def _squeeze(self, z: Tensor) -> Tensor:
        """(B, C) -> (B,) for one output."""
        return z.squeeze(1) if self.config.num_outputs == 1 else z


class Cross(NamedTuple):
    """A pair of features and how strongly a DCN crosses them."""

    features: tuple[str, str]
    strength: float


class DCN(Model):
    """The Deep & Cross Network: ``p = σ([x_Lᵀ, h_Lᵀ] w_logits)`` (eq. 5).

    Args:
        cardinalities: how many ids each single-valued categorical feature has.
        num_dense: how many dense features there are.
        embedding_dim: one for all features or one each; None is the paper's 6 · cardinality^(1/4).
        options: the fields of :class:`DCNConfig`.
    """

    Config = DCNConfig

    def __init__(
        self,
        cardinalities: Sequence[int],
        num_dense: int,
        embedding_dim: int | Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(cardinalities, num_dense, embedding_dim, **options)
        config = self.config
        self.embedding = make_embedding(config)
        d = self.embedding.out_features
        self.cross: Any = nn.Identity()
        if config.cross_layers:
            self.cross = CrossNetwork(d, config.cross_layers, backend=config.backend)
        self.deep, h = deep_network(d, config)
        # The logits layer reads [x_L, h_L] in parallel; stacked, or with one network alone, that network's output.
        self.parallel = config.cross_layers > 0 and (config.structure == "parallel" or not config.deep_layers)
        size = (d if self.parallel else 0) + (h if config.deep_layers else 0)
        self.logits = nn.Linear(size, config.num_outputs, bias=config.logits_bias)

    def forward(self, dense: Tensor, categorical: Tensor, bags: Bags = ()) -> Tensor:
        """Logits, (B,) for one output and (B, C) for more; their sigmoid or softmax are the probabilities."""
        x0 = self.embedding(dense, categorical, bags)  # eq. 1 and 2: (B, d)
        if not self.parallel:
            h = self.deep(self.cross(x0))  # eq. 3 and 4: (B, m)
            return self._squeeze(self.logits(h))
        # Eq. 5 as the sum of its two parts: the cross part needs no x_L, only x_L's products with the weights.
        d = x0.shape[1]
        w_cross, w_deep = self.logits.weight[:, :d], self.logits.weight[:, d:]
        z = cross_logits(x0, self.cross.weight, self.cross.bias, w_cross, backend=self.cross.backend)
        if len(self.deep):
            z = z + F.linear(self.deep(x0), w_deep, self.logits.bias)
        elif self.logits.bias is not None:
            z = z + self.logits.bias
        return self._squeeze(z)

    def weights(self) -> Iterator[Tensor]:
        if self.config.cross_layers:
            yield self.cross.weight
        yield from (layer.weight for layer in self.deep if isinstance(layer, nn.Linear))
        yield self.logits.weight

    @torch.no_grad()
    def strongest_crosses(self, k: int = 10, feature_names: Sequence[str] | None = None) -> list[Cross]:
        """The k pairs of features that the cross network crosses most strongly, in degree 2.

        The degree-2 part of a logit is (x0ᵀu)(x0ᵀv), where v is the logit's weight vector and u = Σ_l α_l w_l, with
        α_l = 1 + Σ_{j<l} β_jᵀ w_j and β_j = Σ_{i<j} b_i: Theorem 3.1 with its biases. Features i and j contribute
        (e_iᵀu_i)(e_jᵀv_j) + (e_iᵀv_i)(e_jᵀu_j). A pair's strength is the standard deviation of that over all pairs of
        ids, each id counted once and its feature's mean taken off (a mean is no cross); a dense feature counts as one
        of unit variance. Over several outputs, the root of the sum of squares.

        Args:
            k: how many.
            feature_names: of the categorical features, the bags, then the dense features.
        """
        if not self.parallel:
            raise ValueError("crosses are read off the cross network's logits; this model's cross output has none")
        columns = self.embedding.columns()
        names = [str(i) for i in range(len(columns))] if feature_names is None else list(feature_names)
        if len(names) != len(columns):
            raise ValueError(f"feature_names must name {len(columns)} features; got {len(names)}")
        weight, bias, heads = self.cross.weight, self.cross.bias, self.logits.weight[:, : self.cross.in_features]
        beta = bias.cumsum(0) - bias
        c = (beta * weight).sum(1)
        u = (1 + c.cumsum(0) - c) @ weight
        square = weight.new_zeros(len(columns), len(columns))
        for v in heads:
            moments = [self._moments(i, torch.stack((u[at], v[at]), 1)) for i, at in enumerate(columns)]
            uu, uv, vv = torch.stack(moments).unbind(1)
            square += torch.outer(uu, vv) + torch.outer(vv, uu) + 2 * torch.outer(uv, uv)
        pairs = torch.triu_indices(len(columns), len(columns), offset=1, device=square.device)
        strength = square[pairs[0], pairs[1]].clamp(min=0).sqrt()
        best = strength.topk(min(k, strength.numel()))
        return [
            Cross((names[i], names[j]), value)
            for value, (i, j) in zip(best.values.tolist(), pairs.T[best.indices].tolist(), strict=True)
        ]

    def _moments(self, feature: int, directions: Tensor) -> Tensor:
        """Var(eᵀu), Cov(eᵀu, eᵀv), Var(eᵀv) over a feature's ids e, for directions (u, v)."""
        if feature < len(self.embedding.tables):
            projected = self.embedding.tables[feature] @ directions
            projected = projected - projected.mean(0)
            covariance = projected.T @ projected / projected.shape[0]
        else:
            covariance = directions.T @ directions
        return torch.stack((covariance[0, 0], covariance[0, 1], covariance[1, 1]))


def make_embedding(config: ModelConfig) -> EmbeddingStack:
    """The embedding and stacking layer (section 2.1) of a configuration."""
    return EmbeddingStack(
        config.cardinalities,
        config.num_dense,
        config.embedding_dim,
        bag_cardinalities=config.bag_cardinalities,
        bag_pooling=config.bag_pooling,
        sparse_gradients=config.sparse_gradients,
        backend=config.backend,
    )


def deep_network(in_features: int, config: Any) -> tuple[nn.Sequential, int]:
    """The deep network (section 2.3, eq. 4): ``h_{l+1} = ReLU(W_l h_l + b_l)``, and the size of its output.

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


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list | tuple | torch.Size) else value
