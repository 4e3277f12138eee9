"""Triton: the logits of the cross network, z = x_L Vᵀ, without its output.

    q = x0 Vᵀ,   z = α_L q + β_L Vᵀ

V's rows follow W's in one matrix, so q is C more dots of the same pass. Per row, in units of d elements: forward 1
read, backward 1 read + 1 write (``recurrence`` has the backward pass's scalars before x0 is read):

    a_L = Σ_c dz_c q_c,   dq = α_L dz
    dx0 = Σ_l dp_l w_l + Σ_c dq_c v_c
    dV  = dqᵀ x0 + (Σ_rows dz) β_Lᵀ,   dβ_L = Vᵀ Σ_rows dz

x_L is neither written nor read. With many outputs (C in the hundreds) a GEMM on x_L is the better way.
"""

from collections.abc import Sequence

from torch import Tensor

from fastcross.kernels.gpu import hardware, launch
from fastcross.kernels.gpu.cross_network import rows_bwd
from fastcross.kernels.gpu.projection import project
from fastcross.kernels.gpu.recurrence import pack, recurrence_bwd, recurrence_fwd
from fastcross.kernels.gpu.reduction import reduce_sums


def cross_logits_fwd(x0: Tensor, w: Tensor, b: Tensor | None, v: Tensor, keep_p: bool) -> tuple[Tensor, Tensor]:
    """z (M, C), and p followed by q (L + C, M) if they are to be kept."""
    M, N = x0.shape
    plan = launch.forward(N, x0.element_size(), hardware.of(x0.device))
    segments = plan.segments(N)
    packed, c, _ = pack(w, b, v, segments * plan.columns, x0)
    parts = c.new_empty((segments, packed.shape[0], M))
    project(x0, packed, plan, parts)
    z = x0.new_empty((M, v.shape[0]))
    p, _ = recurrence_fwd(parts, c, w.shape[0], b is not None, keep_p, z)
    return z, p if keep_p else c.new_empty(0)


def cross_logits_bwd(
    dz: Tensor, x0: Tensor, w: Tensor, b: Tensor | None, v: Tensor, p: Tensor, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx0, dw, db and dv, each empty unless needed."""
    need_dx0, need_dw, need_db, need_dv = needs
    (L, N), C, has_bias = w.shape, v.shape[0], b is not None
    need_sums = need_dw or need_dv
    need_dc = need_db or (need_sums and has_bias)
    plan = launch.backward(N, x0.element_size(), hardware.of(x0.device), 2, (L + C) * need_sums, whole_rows=False)
    packed, c, _ = pack(w, b, v, plan.segments(N) * plan.columns, x0)
    alpha, dp, dc = recurrence_bwd(p, c, L, has_bias, dz=dz, need_dc=need_dc)
    dx0, sums, _ = rows_bwd(plan, None, x0, packed, alpha, dp, need_dx0=need_dx0, need_dw=need_sums)
    dw, dv = w.new_empty(w.shape if need_dw else 0), v.new_empty(v.shape if need_dv else 0)
    db = (w if b is None else b).new_empty(w.shape if need_db else 0)
    if need_sums or need_db:
        reduce_sums(
            sums, dc if need_dc else None, packed, b,
            dw if need_dw else None, dv if need_dv else None, db if need_db else None, L,
        )  # fmt: skip
    return dx0, dw, db, dv
