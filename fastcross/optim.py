"""Optimisers for a model with embedding tables: PyTorch's own for its layers, a lazy one for the rows of its tables.

Lazy: a row that no example of the batch names keeps its value and its moments, so a step costs the same however high
the tables are. Adam's bias correction counts all steps, like :class:`torch.optim.SparseAdam`; a table whose rows are
all in every batch is updated exactly as :class:`torch.optim.Adam` would, and likewise with AdamW and Adagrad.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastcross.gradients import clip, clip_grad_norm, gradients
from fastcross.layers.embedding import EmbeddingStack
from fastcross.row_optimizers import RowAdagrad, RowAdam, RowOptimizer, RowSGD, call

__all__ = ["OPTIMIZERS", "Optimizer", "RowAdagrad", "RowAdam", "RowSGD", "clip_grad_norm", "configure"]

WEIGHT_DECAY = 0.01  # of AdamW, as torch.optim's own


def configure(
    model: nn.Module,
    lr: float = 0.001,
    name: str = "adam",
    *,
    sparse_gradients: bool = True,
    capturable: bool = False,
    backend: str = "auto",
) -> "Optimizer":
    """An optimiser for all trainable parameters of ``model``; its tables have sparse gradients from now on.

    Args:
        model: tables of its :class:`~fastcross.embedding.EmbeddingStack` layers are updated lazily, the rest as usual.
        lr: the learning rate.
        name: "adam", "adamw" (a weight decay of 0.01), "adagrad", "rowwise_adagrad" (which keeps one number for each
            row of a table; Adagrad for the layers) or "sgd".
        sparse_gradients: of the tables; False for DistributedDataParallel, which adds up dense ones only.
        capturable: for a step that is captured in a CUDA graph: learning rates and numbers of steps are tensors on the
            device, as PyTorch's Adam and AdamW have them by that name; its fused SGD has no number, and takes such a
            rate. Its Adagrad, which reads both on the host, does not: only tables can then be captured.
        backend: of the tables' updates; "auto" takes the kernels of their device, "torch" PyTorch's own operators.
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
        # SGD has no such option and keeps no number of the step.
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
        # The very groups and no copies of them: a learning rate set here is one set there.
        super().__init__([{"params": group["params"]} for part in parts for group in part.param_groups], {})
        self.param_groups = [group for part in parts for group in part.param_groups]
        self._is_made = True

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: the groups stay the very groups of the parts, since these come with them."""
        return super().__getstate__() | {"parts": self.parts, "_is_made": True}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once it is made: no part would update these parameters."""
        if self._is_made:
            raise ValueError(
                "its parts have their parameters already; for more, make a new optimiser: configure(model)"
            )
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = call(closure)
        for part in self.parts:
            part.step()
        return loss

    def set_lr(self, lr: float) -> None:
        """In every group; where the rate is on the device it is written there, for a captured step to read."""
        for group in self.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """As :func:`clip_grad_norm`, over all parameters of this optimiser."""
        return clip(gradients(p for group in self.param_groups for p in group["params"]), max_norm)

    def state_dict(self) -> dict[str, Any]:
        """The same whether learning rates are on the device or not."""
        parts = [part.state_dict() for part in self.parts]
        for group in (group for part in parts for group in part["param_groups"]):
            if isinstance(group.get("lr"), Tensor):
                group["lr"] = group["lr"].item()
        return {"parts": parts}

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
        # How this optimiser runs is its own, whatever the one was that was saved.
        for group, old in zip(self.param_groups, (group for _, groups in before for group in groups), strict=True):
            if "capturable" in old:
                group["capturable"] = old["capturable"]
            if isinstance(old.get("lr"), Tensor):
                group["lr"] = old["lr"].fill_(group["lr"])


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
