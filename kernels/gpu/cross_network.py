"""Triton: the whole cross network, forward and backward.

    p_l = x0·w_l,   α_{l+1} = α_l (1 + p_l) + c_l,   y = α_L x0 + β_L

A row of x0 stays in registers while all layers pass over it. Per row, in units of d elements: forward 1 read + 1 write,
backward 2 reads + 1 write, whatever L is. What is kept for the backward pass: p (L scalars per row), and the parameters
as ``pack`` has laid them out, which know nothing of the batch. Rows too long for registers (more than 22,000 columns)
take their dots in a pass of their own: one more read. The backward pass is in ``network_bwd``.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from fastcross.kernels.gpu import hardware, launch
from fastcross.kernels.gpu.launch import Work
from fastcross.kernels.gpu.network_bwd import network_bwd
from fastcross.kernels.gpu.pack import pack
from fastcross.kernels.gpu.projection import project, tile, word
from fastcross.kernels.gpu.recurrence import recurrence_fwd
from fastcross.kernels.gpu.tiles import add, dot, load_packed, load_rows, scale, store_rows
from fastcross.kernels.rows import empty_rows


@triton.jit(do_not_specialize=["M", "L", "columns"])
def _cross_network_fwd_kernel(
    # pointers
    x0_ptr, w_ptr, c_ptr, beta_ptr, alpha_ptr, y_ptr, p_ptr,
    # sizes
    M, N, L, columns,
    # strides
    stride_x0_m, stride_y_m,
    # constexprs
    WHOLE_ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, KEEP_P: tl.constexpr,
    ALIGN: tl.constexpr, REST: tl.constexpr, RAGGED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    first = tl.program_id(1) * (CHUNKS * BLOCK_N)
    DTYPE: tl.constexpr = c_ptr.dtype.element_ty

    x0 = load_rows(x0_ptr, offs_m, mask_m, first, N, stride_x0_m, DTYPE, ALIGN, REST, BLOCK_N, CHUNKS)

    if WHOLE_ROWS:
        alpha = tl.full((BLOCK_M,), 1.0, DTYPE)
        p_ptrs = p_ptr + offs_m
        for layer in range(L):
            w = load_packed(w_ptr, first, columns, DTYPE, RAGGED, BLOCK_M, BLOCK_N, CHUNKS, ROWS)
            p = dot(x0, w, CHUNKS)
            if KEEP_P:
                tl.store(p_ptrs, p, mask=mask_m)
            alpha = alpha * (1 + p)
            if HAS_BIAS:
                alpha += tl.load(c_ptr + layer)
            w_ptr += columns // ALIGN * ALIGN
            p_ptrs += M
    else:
        alpha = tl.load(alpha_ptr + offs_m, mask=mask_m, other=0.0)
    y = scale(alpha, x0, CHUNKS)
    if HAS_BIAS:
        beta = load_packed(beta_ptr, first, columns, DTYPE, RAGGED, BLOCK_M, BLOCK_N, CHUNKS, ROWS)
        y = add(y, beta, CHUNKS)

    store_rows(y_ptr, y, offs_m, mask_m, first, N, stride_y_m, ALIGN, REST, BLOCK_N, CHUNKS)


def cross_network_fwd(x0: Tensor, w: Tensor, b: Tensor | None, keep_p: bool) -> tuple[Tensor, Tensor]:
    """y (M, d), and the buffer with p (L, M) if it is to be kept."""
    (M, N), L = x0.shape, w.shape[0]
    y = empty_rows(x0)
    align = word(x0, y)
    plan = launch.forward(
        N, Work(x0.element_size(), align, L, held=1, moved=2, rest=N % align > 0, dots=1), hardware.of(x0.device)
    )
    buffer, kept = pack(w, b, None, x0, M if keep_p else 0)
    alpha, segments = None, plan.segments(N)
    if M:
        if not plan.whole_rows:
            parts = buffer.new_empty(segments * L * M)
            project(x0, kept.packed, plan, align, parts)
            alpha = recurrence_fwd(parts, kept, M, L, b is not None)
        _cross_network_fwd_kernel[(-(-M // plan.BLOCK_M), segments)](
            x0, kept.packed, kept.c, kept.beta, alpha, y, kept.p,
            M, N, L, kept.packed.shape[1],
            x0.stride(0), y.stride(0),
            WHOLE_ROWS=plan.whole_rows, HAS_BIAS=b is not None, KEEP_P=keep_p,
            **tile(plan, N, align),
        )  # fmt: skip
    return y, buffer if keep_p else buffer.new_empty(0)


def cross_network_bwd(
    dy: Tensor, x0: Tensor, w: Tensor, b: Tensor | None, kept: Tensor, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """dx0, dw and db, each empty unless needed."""
    return network_bwd(dy, x0, w, b, None, kept, (*needs, False))[:3]
