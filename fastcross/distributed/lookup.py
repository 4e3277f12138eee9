"""fastcross's own rows inside TorchRec's tables, where fbgemm has no optimiser for the device.

fbgemm updates rows within the backward pass, but its CPU build knows no Adam. There the shards are looked up by an
:class:`~fastcross.embedding.EmbeddingStack` instead, whose sparse gradients :class:`~fastcross.optim.RowAdam` takes.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastcross.batch import Bag
from fastcross.distributed.internals import ShardMetadata, lookup_kernels, replace_operator
from fastcross.layers.embedding import EmbeddingStack


class Shard(NamedTuple):
    """A rectangle of a table that this rank holds."""

    table: str
    metadata: ShardMetadata
    weight: nn.Parameter


class StackLookup(nn.Module):
    """Stands in for fbgemm's operator: the sums of rows, one group of columns for each shard, from the same memory."""

    def __init__(self, fused: nn.Module) -> None:
        super().__init__()
        weights = fused.split_embedding_weights()  # type: ignore[operator]
        heights, widths = zip(*(weight.shape for weight in weights), strict=True)
        with torch.device("meta"):
            self.stack = EmbeddingStack(
                (), embedding_dim=widths, bag_cardinalities=heights, bag_pooling="sum", sparse_gradients=True
            )
            self.single = EmbeddingStack(heights, embedding_dim=widths, sparse_gradients=True)
        for k, weight in enumerate(weights):
            self.stack.tables[k] = nn.Parameter(weight)
        self.single.tables = self.stack.tables

    def forward(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None) -> Tensor:
        T = len(self.stack.tables)
        rows = (offsets.shape[0] - 1) // T
        nothing = torch.empty((rows, 0), device=indices.device)
        if per_sample_weights is None and indices.shape[0] == T * rows:  # one value each, for only bags have more
            return self.single(nothing, indices.view(T, rows).T.contiguous()).contiguous()
        bounds = offsets[::rows].tolist() if rows else [0] * (T + 1)
        bags = []
        for k in range(T):
            values = slice(bounds[k], bounds[k + 1])
            weights = None if per_sample_weights is None else per_sample_weights[values]
            bags.append(Bag(indices[values], offsets[k * rows : (k + 1) * rows] - bounds[k], weights))
        return self.stack(nothing, indices.new_empty((rows, 0)), bags).contiguous()  # x0 has padded rows

    def split_embedding_weights(self) -> list[Tensor]:
        return [table.detach() for table in self.stack.tables]

    def set_learning_rate(self, rate: float) -> None:
        """TorchRec would set fbgemm's; here the optimiser has it."""

    def flush(self) -> None:
        """TorchRec writes fbgemm's caches back before it reads the tables; there are none here."""


def replace_lookups(collection: Any) -> list[Shard]:
    """Let EmbeddingStacks look up the rows of a ShardedEmbeddingBagCollection; returns its shards, for an optimiser."""
    shards = []
    for kernel, operator in lookup_kernels(collection):
        stack_lookup = StackLookup(operator)
        replace_operator(kernel, stack_lookup)
        tables = zip(kernel.config.embedding_tables, stack_lookup.stack.tables, strict=True)
        shards += [Shard(config.name, config.local_metadata, weight) for config, weight in tables]
    return shards
