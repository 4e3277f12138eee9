"""The fused CPU kernels."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# The kernels of each operator: module and function in ``native``.
KERNELS = {
    "cross_layer": ("cross_layer.cross_layer_fwd", "cross_layer.cross_layer_bwd", "cross_layer.cross_layer_finish"),
    "cross_network": (  # and cross_logits, which has the same ones
        "cross_network.cross_network_prepare",
        "cross_network.cross_network_fwd",
        "cross_network_bwd.cross_network_bwd",
        "cross_network_bwd.cross_network_finish",
    ),
    "embedding_stack": ("embedding.stack_fwd", "embedding.pool_fwd", "row_sums.stack_bwd"),
    "row_updates": ("row_updates.adam_rows", "row_updates.adagrad_rows", "row_updates.sgd_rows"),
}


def warm_up(dtype: "torch.dtype", *operators: str) -> None:
    """Compiles the kernels of these operators (all, if none is named) for a dtype, unless that was done before.

    Their first use would do so, too: this is for what is timed. Operators: "cross_layer", "cross_network" (and its
    logits), "embedding_stack", "row_updates".
    """
    if unknown := set(operators) - set(KERNELS):
        raise ValueError(f"operators are {', '.join(KERNELS)}; got {', '.join(map(repr, sorted(unknown)))}")
    if str(dtype) not in ("torch.float32", "torch.float64"):
        raise ValueError(f"the CPU kernels take torch.float32 or torch.float64; got {dtype}")
    compiled = import_module("fastcross.kernels.cpu.compile").compiled
    for operator in operators or KERNELS:
        for kernel in KERNELS[operator]:
            compiled(kernel, dtype)
