"""Optimisers for a model with embedding tables: PyTorch's for its layers, lazy ones for the rows of its tables.

Lazy means that rows outside the batch keep their values and moments. So the cost of a step does not depend on the
number of rows of the tables. Adam's bias correction counts all steps, like :class:`torch.optim.SparseAdam`. If every
batch has all rows of a table, the updates equal those of :class:`torch.optim.Adam`, AdamW and Adagrad.

One launch updates all tables. On other devices than the CPU a step does not synchronise. With ``capturable=True`` a
CUDA graph can capture it: the learning rate and the step number are then tensors on the device. ``Optimizer.set_lr``
and PyTorch's schedulers write to such a rate in place. A number assigned to ``group["lr"]`` would not reach a captured
step.

ops/row_updates.py describes the forms of a sparse gradient.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fastcross.layers.embedding import EmbeddingStack
from fastcross.ops import backends, row_updates
from fastcross.ops.row_updates import RowGradient, in_words, is_like, rows_of, summed

__all__ = ["OPTIMIZERS", "Optimizer", "RowAdagrad", "RowAdam", "RowSGD", "clip_grad_norm", "configure"]

WEIGHT_DECAY = 0.01  # of AdamW, as in torch.optim
NUMBERS = {"lr", "step"}  # entries of a group that change from step to step


def configure(
    model: nn.Module,
    lr: float = 0.001,
    name: str = "adam",
    *,
    sparse_gradients: bool = True,
    capturable: bool = False,
    backend: str = "auto",
) -> "Optimizer":
    """An optimiser for all trainable parameters of ``model``. It makes the gradients of the tables sparse.

    Args:
        model: tables of its :class:`EmbeddingStack` layers are updated lazily, all other parameters by PyTorch.
        lr: the learning rate.
        name: "adam", "adamw" (a weight decay of 0.01), "adagrad", "rowwise_adagrad" (one number per row of a table;
            Adagrad for the layers) or "sgd".
        sparse_gradients: whether the tables have sparse gradients; False for DistributedDataParallel, which needs
            dense ones.
        capturable: for steps in a CUDA graph: learning rate and step number are tensors on the device, as with
            PyTorch's Adam and AdamW. PyTorch's Adagrad does not support this, so it works for Adagrad only if there are
            no layers.
        backend: of the tables' updates; "auto" uses the kernels of their device, "torch" PyTorch's operators.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"name must be one of {', '.join(OPTIMIZERS)}; got {name!r}")
    stacks = [module for module in model.modules() if isinstance(module, EmbeddingStack)]
    for stack in stacks:
        stack.sparse_gradients = sparse_gradients
    tables = {table: None for stack in stacks for table in stack.tables if table.requires_grad}
    layers = [p for p in model.parameters() if p.requires_grad and p not in tables]
    usual, rows = OPTIMIZERS[name]
    parts: list[torch.optim.Optimizer] = []
    if layers:
        # Not every device has a fused Adagrad.
        fused = usual is not torch.optim.Adagrad and all(p.is_floating_point() for p in layers)
        if capturable and not fused:
            raise ValueError(f'capturable needs layers that "adam", "adamw" or "sgd" updates; got {name!r}')
        rate = torch.full((), lr, device=layers[0].device, dtype=torch.float32) if capturable else lr
        # SGD has no such option and no step number.
        options = {"capturable": True} if capturable and usual is not torch.optim.SGD else {}
        parts.append(usual(layers, lr=rate, fused=fused or None, **options))
    if tables:
        parts.append(rows(list(tables), lr=lr, capturable=capturable, backend=backend))
    if not parts:
        raise ValueError("the model has no parameter that requires a gradient")
    return Optimizer(parts)


