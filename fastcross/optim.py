"""Optimisers for a model with embedding tables: PyTorch's own for its layers, a lazy one for the rows of its tables.

Lazy: a row that no example of the batch names keeps its value and its moments, so a step costs the same however high
the tables are. Adam's bias correction counts all steps, like :class:`torch.optim.SparseAdam`; a table whose rows are
all in every batch is updated exactly as :class:`torch.optim.Adam` would.
"""

from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fastcross.layers.embedding import EmbeddingStack
from fastcross.ops import backends

Rows = tuple[Tensor, Tensor]  # of a gradient: distinct rows, ascending, and what each of them gets


def configure(model: nn.Module, lr: float = 0.001, name: str = "adam") -> "Optimizer":
    """An optimiser for all trainable parameters of ``model``.

    Args:
        model: tables of its :class:`~fastcross.embedding.EmbeddingStack` layers are updated lazily, the rest as usual.
        lr: the learning rate.
        name: "adam" or "sgd".
    """
    if name not in ("adam", "sgd"):
        raise ValueError(f'name must be "adam" or "sgd"; got {name!r}')
    stacks = [module for module in model.modules() if isinstance(module, EmbeddingStack)]
    tables = {table: None for stack in stacks for table in stack.tables if table.requires_grad}
    layers = [p for p in model.parameters() if p.requires_grad and p not in tables]
    kind = torch.optim.Adam if name == "adam" else torch.optim.SGD
    rows = RowAdam if name == "adam" else RowSGD
    parts: list[torch.optim.Optimizer] = []
    if layers:
        parts.append(kind(layers, lr=lr, fused=all(p.is_floating_point() for p in layers)))
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
        return _clip(gradients(p for group in self.param_groups for p in group["params"]), max_norm)

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


