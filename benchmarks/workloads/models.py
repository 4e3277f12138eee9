"""The models of whole-model workloads: their shape, their batches, and ours among them."""

import functools
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import clock
from fastcross import DCN

Batch = tuple[Tensor, Tensor, Tensor]  # dense, categorical, label


@dataclass(frozen=True)
class Shape:
    """Features and layers of a model."""

    rows: int
    cardinality: int
    dims: tuple[int, ...]  # of each categorical feature's embedding
    num_dense: int
    cross_layers: int
    deep_layers: tuple[int, ...]
    ids: int | None = None  # that occur in the batch; None: all of them

    def __str__(self) -> str:
        width = sum(self.dims) + self.num_dense
        return (
            f"B = {self.rows}, {len(self.dims)} features of {self.cardinality:,} ids, d = {width}, "
            f"L = {self.cross_layers}, deep {' × '.join(map(str, self.deep_layers))}"
        )

    def describe(self) -> dict[str, Any]:
        return asdict(self)

    def model(self, **options: Any) -> DCN:
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"cross_layers": self.cross_layers, "deep_layers": self.deep_layers} | options
        model = DCN([self.cardinality] * len(self.dims), self.num_dense, self.dims, **sizes)
        with torch.no_grad():  # a bias of zero would hide where it is added
            if self.cross_layers and model.config.cross_layers:
                model.cross.bias.normal_(std=0.1)
        return model.to(clock.device())

    @functools.cached_property
    def batches(self) -> list[Batch]:
        """Steps cycle through them, so that the rows of one are not still in a cache at its next turn."""
        return [self._batch(torch.Generator().manual_seed(seed)) for seed in range(8)]

    def _batch(self, generator: torch.Generator) -> Batch:
        """Ids as in click logs: a few frequent ones and a long tail."""
        uniform = torch.rand(self.rows, len(self.dims), generator=generator, dtype=torch.float64)
        ids = self.ids or self.cardinality
        categorical = (ids**uniform).long().clamp(max=ids) - 1
        dense = torch.randn(self.rows, self.num_dense, generator=generator)
        label = torch.randint(0, 2, (self.rows,), generator=generator).float()
        return tuple(t.to(clock.device()) for t in (dense, categorical, label))  # type: ignore[return-value]