class Optimizer(torch.optim.Optimizer):
    """Several optimisers as one: schedulers and checkpoints see all their parameter groups."""

    _is_made = False

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = list(parts)
        # The same groups, not copies: a learning rate set here is set there.
        super().__init__([{"params": group["params"]} for part in parts for group in part.param_groups], {})
        self.param_groups = [group for part in parts for group in part.param_groups]
        self._is_made = True

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: the groups stay the same objects as the parts' groups."""
        return super().__getstate__() | {"parts": self.parts, "_is_made": True}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises after construction: no part would update these parameters."""
        if self._is_made:
            raise ValueError(
                "its parts have their parameters already; for more, make a new optimiser: configure(model)"
            )
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = _call(closure)
        for part in self.parts:
            part.step()
        return loss

    def set_lr(self, lr: float) -> None:
        """Set the rate of every group. A rate on the device is written in place, for a captured step to read."""
        for group in self.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Like :func:`clip_grad_norm`, over all parameters of this optimiser."""
        return clip(gradients(p for group in self.param_groups for p in group["params"]), max_norm)

    def state_dict(self) -> dict[str, Any]:
        """The same whether learning rates are on the device or not."""
        parts = [part.state_dict() for part in self.parts]
        for group in (group for part in parts for group in part["param_groups"]):
            if isinstance(group.get("lr"), Tensor):
                group["lr"] = group["lr"].item()
        return {"parts": parts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the whole state. If a part does not fit, raises and changes nothing."""
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
        # capturable stays as it is here, whatever was saved.
        for group, old in zip(self.param_groups, (group for _, groups in before for group in groups), strict=True):
            if "capturable" in old:
                group["capturable"] = old["capturable"]
            if isinstance(old.get("lr"), Tensor):
                group["lr"] = old["lr"].fill_(group["lr"])


class RowOptimizer(torch.optim.Optimizer):
    """The base of optimisers that update only the rows with a gradient, and their moments.

    Args:
        backend: "auto" uses the kernels of the tables' device, "torch" PyTorch's operators.
        capturable: whether the learning rate and the step number are on the device.
    """

    kept: tuple[str, ...] = ()  # names of the moments of each table
    options: tuple[str, ...] = ("backend", "capturable")  # names of attributes beside the groups
    backend, capturable = "auto", False

    def __init__(
        self, tables: Iterable[Tensor], defaults: dict[str, Any], backend: str = "auto", capturable: bool = False
    ) -> None:
        backends.check(backend)
        self.backend, self.capturable = backend, capturable
        super().__init__(tables, defaults)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles; PyTorch's version would omit the options."""
        return super().__getstate__() | {name: getattr(self, name) for name in self.options}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._place(self.param_groups[-1])

    def _place(self, group: dict[str, Any]) -> None:
        """Move the rate and the step number to the tables' device, where a captured step reads them."""
        table = group["params"][0]
        for name in NUMBERS & group.keys():
            if self.capturable and not isinstance(group[name], Tensor):
                dtype = torch.promote_types(table.dtype, torch.float32)
                group[name] = torch.full((), group[name], dtype=dtype, device=table.device)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = _call(closure)
        with torch.no_grad():
            # All groups are read before the first is written: a gradient or moment that does not fit changes nothing.
            found = [(group, self._read(group["params"])) for group in self.param_groups]
            for group, entries in found:
                if "step" in group:
                    group["step"] += 1
                # Tables of one dtype and device are updated together.
                together: dict[tuple[str, torch.dtype, torch.device], list[Any]] = {}
                for table, backend, rows, moments in entries:
                    together.setdefault((backend, table.dtype, table.device), []).append((table, moments, rows))
                for (backend, *_), chosen in together.items():
                    self._update(backend, group, *map(list, zip(*chosen, strict=True)))
                for table, *_ in entries:
                    # Tell autograd that a kernel wrote to the table.
                    torch.autograd.graph.increment_version(table)
        return loss

    def _update(
        self, backend: str, group: dict[str, Any], tables: list[Tensor], moments: list[Any], rows: list[RowGradient]
    ) -> None:
        raise NotImplementedError

    def _read(self, parameters: list[Tensor]) -> list[tuple[Tensor, str, RowGradient, tuple[Tensor, ...]]]:
        """The tables whose gradients have rows, each with its backend, these rows and its moments."""
        having = [(table, self._backend(table)) for table in parameters if table.grad is not None]
        # The CPU kernels require distinct rows.
        found = [(table, backend, rows_of(table, is_compact=backend == "cpu")) for table, backend in having]
        return [(table, backend, rows, self.moments(table)) for table, backend, rows in found if len(rows[0])]

    def _backend(self, table: Tensor) -> str:
        """The backend for a table; kernels need contiguous tables."""
        return backends.choose(self.backend, table) if table.is_contiguous() else "torch"

    def _lr(self, group: dict[str, Any]) -> float | Tensor:
        return group["lr"] if self.capturable else float(group["lr"])

    def moments(self, table: Tensor) -> tuple[Tensor, ...]:
        """The moments of a table, such as Adam's (m, v); zeros before its first step."""
        if not self.kept:
            return ()
        state, like = self.state[table], self._like(table)
        if not state:
            state.update({name: _zeros(like) for name in self.kept})
        for name in self.kept:
            moment = state.get(name)
            if not isinstance(moment, Tensor) or not is_like(moment, like):
                raise ValueError(
                    f"{name} must be like its table, {in_words(like)}; got {in_words(moment)}: "
                    "a table that was replaced needs a new optimiser"
                )
            state[name] = moment.contiguous()  # an expanded tensor has less memory than its shape
        return tuple(state[name] for name in self.kept)

    def _like(self, table: Tensor) -> Tensor:
        """A tensor with the shape, dtype and device of each moment."""
        return table

    def state_dict(self) -> dict[str, Any]:
        """The same whether the numbers are on the device or not."""
        state = super().state_dict()
        for group in state["param_groups"]:
            group.update({name: group[name].item() for name in NUMBERS if isinstance(group.get(name), Tensor)})
            if "step" in group:
                group["step"] = int(group["step"])
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state. If a moment does not fit its table, raises and changes nothing."""
        before = self.state, self.param_groups
        super().load_state_dict(state_dict)
        try:
            for table in list(self.state):
                self.moments(table)
        except ValueError:
            self.state, self.param_groups = before
            raise
        for group in self.param_groups:
            self._place(group)


class RowAdam(RowOptimizer):
    """Adam on the rows that have a gradient: m += (1-β₁)(g-m), v += (1-β₂)(g²-v), w -= lr m̂ / (√v̂ + ε).

    With a ``weight_decay`` this is a lazy AdamW: before a step, w -= lr weight_decay w on the rows of the batch only.
    So rare rows decay rarely. :class:`torch.optim.AdamW` decays all rows in every step, at the cost of the whole table.
    """

    kept = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        tables: Iterable[Tensor],
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        backend: str = "auto",
        capturable: bool = False,
    ) -> None:
        if not (lr >= 0 and eps >= 0 and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(f"lr and eps must be at least 0 and betas in [0, 1); got {lr}, {eps} and {betas}")
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay must be at least 0; got {weight_decay}")
        options = {"lr": lr, "betas": betas, "eps": eps, "step": 0, "weight_decay": weight_decay}
        super().__init__(tables, options, backend, capturable)

    def _update(
        self, backend: str, group: dict[str, Any], tables: list[Tensor], moments: list[Any], rows: list[RowGradient]
    ) -> None:
        options = self._lr(group), tuple(group["betas"]), group["eps"], group["step"]
        # States of older versions have no decay.
        row_updates.adam_rows(backend, tables, moments, rows, *options, weight_decay=group.get("weight_decay", 0.0))


class RowAdagrad(RowOptimizer):
    """Adagrad on the rows that have a gradient: s += g², w -= lr g / (√s + ε).

    ``row_wise`` keeps one s per row instead of one per element, s += mean(g²). A table's state is then one column,
    where Adam has two more tables.
    """

    kept = ("sum",)
    options = (*RowOptimizer.options, "row_wise")

    def __init__(
        self,
        tables: Iterable[Tensor],
        lr: float = 0.01,
        eps: float = 1e-10,
        row_wise: bool = False,
        *,
        backend: str = "auto",
        capturable: bool = False,
    ) -> None:
        if not (lr >= 0 and eps >= 0):
            raise ValueError(f"lr and eps must be at least 0; got {lr} and {eps}")
        super().__init__(tables, {"lr": lr, "eps": eps}, backend, capturable)
        self.row_wise = row_wise

    def _like(self, table: Tensor) -> Tensor:
        return table[:, 0] if self.row_wise else table

    def _update(
        self, backend: str, group: dict[str, Any], tables: list[Tensor], moments: list[Any], rows: list[RowGradient]
    ) -> None:
        sums = [kept[0] for kept in moments]
        row_updates.adagrad_rows(backend, tables, sums, rows, self._lr(group), group["eps"], self.row_wise)


class RowSGD(RowOptimizer):
    """w -= lr g on the rows that have a gradient."""

    def __init__(
        self, tables: Iterable[Tensor], lr: float = 0.001, *, backend: str = "auto", capturable: bool = False
    ) -> None:
        if not lr >= 0:
            raise ValueError(f"lr must be at least 0; got {lr}")
        super().__init__(tables, {"lr": lr}, backend, capturable)

    def _update(
        self, backend: str, group: dict[str, Any], tables: list[Tensor], moments: list[Any], rows: list[RowGradient]
    ) -> None:
        row_updates.sgd_rows(backend, tables, rows, self._lr(group))


def _adamw_rows(tables: Iterable[Tensor], lr: float, **options: Any) -> RowAdam:
    return RowAdam(tables, lr, weight_decay=WEIGHT_DECAY, **options)


def _rowwise_adagrad_rows(tables: Iterable[Tensor], lr: float, **options: Any) -> RowAdagrad:
    return RowAdagrad(tables, lr, row_wise=True, **options)


# Of a model's layers, and of the rows of its tables.
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], Callable[..., RowOptimizer]]] = {
    "adam": (torch.optim.Adam, RowAdam),
    "adamw": (torch.optim.AdamW, _adamw_rows),  # torch.optim.AdamW decays by WEIGHT_DECAY by itself
    "adagrad": (torch.optim.Adagrad, RowAdagrad),
    "rowwise_adagrad": (torch.optim.Adagrad, _rowwise_adagrad_rows),
    "sgd": (torch.optim.SGD, RowSGD),
}


@torch.no_grad()
def clip_grad_norm(model: nn.Module, max_norm: float) -> Tensor:
    """Scales all gradients so that their global norm is at most ``max_norm``; returns the norm before.

    The norm includes each row of a table once, after the sum over the examples with that row. If the norm is not
    finite, finite gradients become 0 and all others NaN.
    """
    return clip(gradients(model.parameters()), max_norm)


def clip(values: list[Tensor], max_norm: float) -> Tensor:
    norm = nn.utils.get_total_norm(values)
    scale_gradients(values, norm, max_norm)
    return norm


def gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The values of the parameters' gradients; for sparse ones, the sum of each row once."""
    values = []
    for parameter in parameters:
        if parameter.grad is not None:
            if parameter.grad.is_sparse:
                parameter.grad = summed(parameter.grad)
            values.append(parameter.grad._values() if parameter.grad.is_sparse else parameter.grad)
    return values


def scale_gradients(values: list[Tensor], norm: Tensor, max_norm: float) -> None:
    """Multiplies gradients of this norm by min(1, max_norm / norm), and by 0 where the norm is infinite or NaN.

    In the latter case finite gradients become 0, so that none passes unclipped, and others NaN, so that a caller can
    find the first one.
    """
    if values and max_norm < float("inf"):
        # Without reading the norm, which would synchronise; min(1, …) leaves small gradients unchanged.
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0).nan_to_num(nan=0.0)
        # Private, for it has no public twin: one launch, where a loop has one for each of 26 tables.
        torch._foreach_mul_(values, factor)


def _zeros(table: Tensor) -> Tensor:
    """Zeros like ``table``. On a CPU they use memory only for rows that are written: new pages are zero already."""
    if table.device.type == "cpu" and table.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(np.zeros(table.shape, str(table.dtype).removeprefix("torch.")))
    return torch.zeros_like(table, memory_format=torch.contiguous_format)


def _call(closure: Callable[[], Any] | None) -> Any:
    return None if closure is None else torch.enable_grad()(closure)()
