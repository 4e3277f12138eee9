"""The networks that the paper compares DCN with (section 4.3), on the same features and with the same interface."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import torch.nn.functional as F
from torch import Tensor, nn

from fastcross.models.base import Model, ModelConfig, embedding_layer, takes_fields_of
from fastcross.models.dcn import DeepConfig, deep_network, linear_weights
from fastcross.models.linear import Wide, WideConfig
from fastcross.ops.embedding import Bags


@dataclass(frozen=True)
class DNNConfig(DeepConfig):
    """A DNN's choices: those of DCN's deep network."""

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

    @classmethod
    def from_config(cls, config: ModelConfig | dict[str, Any]) -> Self:
        return super().from_config(_without_cross_network(config))

    def forward(self, dense: Tensor, categorical: Tensor, bags: Bags = ()) -> Tensor:
        return self._squeeze(self.logits(self.deep(self.embedding(dense, categorical, bags))))

    def weights(self) -> Iterator[Tensor]:
        return linear_weights(self.deep, self.logits)


def _without_cross_network(config: ModelConfig | dict[str, Any]) -> ModelConfig | dict[str, Any]:
    """As fastcross 0.1 saved it, a configuration without cross layers still said that there are 0, and where."""
    if not isinstance(config, dict):
        return config
    if config.get("cross_layers"):
        raise ValueError(f"a DNN has no cross layers; got cross_layers = {config['cross_layers']}")
    return {name: value for name, value in config.items() if name not in ("cross_layers", "structure")}


@dataclass(frozen=True)
class DeepCrossingConfig(ModelConfig):
    """The residual units: how many, the size of their input, and that of their inner layer (the "cross dimension")."""

    residual_units: int = field(default=3, kw_only=True)
    input_dim: int = field(default=512, kw_only=True)
    cross_dim: int = field(default=512, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = (self.residual_units, self.input_dim, self.cross_dim)
        if min(sizes) < 1:
            raise ValueError(f"residual_units, input_dim and cross_dim must be at least 1; got {sizes}")


class DeepCrossing(Model):
    """DC: DCN's stacking layer, a ReLU layer to size the input, then residual units

    ``h_{l+1} = ReLU(h_l + W_l' ReLU(W_l h_l + b_l) + b_l')``, and the logits of the last.
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
    """The wide part's crosses, beside the choices of a DNN."""


class WideDeep(Model):
    """W&D: a DNN and, added to its logits, a logistic regression on the raw features and on crosses given by the user.

    The wide part's weights, though they lie in tables, are regularised like any w, and l2 > 0 makes their gradients
    dense.
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

    @classmethod
    def from_config(cls, config: ModelConfig | dict[str, Any]) -> Self:
        return super().from_config(_without_cross_network(config))

    def forward(self, dense: Tensor, categorical: Tensor, bags: Bags = ()) -> Tensor:
        wide = self.wide(dense, categorical, bags).sum(1)
        return self._squeeze(self.logits(self.deep(self.embedding(dense, categorical, bags))) + wide)

    def weights(self) -> Iterator[Tensor]:
        yield from linear_weights(self.deep, self.logits)
        yield from self.wide.tables.tables
