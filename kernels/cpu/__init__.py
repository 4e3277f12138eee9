"""The fused CPU kernels."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# The kernels of each operator: module and name.
_KERNELS = {
    "cross_layer": ("layer.cross_layer_fwd", "layer.cross_layer_bwd", "layer.cross_layer_finish"),
    "cross_network": (  # and cross_logits, which has the same ones
        "network.cross_network_prepare", "network.cross_network_fwd",
        "network_bwd.cross_network_bwd", "network_bwd.cross_network_finish",
    ),
    "embedding_stack": ("embedding.stack_fwd_kernel", "embedding.pool_fwd_kernel", "row_sums.stack_bwd_kernel"),
    "row_updates": ("row_updates.adam_rows_kernel", "row_updates.sgd_rows_kernel"),
}  # fmt: skip


def warm_up(dtype: "torch.dtype", *operators: str) -> None:
    """Compiles the kernels of these operators (all, if none is named) for a dtype, unless that was done before.

    Their first use would do so, too: this is for what is timed. Operators: "cross_layer", "cross_network" (and its
    logits), "embedding_stack", "row_updates".
    """
    if unknown := set(operators) - set(_KERNELS):
        raise ValueError(f"operators are {', '.join(_KERNELS)}; got {', '.join(map(repr, sorted(unknown)))}")
    if str(dtype) not in ("torch.float32", "torch.float64"):
        raise ValueError(f"the CPU kernels take torch.float32 or torch.float64; got {dtype}")
    compiled = import_module("fastcross.kernels.cpu.compile").compiled
    for operator in operators or _KERNELS:
        for kernel in _KERNELS[operator]:
            module, name = kernel.split(".")
            compiled(getattr(import_module(f"fastcross.kernels.cpu.{module}"), name), dtype)
