"""A model's input: a batch of rows, and the schema of its columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Bag:
    """A multi-valued feature of B rows, as for EmbeddingBag: row i has values[offsets[i] : offsets[i + 1]]."""

    values: Tensor  # (n,) int64
    offsets: Tensor  # (B,) int64, the start of each row's values
    weights: Tensor | None = None  # (n,) float32

    def row(self, i: int) -> Bag:
        """Row ``i`` as a bag."""
        end = self.offsets[i + 1] if i + 1 < len(self.offsets) else len(self.values)
        chosen = slice(int(self.offsets[i]), int(end))
        weights = None if self.weights is None else self.weights[chosen]
        return Bag(self.values[chosen], self.offsets[:1] * 0, weights)

    def map(self, function: Callable[[Tensor], Tensor]) -> Bag:
        weights = None if self.weights is None else function(self.weights)
        return Bag(function(self.values), function(self.offsets), weights)

    def to(self, *args: Any, **kwargs: Any) -> Bag:
        return self.map(lambda tensor: tensor.to(*args, **kwargs))


@dataclass(frozen=True)
class Batch:
    """B rows. The label is float32 in {0, 1} for two classes, int64 for more classes, float64 for regression, and None
    for prediction."""

    dense: Tensor  # (B, num_dense) float32
    categorical: Tensor  # (B, k) int64, 0 = out of vocabulary
    bags: tuple[Bag, ...] = ()
    label: Tensor | None = None  # (B,)
    weight: Tensor | None = None  # (B,) float32, row weights; None: equal weights
    group: Tensor | None = None  # (B,) int64, equal for rows of the same group, such as a user

    def __len__(self) -> int:
        return self.dense.shape[0]

    def row(self, i: int) -> Batch:
        """Row ``i`` as a batch."""
        of_row = (None if column is None else column[i : i + 1] for column in self.beside)
        bags = tuple(bag.row(i) for bag in self.bags)
        return Batch(self.dense[i : i + 1], self.categorical[i : i + 1], bags, *of_row)

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with ``function`` applied to each tensor."""
        beside = (None if column is None else function(column) for column in self.beside)
        bags = tuple(bag.map(function) for bag in self.bags)
        return Batch(function(self.dense), function(self.categorical), bags, *beside)

    def to(self, *args: Any, **kwargs: Any) -> Batch:
        """The batch on another device; takes the device and non_blocking of Tensor.to."""
        return self.map(lambda tensor: tensor.to(*args, **kwargs))

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the batch, in the same order for batches with the same columns."""
        of_bags = (tensor for bag in self.bags for tensor in (bag.values, bag.offsets, bag.weights))
        return [t for t in (self.dense, self.categorical, *of_bags, *self.beside) if t is not None]

    @property
    def beside(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Label, weight and group."""
        return self.label, self.weight, self.group


@dataclass(frozen=True)
class Schema:
    """The columns of a cache. A cardinality includes id 0: ids are 0 … cardinality - 1."""

    dense_names: tuple[str, ...]
    categorical_names: tuple[str, ...]
    cardinalities: tuple[int, ...]
    bag_names: tuple[str, ...] = ()
    bag_cardinalities: tuple[int, ...] = ()
    num_outputs: int = 1  # of the model: 1 for two classes or regression, otherwise the number of classes
    task: str = "binary"  # "binary", "multiclass" or "regression"

    @property
    def names(self) -> list[str]:
        """The fields in the order of x0: categorical, multi-valued, dense."""
        return [*self.categorical_names, *self.bag_names, *self.dense_names]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Schema:
        names = {field.name for field in fields(cls)}
        known: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in names}
        return cls(**known)
