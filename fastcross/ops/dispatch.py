"""Kernels as operators of torch.library: opaque to autograd and torch.compile, with a shape rule (the fake).

Operands are 2-D: rows (M, d) with unit column stride, parameters as in the public interface. The last argument names
the backend whose launcher runs; the launchers of all backends have the operator's name. ``needs`` says which gradients
to compute, in the order of the results; the others come back empty.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastcross.kernels.rows import as_rows
from fastcross.ops import backends, internals

_LIBRARY = torch.library.Library("fastcross", "DEF")


def define(operator: str, name: str, schema: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Defines ``fastcross::name`` of ``operator`` and returns a function that calls it, or its kernel where it may."""

    def implementation(*args: Any) -> Any:
        # PyTorch may resolve an operand on the way, zeros without memory for one, to rows of any stride.
        *operands, backend = (as_rows(t) if isinstance(t, Tensor) and t.dim() == 2 else t for t in args)
        return getattr(backends.kernels(operator, backend), name)(*operands)

    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastcross::{name}", fake, lib=_LIBRARY)

    def call(*args: Any) -> Any:
        if internals.may_call_kernels(args):  # PyTorch takes longer to find the operator than a small kernel runs
            return getattr(backends.kernels(operator, args[-1]), name)(*args[:-1])
        return getattr(torch.ops.fastcross, name)(*args)

    return call


def differentiates(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def empty_unless(needed: bool, x: Tensor) -> Tensor:
    """A fake's result: contiguous and shaped like ``x`` if it is needed."""
    return x.new_empty(x.shape if needed else 0)


def rows_of_gradient(dy: Tensor) -> Tensor:
    return dy if dy.stride(1) == 1 else dy.contiguous()


def needed_only(grads: tuple[Tensor, ...], needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    return tuple(grad if needed else None for grad, needed in zip(grads, needs, strict=True))


def closed_form_vjp(function: Callable[..., Tensor], inputs: tuple, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of ``inputs`` (None stays None) as differentiable functions of the inputs and of ``dy``."""
    given = [t for t in inputs if t is not None]

    def of_given(*tensors: Tensor) -> Tensor:
        remaining = iter(tensors)
        return function(*(None if t is None else next(remaining) for t in inputs))

    grads = iter(torch.func.vjp(of_given, *given)[1](dy))
    return tuple(None if t is None else next(grads) for t in inputs)


def batch_first(x: Tensor, dim: int | None, size: int) -> Tensor:
    """Under vmap: the operand with its batch dimension in front."""
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
