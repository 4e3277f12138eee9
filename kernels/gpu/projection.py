"""Triton: dots of rows, taken segment by segment for rows of any length.

    P = X Wᵀ        one read of X, any number of rows in W
    a = g·x0        per row

A program holds a segment of its rows in registers, so each dot comes in S parts, one per segment; S is 1 unless rows
are longer than a segment. Whoever reads the parts adds them in order.
"""

import functools

import triton
import triton.language as tl
from torch import Tensor

from fastcross.kernels.gpu import hardware, launch
from fastcross.kernels.gpu.launch import Plan, Work
from fastcross.kernels.gpu.tiles import dot, load_packed, load_rows


@triton.jit(do_not_specialize=["M", "L", "columns"])
def _project_kernel(
    # pointers
    x_ptr, w_ptr, p_ptr,
    # sizes
    M, N, L, columns,
    # strides
    stride_x_m,
    # constexprs
    ALIGN: tl.constexpr, REST: tl.constexpr, RAGGED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    segment = tl.program_id(1)
    first = segment * (CHUNKS * BLOCK_N)
    DTYPE: tl.constexpr = p_ptr.dtype.element_ty
    p_ptrs = p_ptr + segment * L.to(tl.int64) * M + offs_m

    x = load_rows(x_ptr, offs_m, mask_m, first, N, stride_x_m, DTYPE, ALIGN, REST, BLOCK_N, CHUNKS)

    for _ in range(L):
        w = load_packed(w_ptr, first, columns, DTYPE, RAGGED, BLOCK_M, BLOCK_N, CHUNKS, ROWS)
        tl.store(p_ptrs, dot(x, w, CHUNKS), mask=mask_m)
        w_ptr += columns // ALIGN * ALIGN  # known to be a multiple of ALIGN and no more: W is laid out as rows are
        p_ptrs += M


def project(x: Tensor, packed: Tensor, plan: Plan, align: int, out: Tensor) -> None:
    """out[s, l] = x·w_l over segment s; ``packed`` is W, as ``pack`` lays it out."""
    M, N = x.shape
    if M:
        _project_kernel[(-(-M // plan.BLOCK_M), plan.segments(N))](
            x, packed, out,
            M, N, *packed.shape,
            x.stride(0),
            **tile(plan, N, align),
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
    ALIGN: tl.constexpr, REST: tl.constexpr, RAGGED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr,
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
    align = word(dy, x0)
    plan = launch.forward(
        min(N, launch.SEGMENT), Work(x0.element_size(), align, 0, held=2, moved=2), hardware.of(x0.device)
    )
    a = like.new_empty((plan.segments(N), M))
    if M:
        _row_dot_kernel[(-(-M // plan.BLOCK_M), a.shape[0])](
            dy, x0, a,
            M, N,
            dy.stride(0), x0.stride(0),
            **tile(plan, N, align),
        )  # fmt: skip
    return a


def word(*rows: Tensor) -> int:
    """Elements per word: the widest that the strides and addresses of ``rows`` allow."""
    size = rows[0].element_size()
    align = launch.WORD // size
    for r in rows:
        while r.stride(0) % align or r.data_ptr() % (align * size):
            align //= 2
    return align


@functools.lru_cache(maxsize=4096)
def tile(plan: Plan, N: int, align: int) -> dict[str, int]:
    """The constexprs that say how rows of N elements lie in memory and how a program holds them."""
    whole = plan.segments(N) == 1
    return {
        "ALIGN": align,
        "REST": 0 if N % align == 0 else 1 if whole else plan.CHUNKS,
        "RAGGED": 0 if plan.columns * plan.segments(N) <= -(-N // 16) * 16 else 1 if whole else plan.CHUNKS,
        "BLOCK_M": plan.BLOCK_M,
        "BLOCK_N": plan.BLOCK_N,
        "CHUNKS": plan.CHUNKS,
        "ROWS": plan.ROWS,
        "num_warps": plan.num_warps,
    }
