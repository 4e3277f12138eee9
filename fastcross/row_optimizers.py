"""Optimisers of the rows of tables that have a gradient: Adam, Adagrad, gradient descent, one launch for all tables.

On other devices than the CPU a step does not wait for the device. With ``capturable=True`` it can be captured in a CUDA
graph: the learning rate and the number of the step are then tensors on the device. (``Optimizer.set_lr`` and PyTorch's
schedulers write to such a rate in place; a number assigned to ``group["lr"]`` would not reach a captured step.)
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastcross.gradients import is_like, kind, rows_of
from fastcross.kernels.row_updates import Rows
from fastcross.ops import backends, row_updates

NUMBERS = {"lr", "step"}  # what a step reads of its group that changes from step to step


class RowOptimizer(torch.optim.Optimizer):
    """Updates the rows that have a gradient, and what it keeps of them; a subclass says how.

    Args:
        backend: "auto" takes the kernels of the tables' device, "torch" PyTorch's own operators.
        capturable: whether the learning rate and the number of the step are kept on the device.
    """

    kept: tuple[str, ...] = ()  # names of what is kept of each table
    options: tuple[str, ...] = ("backend", "capturable")  # names of what an optimiser is, beside its groups
    backend, capturable = "auto", False

    def __init__(
        self, tables: Iterable[Tensor], defaults: dict[str, Any], backend: str = "auto", capturable: bool = False
    ) -> None:
        backends.check(backend)
        self.backend, self.capturable = backend, capturable
        super().__init__(tables, defaults)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles; PyTorch's own would leave the options out."""
        return super().__getstate__() | {name: getattr(self, name) for name in self.options}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._place(self.param_groups[-1])

    def _place(self, group: dict[str, Any]) -> None:
        """Where a captured step reads the rate and the number of the step: on the device of the tables."""
        table = group["params"][0]
        for name in NUMBERS & group.keys():
            if self.capturable and not isinstance(group[name], Tensor):
                dtype = torch.promote_types(table.dtype, torch.float32)
                group[name] = torch.full((), group[name], dtype=dtype, device=table.device)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = call(closure)
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
                    # For autograd, which would not notice that a kernel wrote to it.
                    torch.autograd.graph.increment_version(table)
        return loss

    def _update(
        self, backend: str, group: dict[str, Any], tables: list[Tensor], moments: list[Any], rows: list[Rows]
    ) -> None:
        raise NotImplementedError

    def _read(self, parameters: list[Tensor]) -> list[tuple[Tensor, str, Rows, tuple[Tensor, ...]]]:
        """The tables whose gradients have rows, each with its backend, these rows and what is kept of it."""
        having = [(table, self._backend(table)) for table in parameters if table.grad is not None]
        # The CPU's kernels take each row they are given for another one.
        found = [(table, backend, rows_of(table, is_compact=backend == "cpu")) for table, backend in having]
        return [(table, backend, rows, self.moments(table)) for table, backend, rows in found if len(rows[0])]

    def _backend(self, table: Tensor) -> str:
        """Whose kernels a table goes to; they take contiguous ones."""
        return backends.choose(self.backend, table) if table.is_contiguous() else "torch"

    def _lr(self, group: dict[str, Any]) -> float | Tensor:
        return group["lr"] if self.capturable else float(group["lr"])

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

    def state_dict(self) -> dict[str, Any]:
        """The same whether the numbers are on the device or not."""
        state = super().state_dict()
        for group in state["param_groups"]:
            group.update({name: group[name].item() for name in NUMBERS if isinstance(group.get(name), Tensor)})
            if "step" in group:
                group["step"] = int(group["step"])
        return state

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
        for group in self.param_groups:
            self._place(group)


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
        self, backend: str, group: dict[str, Any], tables: list[Tensor], moments: list[Any], rows: list[Rows]
    ) -> None:
        options = self._lr(group), tuple(group["betas"]), group["eps"], group["step"]
        # A state that was saved before there was a decay has none.
        row_updates.adam_rows(backend, tables, moments, rows, *options, weight_decay=group.get("weight_decay", 0.0))


class RowAdagrad(RowOptimizer):
    """Adagrad on the rows that have a gradient: s += g², w -= lr g / (√s + ε).

    ``row_wise`` keeps one s for each row in place of one for each element, s += mean(g²): a table's state then is one
    column, where Adam keeps two more tables.
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
        self, backend: str, group: dict[str, Any], tables: list[Tensor], moments: list[Any], rows: list[Rows]
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
        self, backend: str, group: dict[str, Any], tables: list[Tensor], moments: list[Any], rows: list[Rows]
    ) -> None:
        row_updates.sgd_rows(backend, tables, rows, self._lr(group))


def _zeros(table: Tensor) -> Tensor:
    """Zeros that take up memory only as rows are touched, on a CPU: what the system hands out is zero already."""
    if table.device.type == "cpu" and table.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(np.zeros(table.shape, str(table.dtype).removeprefix("torch.")))
    return torch.zeros_like(table, memory_format=torch.contiguous_format)


def call(closure: Callable[[], Any] | None) -> Any:
    return None if closure is None else torch.enable_grad()(closure)()
