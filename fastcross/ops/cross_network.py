"""L cross layers, ``x_{l+1} = x0 (x_lᵀ w_l) + b_l + x_l``, in one pass over x0 whatever L is.

The forward pass keeps p, the dots x0·w_l: L scalars per row beside its inputs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastcross import reference
from fastcross.kernels import closed_form
from fastcross.kernels.rows import accumulation_dtype, as_rows, empty_rows
from fastcross.ops import checks, dispatch, internals
from fastcross.ops import usual as usual_calls


def cross_network(x0: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    """L cross layers: ``x_{l+1} = x0 (x_lᵀ w_l) + b_l + x_l``; returns ``x_L``, in one pass over ``x0`` whatever L is.

    Args:
        x0: the network's input, (..., d).
        weight, bias: (L, d) each; the bias may be left out.
        backend: as for :func:`cross_layer`.

    Returns:
        (..., d) in the dtype of ``x0``.
    """
    given = (x0, weight) if bias is None else (x0, weight, bias)
    if (usual := _calls.find(backend, given)) is not None:
        return usual(x0, weight, bias)
    fits = internals.are_alike(bias, x0, weight) and checks.fits_network(x0, weight, bias)
    if not fits:
        checks.check_network(x0, weight, bias)
    chosen, direct = dispatch.choose(backend, fits, x0, weight, bias)
    if chosen == "torch":
        return closed_form.cross_network(x0, weight, bias)
    if chosen == "reference":
        return reference.cross_network(x0, weight, bias)
    rows, differentiates = as_rows(x0), dispatch.differentiates(x0, weight, bias)
    if direct and rows is x0:
        keeps = differentiates and dispatch.keeps_dots(chosen, x0)
        usual = _calls.keep(backend, given, (x0, weight, bias, keeps), chosen, differentiates)
        if usual is not None:
            return usual(x0, weight, bias)
    if differentiates:
        y = (_apply if direct else CrossNetworkFunction.apply)(rows, weight, bias, chosen, direct)
    else:
        y, _ = cross_network_fwd(rows, weight, bias, False, chosen, direct=direct)
    return y if x0.dim() == 2 else y.view(x0.shape)


class CrossNetworkFunction(torch.autograd.Function):
    """(x0, w, b) -> y; p is kept, but where it is found sooner from x0."""

    @staticmethod
    def forward(ctx: Any, x0: Tensor, w: Tensor, b: Tensor | None, backend: str, direct: bool) -> Tensor:
        keeps = dispatch.keeps_dots(backend, x0)
        y, p = cross_network_fwd(x0, w, b, keeps, backend, direct=direct)
        ctx.save_for_backward(x0, w, b, p if keeps else None)
        ctx.backend, ctx.direct = backend, direct
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return *_vjp(dy, ctx.saved_tensors, ctx.needs_input_grad[:3], ctx.backend, ctx.direct), None, None


def _vjp(
    dy: Tensor, saved: Sequence[Any], needs: tuple[bool, ...], backend: str, direct: bool
) -> tuple[Tensor | None, ...]:
    x0, w, b, p = saved
    in_closed_form, direct = dispatch.choose_backward(direct, dy)
    if in_closed_form:
        return dispatch.closed_form_vjp(closed_form.cross_network, (x0, w, b), dy)
    p = x0.new_empty(0) if p is None else p  # which is computed again
    grads = cross_network_bwd(as_rows(dy), as_rows(x0), w, b, p, needs, backend, direct=direct)
    return dispatch.needed_only(grads, needs)


_calls = usual_calls.Calls("cross_network", CrossNetworkFunction, _vjp)
_apply = internals.direct_apply(CrossNetworkFunction)


def _fake_fwd(x0: Tensor, w: Tensor, b: Tensor | None, keep_p: bool, backend: str) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(x0, w, b)
    shape = dispatch.kept_shape(backend, w.shape[0], x0, w.dtype, dtype) if keep_p else (0,)
    return empty_rows(x0), x0.new_empty(shape, dtype=dtype)


def _fake_bwd(
    dy: Tensor, x0: Tensor, w: Tensor, b: Tensor | None, p: Tensor, needs: list[bool], backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    dx0 = empty_rows(x0) if needs[0] else x0.new_empty(0)
    return dx0, dispatch.empty_unless(needs[1], w), dispatch.empty_unless(needs[2], w if b is None else b)


# p is all that the forward pass keeps: one row per layer, in the accumulation dtype; empty unless ``keep_p``. Triton's
# is a buffer that holds the parameters too, as its kernels read them.
cross_network_fwd = dispatch.define(
    "cross_network",
    "cross_network_fwd",
    "(Tensor x0, Tensor w, Tensor? b, bool keep_p, str backend) -> (Tensor y, Tensor p)",
    _fake_fwd,
)
cross_network_bwd = dispatch.define(
    "cross_network",
    "cross_network_bwd",
    "(Tensor dy, Tensor x0, Tensor w, Tensor? b, Tensor p, bool[] needs, str backend)"
    " -> (Tensor dx0, Tensor dw, Tensor db)",
    _fake_bwd,
)
