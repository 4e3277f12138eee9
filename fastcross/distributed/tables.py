"""The embedding and stacking layer (section 2.1) on TorchRec's tables, and how they are divided between the ranks.

fbgemm updates rows within the backward pass, but its CPU build has no Adam. There an
:class:`~fastcross.embedding.EmbeddingStack` looks up the shards, and :class:`~fastcross.optim.RowAdam` updates them.
"""

import os
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.types import ShardingPlan, ShardingType
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from fastcross.batch import Bag
from fastcross.distributed.internals import (
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    ShardMetadata,
    lookup_kernels,
    replace_operator,
    sharded_tensor,
)
from fastcross.distributed.process_group import ProcessGroup
from fastcross.layers.embedding import EmbeddingStack
from fastcross.ops.embedding import Bags, as_bags, check_ids, pooling_coefficients
from fastcross.training.config import SHARDINGS

WIDTH = 4  # the widths of fbgemm's tables are multiples of this; columns beyond n_e stay 0


class EmbeddingTables(nn.Module):
    """Equations 1 and 2, as in :class:`~fastcross.embedding.EmbeddingStack`, on a TorchRec collection.

    Args:
        stack: the layer to replace; its tables are not read and may be on the meta device.
        processes: the ranks that share the tables.
    """

    def __init__(self, stack: EmbeddingStack, processes: ProcessGroup) -> None:
        super().__init__()
        self._stack, self.processes = (stack,), processes  # in a tuple, so that its tables are not parameters here
        self.cardinalities, self.dims, self.out_features = stack.cardinalities, stack.dims, stack.out_features
        self.features = [f"f{k}" for k in range(len(stack.dims))]
        self.weighted = len(stack.dims) > stack.num_single
        self.collection = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=table_name(k), num_embeddings=cardinality, embedding_dim=padded(dim), feature_names=[feature]
                )
                for k, (cardinality, dim, feature) in enumerate(
                    zip(stack.cardinalities, stack.dims, self.features, strict=True)
                )
            ],
            is_weighted=self.weighted,
            device=torch.device("meta"),
        )

    def forward(self, dense: Tensor, categorical: Tensor, bags: Bags = ()) -> Tensor:
        """(B, num_dense), (B, k) ids and a bag for each multi-valued feature -> x0, (B, d)."""
        (stack,) = self._stack
        given = as_bags(bags)
        stack.check(dense, categorical, given)
        check_ids(categorical, given, stack.cardinalities)
        pooled = self.collection(self._jagged(categorical.long(), given)).to_dict()
        rows = dense.shape[0]
        single = [pooled[f][:rows, :dim] for f, dim in zip(self.features, self.dims, strict=True)]
        return torch.cat((*single, dense.to(single[0].dtype)), dim=1)

    def _jagged(self, categorical: Tensor, bags: list[Bag]) -> KeyedJaggedTensor:
        """All features in TorchRec's format: the number of values of each row, feature by feature, and the values."""
        rows, k = categorical.shape
        # A row-wise table sums over the ranks, which needs equal numbers of rows: pad with empty rows.
        empty = self.processes.largest(rows) - rows
        lengths = [torch.ones_like(categorical.T), *(_lengths(bag).unsqueeze(0) for bag in bags)]
        weights = None
        if self.weighted:
            ones = torch.ones(k * rows, device=categorical.device)
            weights = torch.cat((ones, *(pooling_coefficients(bag, self._stack[0].bag_pooling) for bag in bags)))
        return KeyedJaggedTensor(
            keys=self.features,
            values=torch.cat((categorical.T.reshape(-1), *(bag.values.long() for bag in bags))),
            weights=weights,
            lengths=nn.functional.pad(torch.cat(lengths), (0, empty)).reshape(-1),
        )


class Sharder(EmbeddingBagCollectionSharder):
    """TorchRec's sharder, with row-wise tables on CPUs too."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return sharding_types("auto")


def sharding_types(sharding: str) -> list[str]:
    """TorchRec's names for one of SHARDINGS."""
    names = [name for name in SHARDINGS if name != "auto"] if sharding == "auto" else [sharding]
    return [ShardingType[f"{name.upper()}_WISE"].value for name in names]


