"""Optimisers for a model with embedding tables: PyTorch's own for its layers, a lazy one for the rows of its tables.

Lazy: a row that no example of the batch names keeps its value and its moments, so a step costs the same however high
the tables are. Adam's bias correction counts all steps, like :class:`torch.optim.SparseAdam`; a table whose rows are
all in every batch is updated exactly as :class:`torch.optim.Adam` would.
"""

import functools
import importlib.util
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fastcross.layers.embedding import EmbeddingStack


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

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
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
        if len(state_dict["parts"]) != len(self.parts):
            raise ValueError(f"the state must have {len(self.parts)} parts; got {len(state_dict['parts'])}")
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
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
        super().__init__(tables, {"lr": lr, "betas": betas, "eps": eps, "step": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            tables = [table for table in group["params"] if table.grad is not None]
            moments = [self.moments(table) for table in tables]
            arguments = group["lr"], tuple(group["betas"]), group["eps"], group["step"]
            for module, chosen in _split(tables):
                module.adam_rows(
                    [tables[i] for i in chosen],
                    [moments[i] for i in chosen],
                    [_rows(tables[i].grad) for i in chosen],
                    *arguments,
                )

    def moments(self, table: Tensor) -> tuple[Tensor, Tensor]:
        state = self.state[table]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = _zeros(table), _zeros(table)
        return state["exp_avg"], state["exp_avg_sq"]


class RowSGD(torch.optim.Optimizer):
    """w -= lr g on the rows that have a gradient."""

    def __init__(self, tables: Iterable[Tensor], lr: float = 0.001) -> None:
        super().__init__(tables, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            tables = [table for table in group["params"] if table.grad is not None]
            for module, chosen in _split(tables):
                module.sgd_rows([tables[i] for i in chosen], [_rows(tables[i].grad) for i in chosen], group["lr"])


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
                parameter.grad = parameter.grad.coalesce()
            values.append(parameter.grad._values() if parameter.grad.is_sparse else parameter.grad)
    return values


def scale_gradients(values: list[Tensor], norm: Tensor, max_norm: float) -> None:
    """Multiplies gradients of this norm by min(1, max_norm / norm)."""
    if max_norm < float("inf"):
        # Without a look at the norm, which would wait for the device; min(1, …) leaves small gradients as they are.
        # Gradients that are not finite stay as they are, so that a caller can still find the first of them.
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0).nan_to_num(nan=1.0)
        torch._foreach_mul_(values, factor)


def _rows(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, values) of a gradient; a dense one has all rows."""
    if not gradient.is_sparse:
        return torch.arange(gradient.shape[0], device=gradient.device), gradient.contiguous()
    gradient = gradient.coalesce()
    return gradient._indices()[0].contiguous(), gradient._values().contiguous()


def _zeros(table: Tensor) -> Tensor:
    """Zeros that take up memory only as rows are touched, on a CPU: what the system hands out is zero already."""
    if table.device.type == "cpu" and table.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(np.zeros(table.shape, str(table.dtype).removeprefix("torch.")))
    return torch.zeros_like(table, memory_format=torch.contiguous_format)


def _split(tables: list[Tensor]) -> list[tuple[Any, list[int]]]:
    """Which tables the CPU kernels take, by dtype, and which this module's own operators."""
    groups: dict[Any, list[int]] = {}
    for i, table in enumerate(tables):
        fits = table.device.type == "cpu" and table.dtype in (torch.float32, torch.float64) and table.is_contiguous()
        groups.setdefault(table.dtype if fits and _kernels() else None, []).append(i)
    return [(_TorchRows if dtype is None else _kernels(), chosen) for dtype, chosen in groups.items()]


class _TorchRows:
    """The kernels' functions in PyTorch's operators, for any device."""

    @staticmethod
    def adam_rows(tables, moments, gradients, lr, betas, eps, step) -> None:
        for table, (first, second), (rows, g) in zip(tables, moments, gradients, strict=True):
            m = first[rows].lerp_(g, 1 - betas[0])
            v = second[rows].lerp_(g.square(), 1 - betas[1])
            first[rows], second[rows] = m, v
            denominator = v.sqrt_().div_((1 - betas[1] ** step) ** 0.5).add_(eps)
            table[rows] -= (lr / (1 - betas[0] ** step)) * m / denominator

    @staticmethod
    def sgd_rows(tables, gradients, lr) -> None:
        for table, (rows, g) in zip(tables, gradients, strict=True):
            table[rows] -= lr * g


@functools.cache
def _kernels() -> ModuleType | None:
    if importlib.util.find_spec("numba") is None:
        return None
    from fastcross.kernels.cpu import embedding

    return embedding
