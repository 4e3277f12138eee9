"""Who in PyTorch does not take sparse gradients, said with what to do about it, before anything is trained.

PyTorch's own errors come after the backward pass and do not name the way out: "Adam does not support sparse gradients",
"Cannot access storage of SparseTensorImpl".
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fastcross.ops import internals

# Not SGD, Adagrad and SparseAdam, which take them, and no subclass, which might.
REFUSE = {
    getattr(torch.optim, name)
    for name in ("ASGD", "Adadelta", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop")
}


def announce(tables: Sequence[Tensor]) -> None:
    """Called before ``tables`` get sparse gradients."""
    watch_optimizers()
    if internals.are_reduced_by_ddp(tables):
        raise RuntimeError(
            "DistributedDataParallel takes no sparse gradients, which embedding tables have unless the model is built "
            "with sparse_gradients=False; fastcross train --distributed shards the tables instead"
        )


@functools.cache
def watch_optimizers() -> None:
    """From now on optimisers that take no sparse gradients say what to do."""
    register_optimizer_step_pre_hook(_check_optimizer)


def _check_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if type(optimizer) in REFUSE:
        for group in optimizer.param_groups:
            if any(p.grad is not None and p.grad.is_sparse for p in group["params"]):
                raise RuntimeError(
                    f"torch.optim.{type(optimizer).__name__} takes no sparse gradients, which embedding tables have: "
                    "use fastcross.optim.configure(model), or build the model with sparse_gradients=False"
                )
