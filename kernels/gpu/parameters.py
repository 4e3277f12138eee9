"""Triton: parameters in the layout of the passes over rows, and their gradients from the sums of these passes.

    pack           c_l = β_l·w_l,   β_{l+1} = β_l + b_l
    reduce_sums    dw_l = Σ_rows dp_l x0 + dc_l β_l;   db_j = Σ_rows g + Σ_{l>j} dc_l w_l

A head V is stored below W as C more rows: q_c = p_{L+c} and β_L·v_c = c_{L+c}. So the passes over rows read only one
matrix, and dV and dβ_L = Vᵀ Σ_rows dz are the same two lines. The forward pass keeps a buffer for the backward pass: c,
β_L, [W; V] in rows of a multiple of 16 columns, padded with zeros, and the dots p.

Partial sums are added in a fixed order, without atomics: the same bits from run to run.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastcross.kernels.gpu.tiles import unit_columns
from fastcross.kernels.layout import accumulation_dtype, kept_sizes


class Kept(NamedTuple):
    """The tensors that the forward pass keeps: views of one buffer."""

    c: Tensor  # (L + C)
    beta: Tensor  # (columns)
    packed: Tensor  # (L + C, columns), in W's dtype
    p: Tensor  # (L + C, M) in one row, or empty


def open_kept(buffer: Tensor, rows: int, M: int, w: Tensor, v: Tensor | None) -> Kept:
    """The views of a buffer that :func:`pack` has made."""
    sizes = kept_sizes(rows, M, w.shape[1], _packed_dtype(w, v), buffer.dtype)
    c, beta, packed, p = buffer.split_with_sizes(sizes)
    if packed.dtype != (dtype := _packed_dtype(w, v)):
        packed = packed.view(dtype)
    return Kept(c, beta, packed.view(rows, -1), p)


@triton.jit
def _pack_kernel(
    # pointers
    w_ptr, b_ptr, v_ptr, packed_ptr, c_ptr, beta_ptr,
    # sizes
    N, L, rows, columns,
    # strides
    stride_w_l, stride_b_l, stride_v_c,
    # constexprs
    HAS_BIAS: tl.constexpr, HAS_HEAD: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    layer = tl.program_id(0)
    DTYPE: tl.constexpr = c_ptr.dtype.element_ty
    c = tl.zeros((BLOCK_N,), DTYPE)
    for first in range(0, columns, BLOCK_N):
        offs_n = first + tl.arange(0, BLOCK_N)
        mask_n = offs_n < N

        w = tl.load(w_ptr + layer.to(tl.int64) * stride_w_l + offs_n, mask=mask_n & (layer < L), other=0.0).to(DTYPE)
        if HAS_HEAD:
            v_row = v_ptr + (layer - L).to(tl.int64) * stride_v_c
            w += tl.load(v_row + offs_n, mask=mask_n & (layer >= L) & (layer < rows), other=0.0).to(DTYPE)
        tl.store(packed_ptr + layer.to(tl.int64) * columns + offs_n, w, mask=(offs_n < columns) & (layer < rows))

        if HAS_BIAS:
            beta = tl.zeros((BLOCK_N,), DTYPE)
            b_row = b_ptr
            for _ in range(tl.minimum(layer, L)):
                beta += tl.load(b_row + offs_n, mask=mask_n, other=0.0).to(DTYPE)
                b_row += stride_b_l
            c += beta * w
            tl.store(beta_ptr + offs_n, beta, mask=(offs_n < columns) & (layer == rows))
    tl.store(c_ptr + layer, tl.sum(c, 0), mask=layer < rows)


def pack(w: Tensor, b: Tensor | None, v: Tensor | None, x0: Tensor, M: int) -> tuple[Tensor, Kept]:
    """A buffer for M rows of dots (not written here), and its views."""
    L, N = w.shape
    rows = L + (0 if v is None else v.shape[0])
    dtype = accumulation_dtype(x0, w, b, v)
    buffer = w.new_empty(sum(kept_sizes(rows, M, N, _packed_dtype(w, v), dtype)), dtype=dtype)
    kept = open_kept(buffer, rows, M, w, v)
    w, b, v = unit_columns(w), unit_columns(b), unit_columns(v)
    _pack_kernel[(rows + 1,)](
        w, b, v, kept.packed, kept.c, kept.beta,
        N, L, rows, kept.packed.shape[1],
        w.stride(0), 0 if b is None else b.stride(0), 0 if v is None else v.stride(0),
        HAS_BIAS=b is not None, HAS_HEAD=v is not None, BLOCK_N=4096 // dtype.itemsize, num_warps=4,
    )  # fmt: skip
    return buffer, kept


def _packed_dtype(w: Tensor, v: Tensor | None) -> torch.dtype:
    return w.dtype if v is None or v.dtype == w.dtype else torch.promote_types(w.dtype, v.dtype)


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
