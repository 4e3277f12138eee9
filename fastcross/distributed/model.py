"""A DCN from meta tensors to a model whose tables are sharded over the ranks, and the optimiser for it."""

from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from fastcross.distributed.batch_norm import synchronise
from fastcross.distributed.internals import ShardedTensor
from fastcross.distributed.lookup import replace_lookups
from fastcross.distributed.optim import FusedRows, ShardedOptimizer, ShardedRows
from fastcross.distributed.process_group import ProcessGroup
from fastcross.distributed.tables import EmbeddingTables, Sharder, cut, plan_sharding, table_name
from fastcross.layers.embedding import EmbeddingStack
from fastcross.models.base import Model
from fastcross.models.baselines import DNN
from fastcross.models.dcn import DCN
from fastcross.training.config import TrainingConfig

TABLES = "embedding.tables"  # their names in a DCN's state
LAYERS = ("cross", "deep", "logits")  # the rest of it, in the order in which it is drawn; a DNN has no cross
CHUNK = 1 << 16  # rows of a table that are drawn at once; a multiple of 16, see _draw


class ShardedDCN(DistributedModelParallel):
    """A DCN whose tables TorchRec has sharded and whose other layers DDP replicates; otherwise used like a DCN.

    Its state has the names and shapes of a DCN's, with ShardedTensors for the tables.
    """

    def __init__(self, model: DCN | DNN, processes: ProcessGroup, sharding: str, rows: int) -> None:
        synchronise(model)
        assert isinstance(model.embedding, EmbeddingTables)
        plan = plan_sharding(model, model.embedding, sharding, rows)
        layers = [name for name in LAYERS if hasattr(model, name)]
        for name in layers:
            getattr(model, name).to_empty(device="cpu")  # DDP moves them, once they are drawn as on one machine
        super().__init__(
            model,
            device=processes.device,
            plan=plan,
            sharders=[Sharder()],
            init_data_parallel=False,
            init_parameters=False,
        )
        self.config, self.layers = model.config, layers
        self.dims = model.embedding.dims

    def loss(self, logits: Tensor, label: Tensor, weight: Tensor | None = None) -> Tensor:
        return self.module.loss(logits, label, weight)

    def tables(self) -> list[ShardedTensor]:
        """As TorchRec holds them, as wide as fbgemm wants them."""
        state = self.module.embedding.state_dict()
        return [state[f"collection.embedding_bags.{table_name(k)}.weight"] for k in range(len(self.dims))]

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        tables = {f"{TABLES}.{k}": cut(table, self.dims[k]) for k, table in enumerate(self.tables())}
        layers = {
            f"{name}.{key}": value
            for name in self.layers
            for key, value in getattr(self.module, name).state_dict(*args, **kwargs).items()
        }
        return tables | layers

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """The layers; the tables were read in place, into the shards that :meth:`state_dict` showed."""
        for name in self.layers:
            own = {key.removeprefix(f"{name}."): v for key, v in state_dict.items() if key.startswith(f"{name}.")}
            getattr(self.module, name).load_state_dict(own)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw what a DCN on one machine would draw from the same seed, whatever the number of ranks."""
        for table, dim in zip(self.tables(), self.dims, strict=True):
            _draw(table, dim)
        for name in self.layers:
            for part in getattr(self.module, name).modules():
                if hasattr(part, "reset_parameters"):
                    part.reset_parameters()


def shard(
    model: Model, processes: ProcessGroup, config: TrainingConfig, sharding: str, embedding: str = "auto"
) -> tuple[Any, ShardedOptimizer]:
    """Shard ``model``, which is on the meta device, initialise it, and make its optimiser.

    The weights depend on the configuration's seed alone; each rank then draws its own dropout.

    Args:
        sharding: "table", "row" or "column"; "auto" lets TorchRec's planner choose for each table.
        embedding: "fbgemm" updates the tables within the backward pass, "fastcross" after it, by its own kernels;
            "auto" takes fbgemm where it has the optimiser for the device.
    """
    optimizer, lr, seed = config.optimizer, config.lr, config.seed
    rows = -(-config.batch_size // processes.size)
    if not isinstance(model, DCN | DNN) or not isinstance(model.embedding, EmbeddingStack):
        raise ValueError(f"only the models dcn and dnn can be sharded; got {type(model).__name__}")
    if not model.embedding.dims:
        raise ValueError("there is no table to shard, for the data has no categorical columns; train in one process")
    if optimizer not in ("adam", "sgd"):
        raise ValueError(f"sharded tables have the optimizers adam and sgd; got {optimizer}: train in one process")
    fused = embedding != "fastcross" and has_fused(optimizer, processes.device)
    if embedding == "fbgemm" and not fused:
        raise ValueError(f"fbgemm has no {optimizer} for the {processes.device.type}; use --embedding fastcross")
    tables = model.embedding = EmbeddingTables(model.embedding, processes)  # type: ignore[assignment]
    kind = torch.optim.Adam if optimizer == "adam" else torch.optim.SGD
    in_backward = kind if fused else torch.optim.SGD  # a kernel without moments, to be replaced
    apply_optimizer_in_backward(in_backward, tables.collection.parameters(), {"lr": lr})
    sharded = ShardedDCN(model, processes, sharding, rows)
    torch.manual_seed(seed)
    sharded.reset_parameters()
    shards = [] if fused else replace_lookups(sharded.module.embedding.collection)
    sharded.init_data_parallel()
    if processes.rank:
        torch.manual_seed(hash((seed, processes.rank)))
    layers = [p for name, p in sharded.named_parameters() if not name.startswith("embedding.")]
    rows_optimizer = (
        FusedRows(sharded.fused_optimizer, tables.dims, lr, optimizer)
        if fused
        else ShardedRows(shards, sharded.tables(), tables.dims, lr, optimizer)
    )
    return sharded, ShardedOptimizer([kind(layers, lr=lr, fused=True), rows_optimizer], processes)


def has_fused(optimizer: str, device: torch.device) -> bool:
    """Whether fbgemm can update rows within the backward pass: its CPU build has no Adam."""
    return optimizer == "sgd" or device.type == "cuda"


def _draw(table: ShardedTensor, dim: int) -> None:
    """N(0, 1/n_e), drawn from PyTorch's generator as for one whole table, of which this rank keeps its shards.

    PyTorch draws 16 numbers at a time (and the last 16 anew): pieces of a multiple of 16 are the same numbers.
    """
    shards = [(shard.tensor, shard.metadata.shard_offsets) for shard in table.local_shards()]
    for tensor, _ in shards:
        tensor.zero_()
    rows, start = table.size(0), 0
    while start < rows:
        stop = start + CHUNK
        stop = rows if (rows - stop) * dim < 16 else stop
        values = torch.empty(stop - start, dim).normal_(std=dim**-0.5)
        for tensor, (row, column) in shards:
            lo, hi = max(start, row), min(stop, row + tensor.shape[0])
            width = min(dim - column, tensor.shape[1])
            if lo < hi and width > 0:
                tensor[lo - row : hi - row, :width] = values[lo - start : hi - start, column : column + width]
        start = stop
