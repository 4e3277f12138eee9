"""L cross layers, ``x_{l+1} = x0 (x_lᵀ w_l) + b_l + x_l``, in one pass over x0 for any L; and their part of the
combination layer (eq. 5), ``z = x_L Vᵀ``, without ``x_L``; and without x0 if the dots of its parts are known.

The forward pass saves its inputs and the dots p = x0·w_l; for the logits also q = x0·v_c. These are L or L + C numbers
per row.
"""

from typing import Any

import torch
from torch import Tensor

from fastcross import reference
from fastcross.kernels import closed_form
from fastcross.kernels.embedding import check_ids
from fastcross.kernels.layout import accumulation_dtype, empty_rows, kept_shape
from fastcross.ops import backends


def cross_network(x0: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    """L cross layers: ``x_{l+1} = x0 (x_lᵀ w_l) + b_l + x_l``; returns ``x_L``, in one pass over ``x0`` for any L.

    Args:
        x0: the network's input, (..., d).
        weight, bias: (L, d) each; the bias is optional.
        backend: as for :func:`cross_layer`.

    Returns:
        (..., d) in the dtype of ``x0``.
    """
    _check(x0, weight, bias)
    chosen = backends.choose(backend, x0, weight, bias)
    if chosen == "torch":
        return closed_form.cross_network(x0, weight, bias)
    if chosen == "reference":
        return reference.cross_network(x0, weight, bias)
    rows = backends.as_rows(x0)
    if backends.differentiates(x0, weight, bias):
        y = CrossNetworkFunction.apply(rows, weight, bias, chosen)
    else:
        y, _ = backends.kernel("cross_network_fwd", chosen, x0)(rows, weight, bias, False)
    return y if x0.dim() == 2 else y.view(x0.shape)


def cross_logits(x0: Tensor, weight: Tensor, bias: Tensor | None, head: Tensor, *, backend: str = "auto") -> Tensor:
    """The cross network's part of the combination layer (eq. 5): ``z = x_L Vᵀ``, without writing ``x_L``.

    Args:
        x0: the network's input, (..., d).
        weight, bias: (L, d) each; the bias may be None.
        head: V, the logits layer's weights on the cross output, (C, d).
        backend: as for :func:`cross_layer`.

    Returns:
        (..., C) in the dtype of ``x0``.
    """
    _check(x0, weight, bias)
    backends.check_parameter("head", head, x0, ("C", "d"))
    chosen = backends.choose(backend, x0, weight, bias, head)
    if chosen == "torch":
        return closed_form.cross_logits(x0, weight, bias, head)
    if chosen == "reference":
        return reference.cross_logits(x0, weight, bias, head)
    rows = backends.as_rows(x0)
    if backends.differentiates(x0, weight, bias, head):
        z = CrossLogitsFunction.apply(rows, weight, bias, head, chosen)
    else:
        z, _ = backends.kernel("cross_logits_fwd", chosen, x0)(rows, weight, bias, head, False)
    return z if x0.dim() == 2 else z.view(*x0.shape[:-1], head.shape[0])


def folded_logits(
    table: Tensor,
    base: Tensor,
    constants: Tensor,
    layers: int,
    ids: Tensor | None = None,
    starts: Tensor | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    """The logits of a cross network whose dots were taken before: of each feature or candidate, L + C in all.

        s_m = base_m + Σ_j table[starts_j + ids_mj]     (without ids: base_m + table_m)
        α_{l+1} = α_l (1 + s_ml) + constants_l,   z_mc = α_L s_m,L+c + constants_L+c

    Args:
        table: (R, L + C) float32 or float64.
        base: (B, L + C), or (1, L + C) for all rows alike.
        constants: (L + C,): β_l·w_l, then β_L·v_c.
        layers: L.
        ids: (B, k) int64; None: row m of the table belongs to row m.
        starts: (k + 1,) int64, where the ids of each column begin in the table, and where the last ones end.
        backend: as for :func:`cross_layer`.

    Returns:
        (B, C). It has no gradient. On a GPU a row with an id that is none is NaN; elsewhere that is an error.
    """
    rows = table.shape[0] if ids is None else ids.shape[0]
    if base.dim() != 2 or base.shape[1] != table.shape[1] or base.shape[0] not in (1, rows):
        wanted = f"({rows}, {table.shape[1]}) or (1, {table.shape[1]})"
        raise ValueError(f"base must be {wanted}, as the table and its rows ask for; got {tuple(base.shape)}")
    chosen = backends.choose(backend, table, base, constants)
    try:
        if chosen in ("torch", "reference"):
            return closed_form.folded_logits(table, ids, starts, base, constants, layers)
        return backends.kernel("folded_logits_fwd", chosen, table)(table, ids, starts, base, constants, layers)
    except (RuntimeError, IndexError):
        if ids is not None and starts is not None and not torch.compiler.is_compiling():  # of a wrong id it tells
            check_ids(ids, [], starts.diff().tolist())
        raise


def _check(x0: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Checks the operands of a network: weight and optional bias with one row per layer."""
    backends.check_x0(x0)
    backends.check_parameter("weight", weight, x0, ("L", "d"))
    if bias is not None:
        backends.check_parameter("bias", bias, x0, ("L", "d"))
        if bias.shape[0] != weight.shape[0]:
            raise ValueError(
                f"bias must have one row per layer; got bias {tuple(bias.shape)} and {weight.shape[0]} rows of weight"
            )


class CrossNetworkFunction(torch.autograd.Function):
    """(x0, w, b) -> y; saves p."""

    @staticmethod
    def forward(ctx: Any, x0: Tensor, w: Tensor, b: Tensor | None, backend: str) -> Tensor:
        y, p = backends.kernel("cross_network_fwd", backend, x0)(x0, w, b, True)
        ctx.save_for_backward(x0, w, b, p)
        ctx.backend = backend
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x0, w, b, p = ctx.saved_tensors
        if backends.is_differentiated():
            return *backends.closed_form_vjp(closed_form.cross_network, (x0, w, b), dy), None
        needs = ctx.needs_input_grad[:3]
        grads = backends.kernel("cross_network_bwd", ctx.backend, x0)(backends.as_rows(dy), x0, w, b, p, needs)
        return *backends.needed_only(grads, needs), None


class CrossLogitsFunction(torch.autograd.Function):
    """(x0, w, b, v) -> z; saves p, followed by q."""

    @staticmethod
    def forward(ctx: Any, x0: Tensor, w: Tensor, b: Tensor | None, v: Tensor, backend: str) -> Tensor:
        z, p = backends.kernel("cross_logits_fwd", backend, x0)(x0, w, b, v, True)
        ctx.save_for_backward(x0, w, b, v, p)
        ctx.backend = backend
        return z

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        x0, w, b, v, p = ctx.saved_tensors
        if backends.is_differentiated():
            return *backends.closed_form_vjp(closed_form.cross_logits, (x0, w, b, v), dz), None
        needs = ctx.needs_input_grad[:4]
        grads = backends.kernel("cross_logits_bwd", ctx.backend, x0)(backends.as_rows(dz), x0, w, b, v, p, needs)
        return *backends.needed_only(grads, needs), None


def _fake_fwd(x0: Tensor, w: Tensor, b: Tensor | None, keep_p: bool) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(x0, w, b)
    shape = kept_shape(w.shape[0], x0, w.dtype, dtype) if keep_p else (0,)
    return empty_rows(backends.as_rows(x0)), x0.new_empty(shape, dtype=dtype)


def _fake_bwd(
    dy: Tensor, x0: Tensor, w: Tensor, b: Tensor | None, p: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    dx0 = empty_rows(backends.as_rows(x0)) if needs[0] else x0.new_empty(0)
    return dx0, backends.empty_unless(needs[1], w), backends.empty_unless(needs[2], w if b is None else b)


def _fake_logits_fwd(x0: Tensor, w: Tensor, b: Tensor | None, v: Tensor, keep_p: bool) -> tuple[Tensor, Tensor]:
    dtype, packed = accumulation_dtype(x0, w, b, v), torch.promote_types(w.dtype, v.dtype)
    shape = kept_shape(w.shape[0] + v.shape[0], x0, packed, dtype) if keep_p else (0,)
    return x0.new_empty((x0.shape[0], v.shape[0])), x0.new_empty(shape, dtype=dtype)


def _fake_logits_bwd(
    dz: Tensor, x0: Tensor, w: Tensor, b: Tensor | None, v: Tensor, p: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dx0 = empty_rows(backends.as_rows(x0)) if needs[0] else x0.new_empty(0)
    dw, db = backends.empty_unless(needs[1], w), backends.empty_unless(needs[2], w if b is None else b)
    return dx0, dw, db, backends.empty_unless(needs[3], v)


# p has one row per layer, in the accumulation dtype, and is empty unless ``keep_p``. On a GPU it is a buffer that also
# holds the parameters, in the layout that the Triton kernels read.
backends.define(
    "cross_network_fwd",
    "(Tensor x0, Tensor w, Tensor? b, bool keep_p) -> (Tensor y, Tensor p)",
    _fake_fwd,
    "cross_network",
)
backends.define(
    "cross_network_bwd",
    "(Tensor dy, Tensor x0, Tensor w, Tensor? b, Tensor p, bool[] needs) -> (Tensor dx0, Tensor dw, Tensor db)",
    _fake_bwd,
    "cross_network",
)
backends.define(
    "cross_logits_fwd",
    "(Tensor x0, Tensor w, Tensor? b, Tensor v, bool keep_p) -> (Tensor z, Tensor p)",
    _fake_logits_fwd,
    "cross_network",
)
backends.define(
    "cross_logits_bwd",
    "(Tensor dz, Tensor x0, Tensor w, Tensor? b, Tensor v, Tensor p, bool[] needs)"
    " -> (Tensor dx0, Tensor dw, Tensor db, Tensor dv)",
    _fake_logits_bwd,
    "cross_network",
)


def _fake_folded(
    table: Tensor, ids: Tensor | None, starts: Tensor | None, base: Tensor, constants: Tensor, layers: int
) -> Tensor:
    return table.new_empty((table.shape[0] if ids is None else ids.shape[0], table.shape[1] - layers))


backends.define(
    "folded_logits_fwd",
    "(Tensor table, Tensor? ids, Tensor? starts, Tensor base, Tensor constants, int layers) -> Tensor",
    _fake_folded,
    "recurrence",
)
