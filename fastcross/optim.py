"""Optimisers for a model with embedding tables: PyTorch's own for its layers, a lazy one for the rows of its tables.

Lazy: a row that no example of the batch names keeps its value and its moments, so a step costs the same however high
the tables are. Adam's bias correction counts all steps, like :class:`torch.optim.SparseAdam`; a table whose rows are
all in every batch is updated exactly as :class:`torch.optim.Adam` would, and likewise with AdamW and Adagrad.
"""

from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fastcross.gradients import Rows, clip, clip_grad_norm, gradients, is_like, kind, rows_of
from fastcross.layers.embedding import EmbeddingStack
from fastcross.ops import backends

__all__ = ["OPTIMIZERS", "Optimizer", "RowAdagrad", "RowAdam", "RowSGD", "clip_grad_norm", "configure"]

WEIGHT_DECAY = 0.01  # of AdamW, as torch.optim's own


def configure(model: nn.Module, lr: float = 0.001, name: str = "adam") -> "Optimizer":
    """An optimiser for all trainable parameters of ``model``.

    Args:
        model: tables of its :class:`~fastcross.embedding.EmbeddingStack` layers are updated lazily, the rest as usual.
        lr: the learning rate.
        name: "adam", "adamw" (a weight decay of 0.01), "adagrad", "rowwise_adagrad" (which keeps one number for each
            row of a table; Adagrad for the layers) or "sgd".
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"name must be one of {', '.join(OPTIMIZERS)}; got {name!r}")
    stacks = [module for module in model.modules() if isinstance(module, EmbeddingStack)]
    tables = {table: None for stack in stacks for table in stack.tables if table.requires_grad}
    layers = [p for p in model.parameters() if p.requires_grad and p not in tables]
    usual, rows = OPTIMIZERS[name]
    parts: list[torch.optim.Optimizer] = []
    if layers:
        # Not every device has a fused Adagrad.
        fused = usual is not torch.optim.Adagrad and all(p.is_floating_point() for p in layers)
        parts.append(usual(layers, lr=lr, fused=fused or None))
    if tables:
        parts.append(rows(list(tables), lr=lr))
    if not parts:
        raise ValueError("the model has no parameter that requires a gradient")
    return Optimizer(parts)


class Optimizer(torch.optim.Optimizer):
    """Several optimisers as one: schedulers and checkpoints see all their parameter groups."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = list(parts)
        # The very groups and no copies of them: a learning rate set here is one set there.
        super().__init__([{"params": group["params"]} for part in parts for group in part.param_groups], {})
        self.param_groups = [group for part in parts for group in part.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = _call(closure)
        for part in self.parts:
            part.step()
        return loss

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """As :func:`clip_grad_norm`, over all parameters of this optimiser."""
        return clip(gradients(p for group in self.param_groups for p in group["params"]), max_norm)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the whole state or, where some of it does not fit, raises and leaves everything as it was."""
        if len(state_dict["parts"]) != len(self.parts):
            raise ValueError(f"the state must have {len(self.parts)} parts; got {len(state_dict['parts'])}")
        before = [(part.state, part.param_groups) for part in self.parts]
        try:
            for part, state in zip(self.parts, state_dict["parts"], strict=True):
                part.load_state_dict(state)
        except Exception:
            for part, (state, groups) in zip(self.parts, before, strict=True):
                part.state, part.param_groups = state, groups
            raise
        self.param_groups = [group for part in self.parts for group in part.param_groups]


class RowOptimizer(torch.optim.Optimizer):
    """Updates the rows that have a gradient, and what it keeps of them; a subclass says how."""

    kept: tuple[str, ...] = ()  # names of what is kept of each table

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = _call(closure)
        with torch.no_grad():
            # All groups are read before the first is written: a gradient or moment that does not fit changes nothing.
            found = [(group, *self._read(group["params"])) for group in self.param_groups]
            for group, tables, rows, moments in found:
                if "step" in group:
                    group["step"] += 1
                for kernels, chosen in _by_backend(tables):
                    self._update(kernels, group, *_pick(chosen, tables, moments, rows))
                _count_as_changed(tables)
        return loss

    def _update(
        self, kernels: ModuleType, group: dict[str, Any], tables: list[Tensor], moments: list[Any], rows: list[Rows]
    ) -> None:
        raise NotImplementedError

    def _read(self, parameters: list[Tensor]) -> tuple[list[Tensor], list[Rows], list[tuple[Tensor, ...]]]:
        tables, rows = _with_rows(parameters)
        return tables, rows, [self.moments(table) for table in tables]

    def moments(self, table: Tensor) -> tuple[Tensor, ...]:
        """What is kept of a table, Adam's (m, v) for example; zeros before its first step."""
        if not self.kept:
            return ()
        state, like = self.state[table], self._like(table)
        if not state:
            state.update({name: _zeros(like) for name in self.kept})
        for name in self.kept:
            moment = state.get(name)
            if not isinstance(moment, Tensor) or not is_like(moment, like):
                raise ValueError(
                    f"{name} must be like its table, {kind(like)}; got {kind(moment)}: "
                    "a table that was replaced needs a new optimiser"
                )
            state[name] = moment.contiguous()  # an expanded one has less memory than rows
        return tuple(state[name] for name in self.kept)

    def _like(self, table: Tensor) -> Tensor:
        """What each of the kept tensors resembles in shape, dtype and device."""
        return table

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state or, where a moment does not fit its table, raises and leaves everything as it was."""
        before = self.state, self.param_groups
        super().load_state_dict(state_dict)
        try:
            for table in list(self.state):
                self.moments(table)
        except ValueError:
            self.state, self.param_groups = before
            raise


class RowAdam(RowOptimizer):
    """Adam on the rows that have a gradient: m += (1-β₁)(g-m), v += (1-β₂)(g²-v), w -= lr m̂ / (√v̂ + ε).

    With a ``weight_decay`` AdamW, lazy like the rest: before a step, w -= lr weight_decay w on the rows of the batch
    alone. A row that is rare therefore decays as rarely, where :class:`torch.optim.AdamW` would let it fade between its
    batches, at the cost of the whole table in every step.
    """

    kept = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        tables: Iterable[Tensor],
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if not (lr >= 0 and eps >= 0 and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(f"lr and eps must be at least 0 and betas in [0, 1); got {lr}, {eps} and {betas}")
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay must be at least 0; got {weight_decay}")
        super().__init__(tables, {"lr": lr, "betas": betas, "eps": eps, "step": 0, "weight_decay": weight_decay})

    def _update(
        self, kernels: ModuleType, group: dict[str, Any], tables: list[Tensor], moments: list[Any], rows: list[Rows]
    ) -> None:
        options = float(group["lr"]), tuple(group["betas"]), group["eps"], group["step"]
        # A state that was saved before there was a decay has none.
        kernels.adam_rows(tables, moments, rows, *options, group.get("weight_decay", 0.0))


class RowAdagrad(RowOptimizer):
    """Adagrad on the rows that have a gradient: s += g², w -= lr g / (√s + ε).

    ``row_wise`` keeps one s for each row in place of one for each element, s += mean(g²): a table's state then is one
    column, where Adam keeps two more tables.
    """

    kept = ("sum",)

    def __init__(self, tables: Iterable[Tensor], lr: float = 0.01, eps: float = 1e-10, row_wise: bool = False) -> None:
        if not (lr >= 0 and eps >= 0):
            raise ValueError(f"lr and eps must be at least 0; got {lr} and {eps}")
        super().__init__(tables, {"lr": lr, "eps": eps})
        self.row_wise = row_wise

    def _like(self, table: Tensor) -> Tensor:
        return table[:, 0] if self.row_wise else table

    def _update(
        self, kernels: ModuleType, group: dict[str, Any], tables: list[Tensor], moments: list[Any], rows: list[Rows]
    ) -> None:
        sums = [kept[0] for kept in moments]
        kernels.adagrad_rows(tables, sums, rows, float(group["lr"]), group["eps"], self.row_wise)


class RowSGD(RowOptimizer):
    """w -= lr g on the rows that have a gradient."""

    def __init__(self, tables: Iterable[Tensor], lr: float = 0.001) -> None:
        if not lr >= 0:
            raise ValueError(f"lr must be at least 0; got {lr}")
        super().__init__(tables, {"lr": lr})

    def _update(
        self, kernels: ModuleType, group: dict[str, Any], tables: list[Tensor], moments: list[Any], rows: list[Rows]
    ) -> None:
        kernels.sgd_rows(tables, rows, float(group["lr"]))


def _adamw_rows(tables: Iterable[Tensor], lr: float) -> RowAdam:
    return RowAdam(tables, lr, weight_decay=WEIGHT_DECAY)


def _rowwise_adagrad_rows(tables: Iterable[Tensor], lr: float) -> RowAdagrad:
    return RowAdagrad(tables, lr, row_wise=True)


# Of a model's layers, and of the rows of its tables.
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], Callable[..., RowOptimizer]]] = {
    "adam": (torch.optim.Adam, RowAdam),
    "adamw": (torch.optim.AdamW, _adamw_rows),  # torch.optim.AdamW decays by WEIGHT_DECAY by itself
    "adagrad": (torch.optim.Adagrad, RowAdagrad),
    "rowwise_adagrad": (torch.optim.Adagrad, _rowwise_adagrad_rows),
    "sgd": (torch.optim.SGD, RowSGD),
}


def _with_rows(parameters: list[Tensor]) -> tuple[list[Tensor], list[Rows]]:
    """The tables whose gradients have rows, and these."""
    found = [(table, rows_of(table)) for table in parameters if table.grad is not None]
    found = [(table, rows) for table, rows in found if len(rows[0])]
    return [table for table, _ in found], [rows for _, rows in found]


def _zeros(table: Tensor) -> Tensor:
    """Zeros that take up memory only as rows are touched, on a CPU: what the system hands out is zero already."""
    if table.device.type == "cpu" and table.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(np.zeros(table.shape, str(table.dtype).removeprefix("torch.")))
    return torch.zeros_like(table, memory_format=torch.contiguous_format)


def _by_backend(tables: list[Tensor]) -> list[tuple[ModuleType, list[int]]]:
    """Which tables go to which kernels, those of one dtype together; the CPU's take contiguous ones."""
    groups: dict[tuple[str, torch.dtype], list[int]] = {}
    for i, table in enumerate(tables):
        backend = backends.choose("auto", table.device, table.dtype) if table.is_contiguous() else "torch"
        groups.setdefault((backend, table.dtype), []).append(i)
    return [(backends.kernels("row_updates", backend), chosen) for (backend, _), chosen in groups.items()]


def _pick(chosen: list[int], *lists: list[Any]) -> list[list[Any]]:
    return [[each[i] for i in chosen] for each in lists]


def _count_as_changed(tables: list[Tensor]) -> None:
    """For autograd, which would not notice that a kernel wrote to them."""
    for table in tables:
        torch.autograd.graph.increment_version(table)


def _call(closure: Callable[[], Any] | None) -> Any:
    return None if closure is None else torch.enable_grad()(closure)()
