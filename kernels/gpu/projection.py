"""Triton: dots of rows, taken segment by segment for rows of any length.

    P = X Wᵀ        one read of X, any number of rows in W
    a = g·x0        per row

A program holds a segment of its rows in registers, so each dot comes in S parts, one per segment; S is 1 unless rows
are longer than a segment. Whoever reads the parts adds them in order.
"""

import triton
import triton.language as tl
from torch import Tensor

from fastcross.kernels.gpu import hardware, launch
from fastcross.kernels.gpu.launch import Plan
from fastcross.kernels.gpu.tiles import dot, load_packed, load_rows


@triton.jit(do_not_specialize=["M", "L"])
def _project_kernel(
    # pointers
    x_ptr, w_ptr, p_ptr,
    # sizes
    M, N, L,
    # strides
    stride_x_m, stride_w_l,
    # constexprs
    ALIGN: tl.constexpr, REST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    segment = tl.program_id(1)
    first = segment * (CHUNKS * BLOCK_N)
    DTYPE: tl.constexpr = p_ptr.dtype.element_ty
    p_ptrs = p_ptr + segment * L.to(tl.int64) * M + offs_m

    x = load_rows(x_ptr, offs_m, mask_m, first, N, stride_x_m, DTYPE, ALIGN, REST, BLOCK_N, CHUNKS)

    for _ in range(L):
        w = load_packed(w_ptr, first, DTYPE, BLOCK_N, CHUNKS)
        tl.store(p_ptrs, dot(x, w, CHUNKS), mask=mask_m)
        w_ptr += stride_w_l
        p_ptrs += M


def project(x: Tensor, packed: Tensor, plan: Plan, out: Tensor) -> None:
    """out[s, l] = x·w_l over segment s; ``packed`` is W, padded to a whole number of segments."""
    M, N = x.shape
    if M:
        _project_kernel[(triton.cdiv(M, plan.BLOCK_M), out.shape[0])](
            x, packed, out,
            M, N, packed.shape[0],
            x.stride(0), packed.stride(0),
            **tile(plan, x),
        )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def _row_dot_kernel(
    # pointers
    dy_ptr, x0_ptr, a_ptr,
    # sizes
    M, N,
    # strides
    stride_dy_m, stride_x0_m,
    # constexprs
    ALIGN: tl.constexpr, REST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    segment = tl.program_id(1)
    first = segment * (CHUNKS * BLOCK_N)
    DTYPE: tl.constexpr = a_ptr.dtype.element_ty

    dy = load_rows(dy_ptr, offs_m, mask_m, first, N, stride_dy_m, DTYPE, ALIGN, REST, BLOCK_N, CHUNKS)
    x0 = load_rows(x0_ptr, offs_m, mask_m, first, N, stride_x0_m, DTYPE, ALIGN, REST, BLOCK_N, CHUNKS)

    tl.store(a_ptr + segment.to(tl.int64) * M + offs_m, dot(dy, x0, CHUNKS), mask=mask_m)


def row_dot(dy: Tensor, x0: Tensor, like: Tensor) -> Tensor:
    """a = dy·x0 by segment, (S, M), in the dtype of ``like``."""
    M, N = x0.shape
    plan = launch.forward(min(N, launch.SEGMENT), x0.element_size(), hardware.of(x0.device), held=2)
    a = like.new_empty((plan.segments(N), M))
    if M:
        _row_dot_kernel[(triton.cdiv(M, plan.BLOCK_M), a.shape[0])](
            dy, x0, a,
            M, N,
            dy.stride(0), x0.stride(0),
            **tile(plan, dy, x0),
        )  # fmt: skip
    return a


def tile(plan: Plan, *rows: Tensor) -> dict[str, int]:
    """The constexprs that say how ``rows`` lie in memory and how a program holds them."""
    N = rows[0].shape[1]
    align = launch.alignment(rows[0].element_size(), *(r.stride(0) for r in rows))
    rest = 0 if N % align == 0 else 1 if plan.segments(N) == 1 else plan.CHUNKS
    return {
        "ALIGN": align,
        "REST": rest,
        "BLOCK_M": plan.BLOCK_M,
        "BLOCK_N": plan.BLOCK_N,
        "CHUNKS": plan.CHUNKS,
        "num_warps": plan.num_warps,
    }
