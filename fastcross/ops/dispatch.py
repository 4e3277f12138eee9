"""How an operator reaches its kernels: as an opaque operator of torch.library, or directly where nothing is in the way.

An opaque operator has a shape rule (the fake), and with it torch.compile works; autograd comes from the operator's
Function. Operands are 2-D: rows (M, d) with unit column stride, parameters as in the public interface. ``needs`` says
which gradients to compute, in the order of the results; the others come back empty.

PyTorch takes longer to find an operator than a small kernel runs: a plain call, which nothing observes or transforms,
goes to the kernel itself. Where PyTorch transforms operators (vmap, tangents, derivatives of derivatives, DTensor), the
closed form takes over: it consists of PyTorch's own operators, which can all be transformed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastcross.kernels.rows import FEW_ROWS, as_rows, kept_sizes
from fastcross.ops import backends, internals

_LIBRARY = torch.library.Library("fastcross", "DEF")


def define(operator: str, name: str, schema: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Defines ``fastcross::name``, and returns a function that calls it, or its kernel.

    ``schema`` ends with the argument ``str backend``, whose launcher of the same name runs. ``direct`` says which of
    the two to call where the caller knows; else the function looks.
    """

    def implementation(*args: Any) -> Any:
        # PyTorch may resolve an operand on the way, zeros without memory for one, to rows of any stride.
        *operands, backend = (as_rows(t) if isinstance(t, Tensor) and t.dim() == 2 else t for t in args)
        return getattr(backends.kernels(operator, backend), name)(*operands)

    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastcross::{name}", fake, lib=_LIBRARY)

    def call(*args: Any, direct: bool | None = None) -> Any:
        if internals.may_call_kernels(args) if direct is None else direct:
            return getattr(backends.kernels(operator, args[-1]), name)(*args[:-1])
        return getattr(torch.ops.fastcross, name)(*args)

    return call


def choose(backend: str, usual: bool, x0: Tensor, *others: Tensor | None) -> tuple[str, bool]:
    """The backend that will run for checked operands, and whether its kernels are called directly.

    ``usual`` says that the operands are alike (:func:`internals.are_alike`).
    """
    if usual or (internals.is_quiet() and internals.is_plain(x0) and all(map(internals.is_plain, others))):
        return backends.choose_kernels(backend, x0.device, x0.dtype), True
    return backends.choose_for(backend, x0, *others), False


def choose_backward(direct: bool, dy: Tensor) -> tuple[bool, bool]:
    """Whether a gradient is left to the closed form, else whether the kernels are called directly."""
    if torch.is_grad_enabled():
        return True, False
    if direct and internals.is_quiet() and internals.is_plain(dy):
        return False, True
    return internals.is_transformed() or internals.is_foreign(dy), False


def differentiates(*tensors: Tensor | None) -> bool:
    if torch.is_grad_enabled():
        for t in tensors:  # which any() would take three times as long for
            if t is not None and t.requires_grad:
                return True
    return False


def empty_unless(needed: bool, x: Tensor) -> Tensor:
    """A fake's result: contiguous and shaped like ``x`` if it is needed."""
    return x.new_empty(x.shape if needed else 0)


def kept_shape(backend: str, rows: int, x0: Tensor, packed: torch.dtype, accumulation: torch.dtype) -> tuple[int, ...]:
    """A fake's p: dots with ``rows`` rows of parameters; Triton's buffer has these in it, too, in dtype ``packed``."""
    M, d = x0.shape
    return (sum(kept_sizes(rows, M, d, packed, accumulation)),) if backend == "triton" else (rows, M)


def keeps_dots(backend: str, x0: Tensor) -> bool:
    """Whether p is kept for the backward pass, or left to it."""
    return torch.compiler.is_compiling() or backend != "numba" or x0.shape[0] >= FEW_ROWS


def needed_only(grads: tuple[Tensor, ...], needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    return grads if all(needs) else tuple(grad if need else None for grad, need in zip(grads, needs, strict=True))


def closed_form_vjp(function: Callable[..., Tensor], inputs: tuple, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of ``inputs`` (None stays None) as differentiable functions of the inputs and of ``dy``."""
    given = [t for t in inputs if t is not None]

    def of_given(*tensors: Tensor) -> Tensor:
        remaining = iter(tensors)
        return function(*(None if t is None else next(remaining) for t in inputs))

    grads = iter(torch.func.vjp(of_given, *given)[1](dy))
    return tuple(None if t is None else next(grads) for t in inputs)
