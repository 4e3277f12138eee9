"""The models that the paper compares DCN with (section 4.3), on the same features and with the same interface.

LR and FM, which are linear in one-hot vectors or in pairs of them; DNN; Deep Crossing; and W&D, the sum of a DNN and an
LR.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcross.layers.embedding import EmbeddingStack
from fastcross.models.base import Model, ModelConfig, embedding_layer, takes_fields_of
from fastcross.models.dcn import DeepConfig, deep_network, linear_weights
from fastcross.ops.embedding import Bags


@dataclass(frozen=True)
class OneHotConfig(ModelConfig):
    """For models that are linear in one-hot vectors: the dense features are discretised.

    They are log-transformed already, so bins of equal width are bins on a log scale: ``⌊x / bin_width⌋``, counted from
    ``-num_bins/2``. The outermost bins include all values beyond them. NaN goes to the lowest bin.
    """

    bin_width: float = field(default=0.25, kw_only=True)
    num_bins: int = field(default=128, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.bin_width < math.inf or self.num_bins < 1:
            raise ValueError(
                f"bin_width must be positive and num_bins at least 1; got {self.bin_width} and {self.num_bins}"
            )


class OneHot(nn.Module):
    """W_i x_i for each feature's one-hot x_i and a table W_i of ``width`` columns: (B, features, width).

    A table starts as N(0, std²). The features are the categorical ones, the binned dense ones, then the bags.
    """

    def __init__(self, config: OneHotConfig, cardinalities: Sequence[int], width: int, std: float) -> None:
        super().__init__()
        self.bin_width, self.num_bins, self.width = config.bin_width, config.num_bins, width
        self.tables = EmbeddingStack(
            (*cardinalities, *(config.num_bins,) * config.num_dense),
            embedding_dim=width,
            bag_cardinalities=config.bag_cardinalities,
            bag_pooling=config.bag_pooling,
            sparse_gradients=config.sparse_gradients,
            backend=config.backend,
        )
        for table in self.tables.tables:
            nn.init.normal_(table, std=std)

    def forward(self, dense: Tensor, categorical: Tensor, bags: Bags) -> Tensor:
        bins = torch.floor(torch.nan_to_num(dense, nan=-math.inf) / self.bin_width) + self.num_bins // 2
        bins = bins.clamp(0, self.num_bins - 1).long()
        return self.tables(dense[:, :0], torch.cat((categorical.long(), bins), dim=1), bags).unflatten(
            1, (-1, self.width)
        )


@dataclass(frozen=True)
class WideConfig(OneHotConfig):
    """Crosses of features: tuples of positions among the categorical ones, as in ((0, 3), (1, 2, 5)).

    A cross of at most ``cross_buckets`` combinations has a weight for each. A larger one is hashed into that many.
    """

    crosses: Sequence[Sequence[int]] = field(default=(), kw_only=True)
    cross_buckets: int = field(default=1 << 18, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cross_buckets < 1:
            raise ValueError(f"cross_buckets must be at least 1; got {self.cross_buckets}")
        for cross in self.crosses:
            if len(set(cross)) < 2 or any(not 0 <= i < len(self.cardinalities) for i in cross):
                raise ValueError(
                    f"a cross must name at least two of the {len(self.cardinalities)} categorical features; got {cross}"
                )


class Wide(OneHot):
    """w_i[x_i] for each feature and each cross of features, (B, features + crosses, C); w starts at 0."""

    def __init__(self, config: WideConfig) -> None:
        combinations = [math.prod(config.cardinalities[i] for i in cross) for cross in config.crosses]
        buckets = [min(count, config.cross_buckets) for count in combinations]
        super().__init__(config, (*config.cardinalities, *buckets), config.num_outputs, std=0.0)
        self.cardinalities, self.crosses, self.buckets = config.cardinalities, config.crosses, buckets

    def forward(self, dense: Tensor, categorical: Tensor, bags: Bags) -> Tensor:
        categorical = categorical.long()
        crossed = [self._cross(categorical, i) for i in range(len(self.crosses))]
        return super().forward(dense, torch.cat((categorical, *crossed), dim=1), bags)

    def _cross(self, categorical: Tensor, index: int) -> Tensor:
        """(B, 1): the combination's number, or its hash where there are more combinations than buckets."""
        cross, buckets = self.crosses[index], self.buckets[index]
        exact = math.prod(self.cardinalities[i] for i in cross) == buckets
        number = torch.zeros_like(categorical[:, :1])
        for i in cross:
            number = number * self.cardinalities[i] + categorical[:, i : i + 1]
            if not exact:
                # Multiplying by an odd number (mod 2⁶⁴) moves low bits up; the shift brings them down again.
                number = number * 0x1E3779B97F4A7C15
                number = number ^ (number >> 29)
        return number if exact else number.remainder(buckets)


class LogisticRegression(Model):
    """LR: ``z = w₀ + Σ_i w_i[x_i]``, "the integer features discretised on a log scale", over features and crosses.

    There are no embeddings, so ``embedding_dim`` has no effect. With l2 > 0 the tables are regularised, which makes
    their gradients dense.
    """

    Config = WideConfig
    config: WideConfig

    @takes_fields_of(WideConfig)
    def __init__(self, config: WideConfig) -> None:
        super().__init__(config)
        self.one_hot = Wide(config)
        self.bias = nn.Parameter(torch.zeros(config.num_outputs))

    def forward(self, dense: Tensor, categorical: Tensor, bags: Bags = ()) -> Tensor:
        return self._squeeze(self.one_hot(dense, categorical, bags).sum(1) + self.bias)

    def weights(self) -> Iterator[Tensor]:
        return iter(self.one_hot.tables.tables)


