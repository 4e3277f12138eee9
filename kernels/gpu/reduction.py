"""Triton: the parameters' gradients from the partial sums of the programs.

    dw_l = Σ_rows dp_l x0 + dc_l β_l
    db_j = Σ_rows g + Σ_{l>j} dc_l w_l

Partial sums are added in a fixed order: no atomics, the same bits from run to run. A head's rows follow the layers'
(see ``recurrence``), so that dV and dβ_L = Vᵀ Σ_rows dz are the same two lines.
"""

import triton
import triton.language as tl
from torch import Tensor

from fastcross.kernels.gpu.tiles import unit_columns


@triton.jit
def _sum_parts(ptr, parts, stride, offs_n, mask_n, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    total = tl.zeros((BLOCK_P, BLOCK_N), ptr.dtype.element_ty)
    for first in range(0, parts, BLOCK_P):
        offs_p = first + tl.arange(0, BLOCK_P)
        ptrs = ptr + offs_p.to(tl.int64)[:, None] * stride + offs_n[None, :]
        total += tl.load(ptrs, mask=(offs_p < parts)[:, None] & mask_n[None, :], other=0.0)
    return tl.sum(total, 0)


@triton.jit
def _sum_scalar(ptr, parts, stride, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), ptr.dtype.element_ty)
    for first in range(0, parts, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        total += tl.load(ptr + offs.to(tl.int64) * stride, mask=offs < parts, other=0.0)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["L", "rows", "parts", "dc_parts"])
def _reduction_kernel(
    # pointers
    sums_ptr, dc_ptr, w_ptr, b_ptr, dw_ptr, dv_ptr, db_ptr,
    # sizes
    N, L, rows, parts, dc_parts, columns,
    # strides
    stride_w_l, stride_b_l,
    # constexprs
    HAS_BIAS: tl.constexpr, HAS_DC: tl.constexpr, HAS_DY: tl.constexpr,
    NEED_DW: tl.constexpr, NEED_DV: tl.constexpr, NEED_DB: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    layer = tl.program_id(1)
    DTYPE: tl.constexpr = sums_ptr.dtype.element_ty
    stride_part = (rows + HAS_DY).to(tl.int64) * columns

    if (NEED_DW or NEED_DV) and layer < rows:
        dw = _sum_parts(sums_ptr + layer * columns, parts, stride_part, offs_n, mask_n, BLOCK_P, BLOCK_N)
        if HAS_BIAS:
            beta = tl.zeros((BLOCK_N,), DTYPE)
            for j in range(tl.minimum(layer, L)):
                beta += tl.load(b_ptr + j * stride_b_l + offs_n, mask=mask_n, other=0.0).to(DTYPE)
            dw += _sum_scalar(dc_ptr + layer, dc_parts, rows, 1024) * beta
        if NEED_DW:
            tl.store(dw_ptr + layer * N + offs_n, dw, mask=mask_n & (layer < L))
        if NEED_DV:
            tl.store(dv_ptr + (layer - L) * N + offs_n, dw, mask=mask_n & (layer >= L))

    if NEED_DB and layer == rows:
        db = tl.zeros((BLOCK_N,), DTYPE)
        if HAS_DY:
            db += _sum_parts(sums_ptr + rows * columns, parts, stride_part, offs_n, mask_n, BLOCK_P, BLOCK_N)
        for i in range(rows):
            j = rows - 1 - i
            tl.store(db_ptr + j * N + offs_n, db, mask=mask_n & (j < L))
            if HAS_DC:
                dc = _sum_scalar(dc_ptr + j, dc_parts, rows, 1024)
                db += dc * tl.load(w_ptr + j * stride_w_l + offs_n, mask=mask_n, other=0.0).to(DTYPE)


def reduce_sums(
    sums: Tensor,
    dc: Tensor | None,
    packed: Tensor,
    b: Tensor | None,
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
    *,
    layers: int,
    columns: int,
    parts: int,
    dc_parts: int,
    has_dy: bool,
) -> None:
    """Writes the gradients given (dw, dv, db), from ``sums`` (parts, rows [+ 1], columns) and dc (dc_parts, rows).

    The rows of the sums are Σ dp x0 by row of [W; V], then Σ dy.
    """
    dw, dv, db = grads
    N = next(grad for grad in grads if grad is not None).shape[-1]
    rows = packed.shape[0]
    b = unit_columns(b)
    block = 128 if N <= 4096 else 2048 // sums.element_size()
    _reduction_kernel[(-(-N // block), rows + (db is not None))](
        sums, dc, packed, b, dw, dv, db,
        N, layers, rows, parts, dc_parts, columns,
        packed.stride(0), 0 if b is None else b.stride(0),
        HAS_BIAS=b is not None and dc is not None, HAS_DC=dc is not None,
        HAS_DY=has_dy, NEED_DW=dw is not None, NEED_DV=dv is not None, NEED_DB=db is not None,
        BLOCK_P=16, BLOCK_N=block, num_warps=4,
    )  # fmt: skip
