"""The cross network's part of the combination layer (eq. 5), ``z = x_L Vᵀ``, without ``x_L``.

The forward pass keeps p, the dots x0·w_l, followed by q, the dots x0·v_c: L + C scalars per row beside its inputs.
"""

from typing import Any

import torch
from torch import Tensor

from fastcross import reference
from fastcross.kernels import closed_form
from fastcross.kernels.rows import accumulation_dtype, as_rows, empty_rows
from fastcross.ops import backends, checks, dispatch, internals


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
    checks.check_network(x0, weight, bias)
    checks.check_parameter("head", head, x0, "(C, d)")
    backend = backends.choose(backend, x0.device, x0.dtype)
    if backend == "torch":
        return closed_form.cross_logits(x0, weight, bias, head)
    if backend == "reference":
        return reference.cross_logits(x0, weight, bias, head)
    rows = as_rows(x0)
    if dispatch.differentiates(x0, weight, bias, head):
        z, _ = internals.apply(CrossLogitsFunction, rows, weight, bias, head, backend)
    else:
        z, _ = cross_logits_fwd(rows, weight, bias, head, False, backend)
    return z if x0.dim() == 2 else z.view(*x0.shape[:-1], head.shape[0])


class CrossLogitsFunction(torch.autograd.Function):
    """(x0, w, b, v) -> z and the kept p, followed by q."""

    @staticmethod
    def forward(x0: Tensor, w: Tensor, b: Tensor | None, v: Tensor, backend: str) -> tuple[Tensor, Tensor]:
        return cross_logits_fwd(x0, w, b, v, True, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        x0, w, b, v, ctx.backend = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x0, w, b, v, output[1])

    @staticmethod
    def backward(ctx: Any, dz: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        x0, w, b, v, p = ctx.saved_tensors
        if dz is None:
            return (None,) * 5
        if torch.is_grad_enabled():
            return *dispatch.closed_form_vjp(closed_form.cross_logits, (x0, w, b, v), dz), None
        needs = ctx.needs_input_grad[:4]
        grads = cross_logits_bwd(dispatch.rows_of_gradient(dz), x0, w, b, v, p, needs, ctx.backend)
        return *dispatch.needed_only(grads, needs), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x0: Tensor, w: Tensor, b: Tensor | None, v: Tensor, backend: str) -> tuple:
        if in_dims[1:4] == (None, None, None):
            x0 = dispatch.batch_first(x0, in_dims[0], info.batch_size)
            z, p = internals.apply(CrossLogitsFunction, x0.flatten(0, 1), w, b, v, backend)
            return (z.unflatten(0, x0.shape[:2]), p.unflatten(1, x0.shape[:2])), (0, 1)
        z = torch.vmap(closed_form.cross_logits, in_dims[:4])(x0, w, b, v)
        return (z, z.new_empty(0)), (0, None)


def _fake_fwd(x0: Tensor, w: Tensor, b: Tensor | None, v: Tensor, keep_p: bool, backend: str) -> tuple[Tensor, Tensor]:
    shape = (w.shape[0] + v.shape[0], x0.shape[0]) if keep_p else (0,)
    p = x0.new_empty(shape, dtype=accumulation_dtype(x0, w, b, v))
    return x0.new_empty((x0.shape[0], v.shape[0])), p


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
