"""A DCN from meta tensors to a model whose tables are sharded over the ranks, and the optimiser for it.

The optimiser's state has the structure of :class:`fastcross.optim.Optimizer`'s, with ShardedTensors for the moments of
the tables.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from fastcross.distributed.internals import Shard, ShardedTensor, sharded_tensor
from fastcross.distributed.process_group import ProcessGroup
from fastcross.distributed.tables import (
    EmbeddingTables,
    Sharder,
    TableShard,
    cut,
    plan_sharding,
    replace_lookups,
    table_name,
)
from fastcross.layers.embedding import EmbeddingStack
from fastcross.models.base import Model
from fastcross.models.baselines import DNN
from fastcross.models.dcn import DCN
from fastcross.optim import Optimizer, RowAdam, RowSGD, gradients, scale_gradients
from fastcross.training.config import TrainingConfig

TABLES = "embedding.tables"  # their prefix in a DCN's state
LAYERS = ("cross", "deep", "logits")  # the other layers, in the order of initialisation; a DNN has no cross
CHUNK = 1 << 16  # rows of a table that are drawn at once; a multiple of 16, see _draw


class ShardedDCN(DistributedModelParallel):
    """A DCN whose tables TorchRec has sharded and whose other layers DDP replicates; otherwise used like a DCN.

    Its state has the names and shapes of a DCN's, with ShardedTensors for the tables.
    """

    def __init__(self, model: DCN | DNN, processes: ProcessGroup, sharding: str, rows: int) -> None:
        _synchronise(model)
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
        """TorchRec's tensors of the tables, with fbgemm's padded widths."""
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
        """Loads the layers. The tables were read in place, into the shards that :meth:`state_dict` returned."""
        for name in self.layers:
            own = {key.removeprefix(f"{name}."): v for key, v in state_dict.items() if key.startswith(f"{name}.")}
            getattr(self.module, name).load_state_dict(own)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the parameters that a DCN on one machine draws from the same seed, for any number of ranks."""
        for table, dim in zip(self.tables(), self.dims, strict=True):
            _draw(table, dim, self.config.embedding_std)
        for name in self.layers:
            for part in getattr(self.module, name).modules():
                if hasattr(part, "reset_parameters"):
                    part.reset_parameters()
        if isinstance(self.module, DCN):
            self.module.start_deep()


def _draw(table: ShardedTensor, dim: int, std: float | None = None) -> None:
    """N(0, 1/n_e) or N(0, std²), drawn from PyTorch's generator as for a whole table. This rank keeps its shards of it.

    PyTorch draws 16 numbers at a time (and the last 16 again), so chunks of a multiple of 16 give the same numbers.
    """
    shards = [(shard.tensor, shard.metadata.shard_offsets) for shard in table.local_shards()]
    for tensor, _ in shards:
        tensor.zero_()
    rows, start = table.size(0), 0
    while start < rows:
        stop = start + CHUNK
        stop = rows if (rows - stop) * dim < 16 else stop
        values = torch.empty(stop - start, dim).normal_(std=dim**-0.5)
        if std is not None:
            values *= std * dim**0.5
        for tensor, (row, column) in shards:
            lo, hi = max(start, row), min(stop, row + tensor.shape[0])
            width = min(dim - column, tensor.shape[1])
            if lo < hi and width > 0:
                tensor[lo - row : hi - row, :width] = values[lo - start : hi - start, column : column + width]
        start = stop


class GlobalBatchNorm(nn.BatchNorm1d):
    """``y = (x - μ) / √(σ² + ε) · weight + bias``, μ and σ² over the rows of all ranks; parameters as BatchNorm1d's."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        # μ and Σ(x - μ)² of each rank, combined: plain sums of squares would cancel in float32.
        rows = torch.full((1, x.shape[1]), float(x.shape[0]), device=x.device)
        detached = x.detach().float()
        mean = detached.mean(0, keepdim=True).nan_to_num()  # a rank without rows has weight 0
        local = torch.cat((rows, mean, (detached - mean).square().sum(0, keepdim=True)))
        found = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(found, local)
        n, means, squares = torch.stack(found).unbind(1)
        total = n.sum(0)
        mu = (n * means).sum(0) / total
        variance = (squares + n * (means - mu).square()).sum(0) / total
        self._count(mu, variance, total)
        y = _Normalise.apply(x, mu, torch.rsqrt(variance + self.eps), total)
        return torch.addcmul(self.bias, y, self.weight).to(x.dtype)

    @torch.no_grad()
    def _count(self, mu: Tensor, variance: Tensor, total: Tensor) -> None:
        """Update the running statistics like BatchNorm1d, with the unbiased variance."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        self.num_batches_tracked += 1
        self.running_mean.lerp_(mu, self.momentum)
        self.running_var.lerp_(variance * total / (total - 1), self.momentum)


