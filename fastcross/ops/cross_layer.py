"""One cross layer (eq. 3): ``y = x0 (xᵀ w) + b + x``."""

from typing import Any

import torch
from torch import Tensor

from fastcross import reference
from fastcross.kernels import closed_form
from fastcross.kernels.rows import as_rows, empty_rows
from fastcross.ops import backends, checks, dispatch, internals


def cross_layer(x0: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    """One cross layer (eq. 3): ``y = x0 (xᵀ w) + b + x``, for each row; the d×d matrix ``x0 xᵀ`` is never formed.

    Args:
        x0: the network's input, (..., d).
        x: the previous layer's output, shaped like ``x0``.
        weight, bias: (d,) each; the bias may be left out.
        backend: "auto" takes Triton on a GPU, the fused CPU kernels on a CPU and PyTorch's own operators elsewhere;
            "triton", "numba", "torch" (closed form) and "reference" (the paper, literally) ask for one.

    Returns:
        (..., d) in the dtype of ``x0``. Sums run in float32 for half precision, under autocast too.
    """
    checks.check_x0(x0)
    checks.check_parameter("weight", weight, x0, "(d,)")
    checks.check_parameter("bias", bias, x0, "(d,)")
    checks.check_x(x, x0)
    backend = backends.choose(backend, x0.device, x0.dtype)
    if backend == "torch":
        return closed_form.cross_layer(x0, x, weight, bias)
    if backend == "reference":
        return reference.cross_layer(x0, x, weight, bias)
    rows, x_rows = as_rows(x0), as_rows(x)
    if dispatch.differentiates(x0, x, weight, bias):
        y = internals.apply(CrossLayerFunction, rows, x_rows, weight, bias, backend)
    else:
        y = cross_layer_fwd(rows, x_rows, weight, bias, backend)
    return y if y.shape == x0.shape else y.view(x0.shape)


class CrossLayerFunction(torch.autograd.Function):
    """(x0, x, w, b) -> y; backward of g: ds = g·x0, dx0 = s g, dx = g + ds w, dw = Σ ds x, db = Σ g."""

    @staticmethod
    def forward(x0: Tensor, x: Tensor, w: Tensor, b: Tensor | None, backend: str) -> Tensor:
        return cross_layer_fwd(x0, x, w, b, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x0, x, w, b, ctx.backend = inputs
        ctx.save_for_backward(x0, x, w, b)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x0, x, w, b = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *dispatch.closed_form_vjp(closed_form.cross_layer, (x0, x, w, b), dy), None
        needs = ctx.needs_input_grad[:4]
        grads = cross_layer_bwd(dispatch.rows_of_gradient(dy), x0, x, w, b, needs, ctx.backend)
        return *dispatch.needed_only(grads, needs), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x0: Tensor, x: Tensor, w: Tensor, b: Tensor | None, backend: str) -> tuple:
        if in_dims[2] is None and in_dims[3] is None:
            x0, x = (dispatch.batch_first(t, dim, info.batch_size) for t, dim in zip((x0, x), in_dims, strict=False))
            y = internals.apply(CrossLayerFunction, x0.flatten(0, 1), x.flatten(0, 1), w, b, backend)
            return y.view(x0.shape), 0
        return torch.vmap(closed_form.cross_layer, in_dims[:4])(x0, x, w, b), 0


def _fake_fwd(x0: Tensor, x: Tensor, w: Tensor, b: Tensor | None, backend: str) -> Tensor:
    return empty_rows(x0)


def _fake_bwd(
    dy: Tensor, x0: Tensor, x: Tensor, w: Tensor, b: Tensor | None, needs: list[bool], backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dx0, dx = (empty_rows(t) if needed else t.new_empty(0) for t, needed in zip((x0, x), needs, strict=False))
    return dx0, dx, dispatch.empty_unless(needs[2], w), dispatch.empty_unless(needs[3], w if b is None else b)


cross_layer_fwd = dispatch.define(
    "cross_layer",
    "cross_layer_fwd",
    "(Tensor x0, Tensor x, Tensor w, Tensor? b, str backend) -> Tensor",
    _fake_fwd,
)
cross_layer_bwd = dispatch.define(
    "cross_layer",
    "cross_layer_bwd",
    "(Tensor dy, Tensor x0, Tensor x, Tensor w, Tensor? b, bool[] needs, str backend)"
    " -> (Tensor dx0, Tensor dx, Tensor dw, Tensor db)",
    _fake_bwd,
)
