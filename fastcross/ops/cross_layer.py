"""One cross layer (eq. 3): ``y = x0 (xᵀ w) + b + x``."""

from typing import Any

import torch
from torch import Tensor

from fastcross import reference
from fastcross.kernels import closed_form
from fastcross.kernels.layout import empty_rows
from fastcross.ops import backends


def cross_layer(x0: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    """One cross layer (eq. 3): ``y = x0 (xᵀ w) + b + x``, for each row; the d×d matrix ``x0 xᵀ`` is never formed.

    Args:
        x0: the network's input, (..., d).
        x: the previous layer's output, shaped like ``x0``.
        weight, bias: (d,) each; the bias is optional.
        backend: "auto" uses Triton on a GPU, C++ kernels on a CPU and PyTorch's operators elsewhere. "triton", "cpu",
            "torch" (closed form) and "reference" (the paper's equation) select one. The closed form always runs under
            transforms (torch.func, forward-mode, export) and for tensor subclasses such as DTensor.

    Returns:
        (..., d) in the dtype of ``x0``. Half precision is summed in float32, under autocast too.
    """
    _check(x0, x, weight, bias)
    chosen = backends.choose(backend, x0, x, weight, bias)
    if chosen == "torch":
        return closed_form.cross_layer(x0, x, weight, bias)
    if chosen == "reference":
        return reference.cross_layer(x0, x, weight, bias)
    rows, x_rows = backends.as_rows(x0), backends.as_rows(x)
    if backends.differentiates(x0, x, weight, bias):
        y = CrossLayerFunction.apply(rows, x_rows, weight, bias, chosen)
    else:
        y = backends.kernel("cross_layer_fwd", chosen, x0)(rows, x_rows, weight, bias)
    return y if x0.dim() == 2 else y.view(x0.shape)


def _check(x0: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Checks the operands of a layer: ``x`` like ``x0``, and parameters of one dimension."""
    backends.check_x0(x0)
    backends.check_parameter("weight", weight, x0, ("d",))
    if bias is not None:
        backends.check_parameter("bias", bias, x0, ("d",))
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor like x0; got {type(x).__name__} and x0 {tuple(x0.shape)}")
    if x.shape != x0.shape:
        raise ValueError(f"x must have the shape of x0; got x {tuple(x.shape)} and x0 {tuple(x0.shape)}")
    backends.check_kind("x", x, x0)
    if x.dtype != x0.dtype:
        raise TypeError(f"x must have the dtype of x0; got x {x.dtype} and x0 {x0.dtype}")


class CrossLayerFunction(torch.autograd.Function):
    """(x0, x, w, b) -> y; backward of g: ds = g·x0, dx0 = s g, dx = g + ds w, dw = Σ ds x, db = Σ g."""

    @staticmethod
    def forward(ctx: Any, x0: Tensor, x: Tensor, w: Tensor, b: Tensor | None, backend: str) -> Tensor:
        ctx.save_for_backward(x0, x, w, b)
        ctx.backend = backend
        return backends.kernel("cross_layer_fwd", backend, x0)(x0, x, w, b)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x0, x, w, b = ctx.saved_tensors
        if backends.is_differentiated():
            return *backends.closed_form_vjp(closed_form.cross_layer, (x0, x, w, b), dy), None
        needs = ctx.needs_input_grad[:4]
        grads = backends.kernel("cross_layer_bwd", ctx.backend, x0)(backends.as_rows(dy), x0, x, w, b, needs)
        return *backends.needed_only(grads, needs), None


def _fake_fwd(x0: Tensor, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return empty_rows(backends.as_rows(x0))


def _fake_bwd(
    dy: Tensor, x0: Tensor, x: Tensor, w: Tensor, b: Tensor | None, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dx0, dx = (
        empty_rows(backends.as_rows(t)) if needed else t.new_empty(0) for t, needed in zip((x0, x), needs, strict=False)
    )
    return dx0, dx, backends.empty_unless(needs[2], w), backends.empty_unless(needs[3], w if b is None else b)


backends.define("cross_layer_fwd", "(Tensor x0, Tensor x, Tensor w, Tensor? b) -> Tensor", _fake_fwd, "cross_layer")
backends.define(
    "cross_layer_bwd",
    "(Tensor dy, Tensor x0, Tensor x, Tensor w, Tensor? b, bool[] needs)"
    " -> (Tensor dx0, Tensor dx, Tensor dw, Tensor db)",
    _fake_bwd,
    "cross_layer",
)
