"""The cross network's part of the combination layer (eq. 5), ``z = x_L Vᵀ``, without ``x_L``.

The forward pass keeps p, the dots x0·w_l, followed by q, the dots x0·v_c: L + C scalars per row beside its inputs.
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


def cross_logits(x0: Tensor, weight: Tensor, bias: Tensor | None, head: Tensor, *, backend: str = "auto") -> Tensor:
    """The cross network's part of the combination layer (eq. 5): ``z = x_L Vᵀ``; ``x_L`` itself is never written.

    Args:
        x0: the network's input, (..., d).
        weight, bias: (L, d) each; the bias may be None.
        head: V, the logits layer's weights on the cross output, (C, d).
        backend: as for :func:`cross_layer`.

    Returns:
        (..., C) in the dtype of ``x0``.
    """
    given = (x0, weight, head) if bias is None else (x0, weight, head, bias)
    if (usual := _calls.find(backend, given)) is not None:
        return usual(x0, weight, bias, head)
    fits = internals.are_alike(bias, x0, weight, head) and checks.fits_network(x0, weight, bias, head)
    if not fits:
        checks.check_network(x0, weight, bias)
        checks.check_head(head, x0)
    chosen, direct = dispatch.choose(backend, fits, x0, weight, bias, head)
    if chosen == "torch":
        return closed_form.cross_logits(x0, weight, bias, head)
    if chosen == "reference":
        return reference.cross_logits(x0, weight, bias, head)
    rows, differentiates = as_rows(x0), dispatch.differentiates(x0, weight, bias, head)
    if direct and rows is x0:
        keeps = differentiates and dispatch.keeps_dots(chosen, x0)
        usual = _calls.keep(backend, given, (x0, weight, bias, head, keeps), chosen, differentiates)
        if usual is not None:
            return usual(x0, weight, bias, head)
    if differentiates:
        z = (_apply if direct else CrossLogitsFunction.apply)(rows, weight, bias, head, chosen, direct)
    else:
        z, _ = cross_logits_fwd(rows, weight, bias, head, False, chosen, direct=direct)
    return z if x0.dim() == 2 else z.view(*x0.shape[:-1], head.shape[0])


class CrossLogitsFunction(torch.autograd.Function):
    """(x0, w, b, v) -> z; p, followed by q, is kept, but where it is found sooner from x0."""

    @staticmethod
    def forward(ctx: Any, x0: Tensor, w: Tensor, b: Tensor | None, v: Tensor, backend: str, direct: bool) -> Tensor:
        keeps = dispatch.keeps_dots(backend, x0)
        z, p = cross_logits_fwd(x0, w, b, v, keeps, backend, direct=direct)
        ctx.save_for_backward(x0, w, b, v, p if keeps else None)
        ctx.backend, ctx.direct = backend, direct
        return z

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        return *_vjp(dz, ctx.saved_tensors, ctx.needs_input_grad[:4], ctx.backend, ctx.direct), None, None


def _vjp(
    dz: Tensor, saved: Sequence[Any], needs: tuple[bool, ...], backend: str, direct: bool
) -> tuple[Tensor | None, ...]:
    x0, w, b, v, p = saved
    in_closed_form, direct = dispatch.choose_backward(direct, dz)
    if in_closed_form:
        return dispatch.closed_form_vjp(closed_form.cross_logits, (x0, w, b, v), dz)
    p = x0.new_empty(0) if p is None else p  # which is computed again
    grads = cross_logits_bwd(as_rows(dz), as_rows(x0), w, b, v, p, needs, backend, direct=direct)
    return dispatch.needed_only(grads, needs)


_calls = usual_calls.Calls("cross_logits", CrossLogitsFunction, _vjp)
_apply = internals.direct_apply(CrossLogitsFunction)


def _fake_fwd(x0: Tensor, w: Tensor, b: Tensor | None, v: Tensor, keep_p: bool, backend: str) -> tuple[Tensor, Tensor]:
    dtype, packed = accumulation_dtype(x0, w, b, v), torch.promote_types(w.dtype, v.dtype)
    shape = dispatch.kept_shape(backend, w.shape[0] + v.shape[0], x0, packed, dtype) if keep_p else (0,)
    return x0.new_empty((x0.shape[0], v.shape[0])), x0.new_empty(shape, dtype=dtype)


def _fake_bwd(
    dz: Tensor, x0: Tensor, w: Tensor, b: Tensor | None, v: Tensor, p: Tensor, needs: list[bool], backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dx0 = empty_rows(x0) if needs[0] else x0.new_empty(0)
    dw, db = dispatch.empty_unless(needs[1], w), dispatch.empty_unless(needs[2], w if b is None else b)
    return dx0, dw, db, dispatch.empty_unless(needs[3], v)


cross_logits_fwd = dispatch.define(
    "cross_logits",
    "cross_logits_fwd",
    "(Tensor x0, Tensor w, Tensor? b, Tensor v, bool keep_p, str backend) -> (Tensor z, Tensor p)",
    _fake_fwd,
)
cross_logits_bwd = dispatch.define(
    "cross_logits",
    "cross_logits_bwd",
    "(Tensor dz, Tensor x0, Tensor w, Tensor? b, Tensor v, Tensor p, bool[] needs, str backend)"
    " -> (Tensor dx0, Tensor dw, Tensor db, Tensor dv)",
    _fake_bwd,
)
