"""What contestants are made with: the peers' classes, torch.compile, CUDA graphs, swap; and the floors."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fastcross
from benchmarks.harness import clock
from benchmarks.harness.measure import Entry, Expected, Missing, Refused
from fastcross.kernels import layers_of_products


def import_peer(path: str) -> Any:
    """``package.module.Name``; Missing, with how to get it, where the package is not there."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        reason = f"not installed ({error}); pip install --no-deps -r requirements-peers.txt"
        raise Missing(reason) from error


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.compile for the shape at hand, afresh: the ninth shape of a function would silently run in eager mode."""
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False)


def swap_or_refuse(name: str, module: nn.Module) -> None:
    if not (report := fastcross.swap(module)).swapped:
        raise Refused(f"{name}: nothing was swapped: {report}")


def graph(plain: Entry) -> Entry:
    """The entry's step as a CUDA graph; a replay must give the bits of a plain call."""
    replay = clock.captured(plain.step)
    for ours, again in zip(_tensors(plain.step()), _tensors(replay()), strict=True):
        if not torch.equal(ours, again):
            raise Refused("a replayed CUDA graph gave other results than a plain call")
    return Entry(replay, plain.results)


def _tensors(outputs: Any) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def copy_of_x0(x0: Tensor, *_: Tensor) -> Entry:
    """One read and one write of x0: the unit that the floor of the memory traffic is counted in."""
    return Entry(x0.clone, lambda: {"x0": x0.clone()}, expected={"x0": Expected(x0, 0.0)})


class _Empty(torch.autograd.Function):
    """What PyTorch itself takes for a differentiable call of so many inputs: nothing is computed."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return torch.empty_like(inputs[0])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors)


def empty_function(*operands: Tensor) -> Entry:
    """Forward and backward of an autograd.Function that only allocates; its shapes are what can be checked."""
    leaves = [tensor.detach().requires_grad_() for tensor in operands]
    dy = torch.ones_like(leaves[0])

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(_Empty.apply(*leaves), leaves, dy)

    shapes = torch.tensor([size for leaf in leaves for size in leaf.shape])
    return Entry(
        step,
        lambda: {"shapes": torch.tensor([size for gradient in step() for size in gradient.shape])},
        expected={"shapes": Expected(shapes, 0.0)},
    )


def products(*operands: Tensor) -> Entry:
    """The three GEMMs of each matrix, forward and backward, in fastcross's chunks and with nothing between them.

    The experts' U and V are side by side in one matrix each, as fastcross has them.
    """
    x0, *parameters = (t.detach() for t in operands)
    matrices = []
    for of_layers in parameters:
        for matrix in of_layers if of_layers.dim() > 2 else ():
            if matrix.dim() == 3 and x0.shape[1] in matrix.shape[1:]:  # of K experts
                across = matrix.transpose(0, 1).flatten(1) if matrix.shape[1] == x0.shape[1] else matrix.flatten(0, 1)
                matrices.append(across.contiguous())
            else:
                matrices += [matrix] if matrix.dim() == 2 else [*matrix]
    rows = {width: torch.randn(len(x0), width).to(x0) for matrix in matrices for width in matrix.shape}

    def step() -> None:
        for chunk in layers_of_products.chunks(x0):
            for matrix in matrices:
                inputs, dy = rows[matrix.shape[1]][chunk], rows[matrix.shape[0]][chunk]
                for a, b in ((inputs, matrix.T), (dy, matrix), (dy.T, inputs)):
                    layers_of_products.gemm(a, b)

    a, b = rows[matrices[0].shape[1]][:8], matrices[0].T
    exact = a.double() @ b.double()
    allowed = 64 * torch.finfo(x0.dtype).eps * float(exact.abs().max())
    return Entry(step, lambda: {"product": layers_of_products.gemm(a, b)}, {"product": Expected(exact, allowed)})


FLOORS: dict[str, Callable[..., Entry]] = {"copy": copy_of_x0, "empty": empty_function, "products": products}
