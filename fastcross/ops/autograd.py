"""The operators as ``torch.autograd.Function``s, each over one forward and one backward operator of ``ops.py``.

The forward pass keeps p, the dots x0·w_l: L scalars per row beside its inputs (one layer keeps nothing). Where a
gradient is itself differentiated, and under vmap over parameters, the closed form takes over: PyTorch can transform it
freely.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastcross.kernels import closed_form
from fastcross.ops import library as ops


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply`` without its ``inspect.signature``, which takes longer than a small kernel."""
    if (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or any(isinstance(t, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(t) for t in args)
    ):
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


class CrossLayerFunction(torch.autograd.Function):
    """(x0, x, w, b) -> y; backward of g: ds = g·x0, dx0 = s g, dx = g + ds w, dw = Σ ds x, db = Σ g."""

    @staticmethod
    def forward(x0: Tensor, x: Tensor, w: Tensor, b: Tensor | None, backend: str) -> Tensor:
        return ops.call("cross_layer_fwd", x0, x, w, b, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x0, x, w, b, ctx.backend = inputs
        ctx.save_for_backward(x0, x, w, b)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x0, x, w, b = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_closed_form_vjp(closed_form.cross_layer, (x0, x, w, b), dy), None
        needs = ctx.needs_input_grad[:4]
        return *_present(ops.call("cross_layer_bwd", _rows(dy), x0, x, w, needs, ctx.backend), needs), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x0: Tensor, x: Tensor, w: Tensor, b: Tensor | None, backend: str) -> tuple:
        if in_dims[2] is None and in_dims[3] is None:
            x0, x = (_batch_first(t, dim, info.batch_size) for t, dim in zip((x0, x), in_dims, strict=False))
            y = apply(CrossLayerFunction, x0.flatten(0, 1), x.flatten(0, 1), w, b, backend)
            return y.view(x0.shape), 0
        return torch.vmap(closed_form.cross_layer, in_dims[:4])(x0, x, w, b), 0


class CrossNetworkFunction(torch.autograd.Function):
    """(x0, w, b) -> y and the kept p."""

    @staticmethod
    def forward(x0: Tensor, w: Tensor, b: Tensor | None, backend: str) -> tuple[Tensor, Tensor]:
        return ops.call("cross_network_fwd", x0, w, b, True, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        x0, w, b, ctx.backend = inputs
        _save(ctx, (x0, w, b), output[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        x0, w, b, p = ctx.saved_tensors
        if dy is None:
            return (None,) * 4
        if torch.is_grad_enabled():
            return *_closed_form_vjp(closed_form.cross_network, (x0, w, b), dy), None
        needs = ctx.needs_input_grad[:3]
        return *_present(ops.call("cross_network_bwd", _rows(dy), x0, w, b, p, needs, ctx.backend), needs), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x0: Tensor, w: Tensor, b: Tensor | None, backend: str) -> tuple:
        if in_dims[1] is None and in_dims[2] is None:
            x0 = _batch_first(x0, in_dims[0], info.batch_size)
            y, p = apply(CrossNetworkFunction, x0.flatten(0, 1), w, b, backend)
            return (y.view(x0.shape), p.unflatten(1, x0.shape[:2])), (0, 1)
        y = torch.vmap(closed_form.cross_network, in_dims[:3])(x0, w, b)
        return (y, y.new_empty(0)), (0, None)


class CrossLogitsFunction(torch.autograd.Function):
    """(x0, w, b, v) -> z and the kept p, followed by q."""

    @staticmethod
    def forward(x0: Tensor, w: Tensor, b: Tensor | None, v: Tensor, backend: str) -> tuple[Tensor, Tensor]:
        return ops.call("cross_logits_fwd", x0, w, b, v, True, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        x0, w, b, v, ctx.backend = inputs
        _save(ctx, (x0, w, b, v), output[1])

    @staticmethod
    def backward(ctx: Any, dz: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        x0, w, b, v, p = ctx.saved_tensors
        if dz is None:
            return (None,) * 5
        if torch.is_grad_enabled():
            return *_closed_form_vjp(closed_form.cross_logits, (x0, w, b, v), dz), None
        needs = ctx.needs_input_grad[:4]
        return *_present(ops.call("cross_logits_bwd", _rows(dz), x0, w, b, v, p, needs, ctx.backend), needs), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x0: Tensor, w: Tensor, b: Tensor | None, v: Tensor, backend: str) -> tuple:
        if in_dims[1:4] == (None, None, None):
            x0 = _batch_first(x0, in_dims[0], info.batch_size)
            z, p = apply(CrossLogitsFunction, x0.flatten(0, 1), w, b, v, backend)
            return (z.unflatten(0, x0.shape[:2]), p.unflatten(1, x0.shape[:2])), (0, 1)
        z = torch.vmap(closed_form.cross_logits, in_dims[:4])(x0, w, b, v)
        return (z, z.new_empty(0)), (0, None)


def _save(ctx: Any, inputs: tuple[Tensor | None, ...], p: Tensor) -> None:
    ctx.mark_non_differentiable(p)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, p)


def _rows(dy: Tensor) -> Tensor:
    return dy if dy.stride(1) == 1 else dy.contiguous()


def _present(grads: tuple[Tensor, ...], needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    return tuple(grad if needed else None for grad, needed in zip(grads, needs, strict=True))


def _closed_form_vjp(function: Callable[..., Tensor], inputs: tuple, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of ``inputs`` (None stays None) as differentiable functions of the inputs and of ``dy``."""
    given = [t for t in inputs if t is not None]

    def of_given(*tensors: Tensor) -> Tensor:
        remaining = iter(tensors)
        return function(*(None if t is None else next(remaining) for t in inputs))

    grads = iter(torch.func.vjp(of_given, *given)[1](dy))
    return tuple(None if t is None else next(grads) for t in inputs)


def _batch_first(x: Tensor, dim: int | None, size: int) -> Tensor:
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
