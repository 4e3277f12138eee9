"""Triton: parameters as the passes over rows read them, in a buffer that the forward pass keeps for the backward pass.

    c_l = β_l·w_l,   β_{l+1} = β_l + b_l

A head V stands below W as C more rows: q_c = p_{L+c} and β_L·v_c = c_{L+c}, so that the passes over rows know of one
matrix only. The buffer holds c, β_L, [W; V] in rows of a multiple of 16 columns, padded with zeros, and the dots p.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastcross.kernels.gpu.tiles import unit_columns
from fastcross.kernels.rows import accumulation_dtype, kept_sizes


class Kept(NamedTuple):
    """What the forward pass keeps: views of one buffer."""

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
        HAS_BIAS=b is not None, HAS_HEAD=v is not None, BLOCK_N=1024, num_warps=4,
    )  # fmt: skip
    return buffer, kept


def _packed_dtype(w: Tensor, v: Tensor | None) -> torch.dtype:
    return w.dtype if v is None or v.dtype == w.dtype else torch.promote_types(w.dtype, v.dtype)