def plan_sharding(module: nn.Module, tables: EmbeddingTables, sharding: str, rows: int) -> ShardingPlan:
    """The plan of which rank holds what, for batches of ``rows`` rows per rank; equal on all ranks."""
    processes = tables.processes
    local = int(os.environ.get("LOCAL_WORLD_SIZE", processes.size))
    constraints = {}
    for k, (cardinality, dim) in enumerate(zip(tables.cardinalities, tables.dims, strict=True)):
        # A table with fewer rows than ranks leaves some ranks without rows.
        fits = cardinality >= processes.size
        constraints[table_name(k)] = ParameterConstraints(
            sharding_types=sharding_types(sharding if fits else "table"),
            compute_kernels=[EmbeddingComputeKernel.FUSED.value],
            min_partition=padded(-(-padded(dim) // processes.size)),
        )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local
    on_gpu = processes.device.type == "cuda"
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=processes.size,
            local_world_size=local,
            compute_device=processes.device.type,
            hbm_cap=torch.cuda.get_device_properties(processes.device).total_memory if on_gpu else 0,
            ddr_cap=memory,
        ),
        batch_size=rows,
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(0.15),  # for the layers, activations and batches
    )
    return planner.collective_plan(module, [Sharder()], torch.distributed.group.WORLD)


def cut(table: ShardedTensor, dim: int) -> ShardedTensor:
    """A view of the first n_e columns of a table that was widened for fbgemm."""
    if table.size(1) == dim:
        return table
    whole = table.metadata()
    narrow = {
        shard: ShardMetadata(shard.shard_offsets, [rows, min(columns, dim - shard.shard_offsets[1])], shard.placement)
        for shard in whole.shards_metadata
        for rows, columns in (shard.shard_sizes,)
        if shard.shard_offsets[1] < dim
    }
    metadata = ShardedTensorMetadata(list(narrow.values()), torch.Size((table.size(0), dim)), whole.tensor_properties)
    local = [(shard.tensor, narrow[shard.metadata]) for shard in table.local_shards() if shard.metadata in narrow]
    # The constructor requires contiguous tensors, although a checkpoint reads and writes any.
    empty = [Shard(tensor.new_empty(shard.shard_sizes), shard) for tensor, shard in local]
    found = sharded_tensor(empty, metadata)
    for shard, (tensor, _) in zip(found.local_shards(), local, strict=True):
        shard.tensor = tensor[:, : shard.metadata.shard_sizes[1]]
    return found


def table_name(k: int) -> str:
    return f"t{k}"


def padded(dim: int) -> int:
    return -(-dim // WIDTH) * WIDTH


def _lengths(bag: Bag) -> Tensor:
    return torch.cat((bag.offsets, bag.offsets.new_full((1,), bag.values.shape[0]))).diff()


class TableShard(NamedTuple):
    """A rectangle of a table that this rank holds."""

    table: str
    metadata: ShardMetadata
    weight: nn.Parameter


class StackLookup(nn.Module):
    """Replaces fbgemm's operator: pooled rows, one group of columns per shard, from the same memory."""

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
        if per_sample_weights is None and indices.shape[0] == T * rows:  # one value each: no bags
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
        """Does nothing: TorchRec would set fbgemm's rate, but here the optimiser has it."""

    def flush(self) -> None:
        """Does nothing: TorchRec calls it to write fbgemm's caches back, and there are none here."""


def replace_lookups(collection: Any) -> list[TableShard]:
    """Make EmbeddingStacks look up the rows of a ShardedEmbeddingBagCollection; returns its shards."""
    shards = []
    for kernel, operator in lookup_kernels(collection):
        stack_lookup = StackLookup(operator)
        replace_operator(kernel, stack_lookup)
        tables = zip(kernel.config.embedding_tables, stack_lookup.stack.tables, strict=True)
        shards += [TableShard(config.name, config.local_metadata, weight) for config, weight in tables]
    return shards