class _Normalise(torch.autograd.Function):
    """y = (x - μ) s;  dx = s (dy - mean dy - y · mean(dy y)), means over the rows of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mu: Tensor, s: Tensor, total: Tensor) -> Tensor:
        y = (x - mu) * s
        ctx.save_for_backward(y, s, total)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        y, s, total = ctx.saved_tensors
        sums = torch.stack((dy.sum(0), (dy * y).sum(0)))
        dist.all_reduce(sums)
        mean_dy, mean_dyy = sums / total
        return s * (dy - mean_dy - y * mean_dyy), None, None, None


def _synchronise(model: nn.Module) -> None:
    """Give every BatchNorm1d of ``model`` the statistics of all ranks."""
    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is nn.BatchNorm1d:
                replacement = GlobalBatchNorm(child.num_features, child.eps, child.momentum, device="meta")
                replacement.load_state_dict(child.state_dict(), assign=True)
                setattr(module, name, replacement)


class ShardedOptimizer(Optimizer):
    """The optimisers of a sharded model's parts, as one."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer], processes: ProcessGroup) -> None:
        super().__init__(parts)
        self.processes = processes

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("the optimiser of a sharded model is not to be copied or pickled; its state_dict() is")

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clips by the norm over the layers, whose gradients are equal on all ranks, and the rows of all ranks.

        Rows that fbgemm has updated within the backward pass are not included: the norm was not known then.
        """
        layers, *rows = [gradients(p for group in part.param_groups for p in group["params"]) for part in self.parts]
        norm = nn.utils.get_total_norm(layers)
        values = [value for part in rows for value in part]
        if not any(isinstance(part, FusedRows) for part in self.parts):
            own = nn.utils.get_total_norm(values) if values else norm.new_zeros(())
            norm = (norm.square() + self.processes.sum(own.square())).sqrt()
        scale_gradients([*layers, *values], norm, max_norm)
        return norm


class ShardedRows(torch.optim.Optimizer):
    """fastcross's row updates, :class:`~fastcross.optim.RowAdam` or RowSGD, on the shards that this rank holds."""

    def __init__(
        self, shards: Sequence[TableShard], tables: Sequence[ShardedTensor], dims: Sequence[int], lr: float, name: str
    ) -> None:
        # A rank without shards has an empty parameter, because an optimiser needs one.
        weights = [shard.weight for shard in shards] or [nn.Parameter(torch.empty(0, 1))]
        super().__init__(weights, {"lr": lr})
        self.rows = RowAdam(weights, lr=lr) if name == "adam" else RowSGD(weights, lr=lr)
        self.param_groups = self.rows.param_groups
        self.shards, self.tables, self.dims = shards, tables, dims

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.rows.step()

    def state_dict(self) -> dict[str, Any]:
        state: dict[int, Any] = {}
        if isinstance(self.rows, RowAdam):
            moments = [(shard, self.rows.moments(shard.weight)) for shard in self.shards]
            for k, table in enumerate(self.tables):
                own = [(shard.metadata, pair) for shard, pair in moments if shard.table == table_name(k)]
                state[k] = {
                    name: cut(
                        sharded_tensor([Shard(pair[i], metadata) for metadata, pair in own], table.metadata()),
                        self.dims[k],
                    )
                    for i, name in enumerate(("exp_avg", "exp_avg_sq"))
                }
        return {"state": state, "param_groups": [_options(self.param_groups[0], self.dims)]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing to the moments: they were read in place, into the tensors that :meth:`state_dict` returned."""
        self.param_groups[0].update({k: v for k, v in state_dict["param_groups"][0].items() if k != "params"})


class FusedRows(torch.optim.Optimizer):
    """Sets the learning rate of fbgemm, which updates the rows within the backward pass, and returns its state.

    Adam is fbgemm's: lazy like RowAdam, and its bias correction counts all steps too.
    """

    def __init__(self, fused: Any, dims: Sequence[int], lr: float, name: str) -> None:
        adam = {"betas": (0.9, 0.999), "eps": 1e-8, "step": 0} if name == "adam" else {}
        super().__init__([nn.Parameter(torch.empty(0)) for _ in dims], {"lr": lr, **adam})
        self.fused, self.dims = fused, dims

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.fused.param_groups:
            group["lr"] = self.param_groups[0]["lr"]
        self.fused.zero_grad()  # where TorchRec hands the rate to fbgemm

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if "step" in self.param_groups[0]:
            self.param_groups[0]["step"] += 1

    def state_dict(self) -> dict[str, Any]:
        state: dict[int, Any] = {}
        for name, values in self.fused.state_dict()["state"].items():
            k = int(name.removesuffix(".weight").rpartition(".t")[2])
            found = {key.rpartition(".")[2]: value for key, value in values.items()}
            if "momentum1" in found:
                moments = {"exp_avg": found["momentum1"], "exp_avg_sq": found["exp_avg_sq"]}
                state[k] = {name: cut(moment, self.dims[k]) for name, moment in moments.items()}
        return {"state": state, "param_groups": [_options(self.param_groups[0], self.dims)]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.param_groups[0].update({k: v for k, v in state_dict["param_groups"][0].items() if k != "params"})
        if "step" in self.param_groups[0]:
            self.fused.set_optimizer_step(self.param_groups[0]["step"])


def _options(group: dict[str, Any], dims: Sequence[int]) -> dict[str, Any]:
    """A parameter group in PyTorch's format, for a model with all the tables, by their numbers."""
    return {name: value for name, value in group.items() if name != "params"} | {"params": list(range(len(dims)))}


def shard(
    model: Model, processes: ProcessGroup, config: TrainingConfig, sharding: str, embedding: str = "auto"
) -> tuple[Any, ShardedOptimizer]:
    """Shard ``model``, which is on the meta device, initialise it, and make its optimiser.

    The weights depend only on the configuration's seed. Each rank draws its own dropout masks.

    Args:
        sharding: "table", "row" or "column"; with "auto" TorchRec's planner chooses for each table.
        embedding: "fbgemm" updates the tables within the backward pass, "fastcross" after it, with its own kernels;
            "auto" uses fbgemm if it has the optimiser for the device.
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
    """Whether fbgemm has this optimiser for the device: its CPU build has no Adam."""
    return optimizer == "sgd" or device.type == "cuda"
