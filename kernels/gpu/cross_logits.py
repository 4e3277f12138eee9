"""Triton: the logits of the cross network, z = x_L Vᵀ, without its output.

    q = x0 Vᵀ,   z = α_L q + β_L Vᵀ

V's rows follow W's in one matrix, so q is C more dots of the same pass. Per row, in units of d elements: forward 1
read, backward 1 read + 1 write (``network_bwd``; ``recurrence`` has its scalars before x0 is read):

    a_L = Σ_c dz_c q_c,   dq = α_L dz
    dx0 = Σ_l dp_l w_l + Σ_c dq_c v_c
    dV  = dqᵀ x0 + (Σ_rows dz) β_Lᵀ,   dβ_L = Vᵀ Σ_rows dz

x_L is neither written nor read. With many outputs (C in the hundreds) a GEMM on x_L is the better way.
"""

from collections.abc import Sequence

from torch import Tensor

from fastcross.kernels.gpu import hardware, launch
from fastcross.kernels.gpu.launch import Work
from fastcross.kernels.gpu.network_bwd import network_bwd
from fastcross.kernels.gpu.pack import pack
from fastcross.kernels.gpu.projection import project, word
from fastcross.kernels.gpu.recurrence import recurrence_fwd


def cross_logits_fwd(x0: Tensor, w: Tensor, b: Tensor | None, v: Tensor, keep_p: bool) -> tuple[Tensor, Tensor]:
    """z (M, C), and the buffer with p followed by q (L + C, M) if they are to be kept."""
    M, N = x0.shape
    rows, align = w.shape[0] + v.shape[0], word(x0)
    plan = launch.forward(
        N, Work(x0.element_size(), align, rows, held=1, moved=1, rest=N % align > 0, dots=1), hardware.of(x0.device)
    )
    segments = plan.segments(N)
    in_place = segments == 1  # the dots of whole rows need no putting together
    buffer, kept = pack(w, b, v, x0, M if keep_p or in_place else 0)
    parts = kept.p if in_place else buffer.new_empty(segments * rows * M)
    project(x0, kept.packed, plan, align, parts)
    z = x0.new_empty((M, v.shape[0]))
    recurrence_fwd(parts, kept, M, w.shape[0], b is not None, z)
    return z, buffer if keep_p else buffer.new_empty(0)


def cross_logits_bwd(
    dz: Tensor, x0: Tensor, w: Tensor, b: Tensor | None, v: Tensor, kept: Tensor, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx0, dw, db and dv, each empty unless needed."""
    return network_bwd(dz, x0, w, b, v, kept, needs)
