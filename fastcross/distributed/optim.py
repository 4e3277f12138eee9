"""The optimiser of a sharded model: PyTorch's own for the layers, and for the tables fbgemm's or fastcross's rows.

Its state has the structure of :class:`fastcross.optim.Optimizer`'s, with ShardedTensors for the tables' moments.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastcross.distributed.internals import Shard as TensorShard
from fastcross.distributed.internals import ShardedTensor, sharded_tensor
from fastcross.distributed.lookup import Shard
from fastcross.distributed.process_group import ProcessGroup
from fastcross.distributed.tables import cut, table_name
from fastcross.optim import Optimizer, RowAdam, RowSGD, gradients, scale_gradients


class ShardedOptimizer(Optimizer):
    """The parts of a sharded model's optimiser as one."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer], processes: ProcessGroup) -> None:
        super().__init__(parts)
        self.processes = processes

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("the optimiser of a sharded model is not to be copied or pickled; its state_dict() is")

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Over the layers, whose gradients are the same on every rank, and the rows of all ranks.

        Not over rows that fbgemm has updated within the backward pass, before the norm could be known.
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
        self, shards: Sequence[Shard], tables: Sequence[ShardedTensor], dims: Sequence[int], lr: float, name: str
    ) -> None:
        # A rank without shards has an empty parameter, for an optimiser wants one.
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
                    name: cut(_like(table, [TensorShard(pair[i], metadata) for metadata, pair in own]), self.dims[k])
                    for i, name in enumerate(("exp_avg", "exp_avg_sq"))
                }
        return {"state": state, "param_groups": [_options(self.param_groups[0], self.dims)]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The moments were read in place, into the tensors that :meth:`state_dict` showed."""
        self.param_groups[0].update({k: v for k, v in state_dict["param_groups"][0].items() if k != "params"})


class FusedRows(torch.optim.Optimizer):
    """Gives fbgemm, which updates the rows within the backward pass, its rate, and shows its state.

    Adam is fbgemm's own: lazy like RowAdam, its bias correction counts all steps too.
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
    """A parameter group as PyTorch writes it for a model with all the tables: with their numbers."""
    return {name: value for name, value in group.items() if name != "params"} | {"params": list(range(len(dims)))}


def _like(table: ShardedTensor, shards: list[TensorShard]) -> ShardedTensor:
    return sharded_tensor(shards, table.metadata())