class FactorizationMachine(Model):
    """FM: ``z = w₀ + Σ_i w_i[x_i] + Σ_{i<j} v_i[x_i]ᵀ v_j[x_j]``, on LR's features.

    The pairs are summed as ½(‖Σ_i v_i‖² - Σ_i ‖v_i‖²). ``embedding_dim`` is the length of v, one for all features;
    None is 10. With l2 > 0 the tables are regularised, which makes their gradients dense.
    """

    Config = OneHotConfig
    config: OneHotConfig

    @takes_fields_of(OneHotConfig)
    def __init__(self, config: OneHotConfig) -> None:
        super().__init__(config)
        factors = 10 if config.embedding_dim is None else config.embedding_dim
        if not isinstance(factors, int):
            raise ValueError(f"embedding_dim must be one integer for all features of an FM; got {factors}")
        # Each table holds w and v side by side, once per output.
        width = config.num_outputs * (1 + factors)
        self.one_hot = OneHot(config, config.cardinalities, width, std=0.01)
        self.bias = nn.Parameter(torch.zeros(config.num_outputs))

    def forward(self, dense: Tensor, categorical: Tensor, bags: Bags = ()) -> Tensor:
        rows = self.one_hot(dense, categorical, bags).unflatten(2, (self.config.num_outputs, -1))  # (B, k, C, 1 + f)
        total = rows.sum(1)
        w, v = rows[..., 0], rows[..., 1:]
        pairs = (total[..., 1:].square().sum(-1) - v.square().sum((1, 3))) / 2
        return self._squeeze(self.bias + w.sum(1) + pairs)

    def weights(self) -> Iterator[Tensor]:
        return iter(self.one_hot.tables.tables)


@dataclass(frozen=True)
class DNNConfig(DeepConfig):
    """The configuration of a DNN: that of DCN's deep network."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.deep_layers:
            raise ValueError("there must be a deep layer; got deep_layers = ()")


class DNN(Model):
    """DCN without its cross network: "the only change from the DCN model was that there are no cross layers"."""

    Config = DNNConfig
    config: DNNConfig

    @takes_fields_of(DNNConfig)
    def __init__(self, config: DNNConfig) -> None:
        super().__init__(config)
        self.embedding = embedding_layer(config)
        self.deep, h = deep_network(self.embedding.out_features, config)
        self.logits = nn.Linear(h, config.num_outputs, bias=config.logits_bias)

    def forward(self, dense: Tensor, categorical: Tensor, bags: Bags = ()) -> Tensor:
        return self._squeeze(self.logits(self.deep(self.embedding(dense, categorical, bags))))

    def weights(self) -> Iterator[Tensor]:
        return linear_weights(self.deep, self.logits)


@dataclass(frozen=True)
class DeepCrossingConfig(ModelConfig):
    """The residual units: their number, the size of their input, and that of their inner layer ("cross dimension")."""

    residual_units: int = field(default=3, kw_only=True)
    input_dim: int = field(default=512, kw_only=True)
    cross_dim: int = field(default=512, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = (self.residual_units, self.input_dim, self.cross_dim)
        if min(sizes) < 1:
            raise ValueError(f"residual_units, input_dim and cross_dim must be at least 1; got {sizes}")


class DeepCrossing(Model):
    """DC: DCN's stacking layer, a ReLU layer that sets the input's size, then residual units

    ``h_{l+1} = ReLU(h_l + W_l' ReLU(W_l h_l + b_l) + b_l')``, and the logits of the last one.
    """

    Config = DeepCrossingConfig
    config: DeepCrossingConfig

    @takes_fields_of(DeepCrossingConfig)
    def __init__(self, config: DeepCrossingConfig) -> None:
        super().__init__(config)
        self.embedding = embedding_layer(config)
        self.input = nn.Linear(self.embedding.out_features, config.input_dim)
        self.units = nn.ModuleList(
            nn.Sequential(
                nn.Linear(config.input_dim, config.cross_dim), nn.ReLU(), nn.Linear(config.cross_dim, config.input_dim)
            )
            for _ in range(config.residual_units)
        )
        self.logits = nn.Linear(config.input_dim, config.num_outputs)

    def forward(self, dense: Tensor, categorical: Tensor, bags: Bags = ()) -> Tensor:
        h = F.relu(self.input(self.embedding(dense, categorical, bags)))
        for unit in self.units:
            h = F.relu(h + unit(h))
        return self._squeeze(self.logits(h))

    def weights(self) -> Iterator[Tensor]:
        return linear_weights(self)


@dataclass(frozen=True)
class WideDeepConfig(WideConfig, DNNConfig):
    """The configuration of a DNN, and the wide part's crosses."""


class WideDeep(Model):
    """W&D: the sum of a DNN's logits and those of a logistic regression on the features and on given crosses.

    The wide part's weights are in tables, and l2 regularises them too. l2 > 0 makes their gradients dense.
    """

    Config = WideDeepConfig
    config: WideDeepConfig

    @takes_fields_of(WideDeepConfig)
    def __init__(self, config: WideDeepConfig) -> None:
        super().__init__(config)
        self.embedding = embedding_layer(config)
        self.deep, h = deep_network(self.embedding.out_features, config)
        self.logits = nn.Linear(h, config.num_outputs, bias=config.logits_bias)
        self.wide = Wide(config)

    def forward(self, dense: Tensor, categorical: Tensor, bags: Bags = ()) -> Tensor:
        wide = self.wide(dense, categorical, bags).sum(1)
        return self._squeeze(self.logits(self.deep(self.embedding(dense, categorical, bags))) + wide)

    def weights(self) -> Iterator[Tensor]:
        yield from linear_weights(self.deep, self.logits)
        yield from self.wide.tables.tables
