"""One cross layer (eq. 3): ``y = x0 (xᵀ w) + b + x``."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastcross import reference
from fastcross.kernels import closed_form
from fastcross.kernels.rows import as_rows, empty_rows
from fastcross.ops import checks, dispatch, internals
from fastcross.ops import usual as usual_calls


def cross_layer(x0: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    """One cross layer (eq. 3): ``y = x0 (xᵀ w) + b + x``, for each row; the d×d matrix ``x0 xᵀ`` is never formed.

    Args:
        x0: the network's input, (..., d).
        x: the previous layer's output, shaped like ``x0``.
        weight, bias: (d,) each; the bias may be left out.
        backend: "auto" takes Triton on a GPU, the fused CPU kernels on a CPU and PyTorch's own operators elsewhere;
            "triton", "numba", "torch" (closed form) and "reference" (the paper, literally) ask for one. Where PyTorch
            transforms operators (torch.func, tangents, export) and for subclasses such as DTensor, which have rules for
            its own operators only, the closed form runs.

    Returns:
        (..., d) in the dtype of ``x0``. Sums run in float32 for half precision, under autocast too.
    """
    given = (x0, x, weight) if bias is None else (x0, x, weight, bias)
    if (usual := _calls.find(backend, given)) is not None:
        return usual(x0, x, weight, bias)
    fits = internals.are_alike(bias, x0, x, weight) and checks.fits_layer(x0, x, weight, bias)
    if not fits:
        checks.check_layer(x0, x, weight, bias)
    chosen, direct = dispatch.choose(backend, fits, x0, x, weight, bias)
    if chosen == "torch":
        return closed_form.cross_layer(x0, x, weight, bias)
    if chosen == "reference":
        return reference.cross_layer(x0, x, weight, bias)
    rows, x_rows, differentiates = as_rows(x0), as_rows(x), dispatch.differentiates(x0, x, weight, bias)
    if direct and rows is x0 and x_rows is x:
        usual = _calls.keep(backend, given, (x0, x, weight, bias), chosen, differentiates)
        if usual is not None:
            return usual(x0, x, weight, bias)
    if differentiates:
        y = (_apply if direct else CrossLayerFunction.apply)(rows, x_rows, weight, bias, chosen, direct)
    else:
        y = cross_layer_fwd(rows, x_rows, weight, bias, chosen, direct=direct)
    return y if x0.dim() == 2 else y.view(x0.shape)


class CrossLayerFunction(torch.autograd.Function):
    """(x0, x, w, b) -> y; backward of g: ds = g·x0, dx0 = s g, dx = g + ds w, dw = Σ ds x, db = Σ g."""

    @staticmethod
    def forward(ctx: Any, x0: Tensor, x: Tensor, w: Tensor, b: Tensor | None, backend: str, direct: bool) -> Tensor:
        y = cross_layer_fwd(x0, x, w, b, backend, direct=direct)
        ctx.save_for_backward(x0, x, w, b)
        ctx.backend, ctx.direct = backend, direct
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return *_vjp(dy, ctx.saved_tensors, ctx.needs_input_grad[:4], ctx.backend, ctx.direct), None, None


def _vjp(
    dy: Tensor, saved: Sequence[Any], needs: tuple[bool, ...], backend: str, direct: bool
) -> tuple[Tensor | None, ...]:
    x0, x, w, b = saved
    in_closed_form, direct = dispatch.choose_backward(direct, dy)
    if in_closed_form:
        return dispatch.closed_form_vjp(closed_form.cross_layer, (x0, x, w, b), dy)
    grads = cross_layer_bwd(as_rows(dy), as_rows(x0), as_rows(x), w, b, needs, backend, direct=direct)
    return dispatch.needed_only(grads, needs)


_calls = usual_calls.Calls("cross_layer", CrossLayerFunction, _vjp)
_apply = internals.direct_apply(CrossLayerFunction)


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
