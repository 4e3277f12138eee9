"""What a training compiles, compiled before its first step is timed."""

from torch import nn

from fastcross.kernels.cpu import warm_up
from fastcross.layers.cross import CrossNetwork
from fastcross.layers.embedding import EmbeddingStack
from fastcross.ops.backends import choose


def compile_kernels(model: nn.Module) -> None:
    """Compile the CPU kernels of a training step of ``model``, or load those that another process has compiled."""
    for module in model.modules():
        parameter = next(module.parameters(), None)
        if not isinstance(module, CrossNetwork | EmbeddingStack) or parameter is None:
            continue
        if choose(module.backend, parameter.device, parameter.dtype) == "numba":
            names = ("cross_network",) if isinstance(module, CrossNetwork) else ("embedding_stack", "row_updates")
            warm_up(parameter.dtype, *names)