class RowAdam(torch.optim.Optimizer):
    """Adam on the rows that have a gradient: m += (1-β₁)(g-m), v += (1-β₂)(g²-v), w -= lr m̂ / (√v̂ + ε)."""

    def __init__(
        self,
        tables: Iterable[Tensor],
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        if not (lr >= 0 and eps >= 0 and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(f"lr and eps must be at least 0 and betas in [0, 1); got {lr}, {eps} and {betas}")
        super().__init__(tables, {"lr": lr, "betas": betas, "eps": eps, "step": 0})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = _call(closure)
        with torch.no_grad():
            # All groups are read before the first is written: a gradient or moment that does not fit changes nothing.
            found = [(group, *self._read(group["params"])) for group in self.param_groups]
            for group, tables, rows, moments in found:
                group["step"] += 1
                arguments = float(group["lr"]), tuple(group["betas"]), group["eps"], group["step"]
                for kernels, chosen in _by_backend(tables):
                    kernels.adam_rows(*_pick(chosen, tables, moments, rows), *arguments)
                _count_as_changed(tables)
        return loss

    def _read(self, parameters: list[Tensor]) -> tuple[list[Tensor], list[Rows], list[tuple[Tensor, Tensor]]]:
        tables, rows = _with_rows(parameters)
        return tables, rows, [self.moments(table) for table in tables]

    def moments(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """A table's (m, v), zeros before its first step."""
        state = self.state[table]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = _zeros(table), _zeros(table)
        for name in ("exp_avg", "exp_avg_sq"):
            moment = state.get(name)
            if not isinstance(moment, Tensor) or _kind(moment) != _kind(table):
                raise ValueError(
                    f"{name} must be like its table, {_kind(table)}; got {_kind(moment)}: "
                    "a table that was replaced needs a new optimiser"
                )
            state[name] = moment.contiguous()  # an expanded one has less memory than rows
        return state["exp_avg"], state["exp_avg_sq"]

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


class RowSGD(torch.optim.Optimizer):
    """w -= lr g on the rows that have a gradient."""

    def __init__(self, tables: Iterable[Tensor], lr: float = 0.001) -> None:
        if not lr >= 0:
            raise ValueError(f"lr must be at least 0; got {lr}")
        super().__init__(tables, {"lr": lr})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = _call(closure)
        with torch.no_grad():
            found = [(float(group["lr"]), *_with_rows(group["params"])) for group in self.param_groups]
            for lr, tables, rows in found:
                for kernels, chosen in _by_backend(tables):
                    kernels.sgd_rows(*_pick(chosen, tables, rows), lr)
                _count_as_changed(tables)
        return loss


@torch.no_grad()
def clip_grad_norm(model: nn.Module, max_norm: float) -> Tensor:
    """Scales all gradients so that their global norm is at most ``max_norm``; returns the norm before.

    A table's gradient counts once per row, after the sum over the examples that share the row.
    """
    return _clip(gradients(model.parameters()), max_norm)


def _clip(values: list[Tensor], max_norm: float) -> Tensor:
    norm = nn.utils.get_total_norm(values)
    scale_gradients(values, norm, max_norm)
    return norm


def gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """What the parameters' gradients hold; of sparse ones the values, one row for each distinct id."""
    values = []
    for parameter in parameters:
        if parameter.grad is not None:
            if parameter.grad.is_sparse:
                parameter.grad = coalesced(parameter.grad)
            values.append(parameter.grad._values() if parameter.grad.is_sparse else parameter.grad)
    return values


def scale_gradients(values: list[Tensor], norm: Tensor, max_norm: float) -> None:
    """Multiplies gradients of this norm by min(1, max_norm / norm)."""
    if values and max_norm < float("inf"):
        # Without a look at the norm, which would wait for the device; min(1, …) leaves small gradients as they are.
        # Gradients that are not finite stay as they are, so that a caller can still find the first of them.
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0).nan_to_num(nan=1.0)
        torch._foreach_mul_(values, factor)


def coalesced(gradient: Tensor) -> Tensor:
    """A sparse gradient with each row once, in ascending order.

    PyTorch forgets that a gradient is coalesced when it puts it into ``.grad``, and would sort it again; a look at the
    rows is all that most need.
    """
    rows = gradient._indices()
    if gradient.sparse_dim() != 1 or rows.device.type != "cpu":
        return gradient.coalesce()
    numbers = rows[0].numpy()
    if bool((numbers[1:] > numbers[:-1]).all()):
        return gradient if gradient.is_coalesced() else _sparse(gradient, is_coalesced=True)
    return _sparse(gradient, is_coalesced=False).coalesce()


def _sparse(gradient: Tensor, is_coalesced: bool) -> Tensor:
    contents = gradient._indices(), gradient._values(), gradient.shape
    return torch.sparse_coo_tensor(*contents, check_invariants=False, is_coalesced=is_coalesced)


def _with_rows(parameters: list[Tensor]) -> tuple[list[Tensor], list[Rows]]:
    """The tables whose gradients have rows, and these."""
    found = [(table, _rows(table)) for table in parameters if table.grad is not None]
    found = [(table, rows) for table, rows in found if len(rows[0])]
    return [table for table, _ in found], [rows for _, rows in found]


def _rows(table: Tensor) -> Rows:
    """What a table's gradient says, in its dtype, once it was seen to fit the table; a dense one has all rows."""
    gradient: Any = table.grad
    fits = gradient.shape == table.shape and gradient.device == table.device and table.dim() == 2
    if not fits or gradient.layout not in (torch.strided, torch.sparse_coo):
        raise ValueError(f"a gradient must be like its table, {_kind(table)}; got {_kind(gradient)}")
    if not gradient.is_sparse:
        return torch.arange(gradient.shape[0], device=gradient.device), gradient.to(table.dtype).contiguous()
    if gradient.sparse_dim() != 1:
        found = f"{gradient.sparse_dim()} of {_kind(table)}"
        raise ValueError(f"a sparse gradient must have whole rows, one sparse dimension; got {found}")
    gradient = coalesced(gradient)
    rows, g = gradient._indices()[0].contiguous(), gradient._values().to(table.dtype).contiguous()
    if len(rows) and rows.device.type == "cpu" and not 0 <= int(rows[0]) <= int(rows[-1]) < table.shape[0]:
        bad = int(rows[0]) if rows[0] < 0 else int(rows[-1])
        raise ValueError(f"a gradient must name rows 0 to {table.shape[0] - 1} of its table; got row {bad}")
    return rows, g


def _kind(value: Any) -> str:
    """A tensor's shape, dtype and device, to be compared and shown."""
    return f"{tuple(value.shape)} {value.dtype} on {value.device}" if isinstance(value, Tensor) else repr(value)


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
