"""Triton: what the closed form does with scalars, apart from the passes over rows.

    parameters   c_l = β_l·w_l,   β_{l+1} = β_l + b_l
    forward      α_{l+1} = α_l (1 + p_l) + c_l;   z_c = α_L q_c + β_L·v_c
    backward     dp_l = a_{l+1} α_l;   dc_l = Σ_rows a_{l+1};   a_l = a_{l+1} (1 + p_l)

A head V stands below W as C more rows: q_c = p_{L+c}, β_L·v_c = c_{L+c}, dq_c = α_L dz_c = dp_{L+c} and
Σ_rows dz_c = dc_{L+c}, so that the passes over rows know of one matrix only.

Traffic is (L + C) scalars per row, in rows of M scalars so that neighbouring threads read neighbouring words.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastcross.kernels.gpu import hardware, launch
from fastcross.kernels.gpu.tiles import sum_segments, unit_columns
from fastcross.kernels.rows import accumulation_dtype


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


def pack(w: Tensor, b: Tensor | None, v: Tensor | None, columns: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[W; V] in rows of ``columns`` columns, aligned and padded with zeros; c, one scalar per row; β_L, padded too."""
    rows = w.shape[0] + (0 if v is None else v.shape[0])
    dtype = accumulation_dtype(like, w, b, v)
    packed = w.new_empty((rows, columns), dtype=w.dtype if v is None else torch.promote_types(w.dtype, v.dtype))
    c = w.new_empty(rows, dtype=dtype)
    beta = w.new_empty(columns if b is not None else 0, dtype=dtype)
    w, b, v = unit_columns(w), unit_columns(b), unit_columns(v)
    _pack_kernel[(rows + 1,)](
        w, b, v, packed, c, beta,
        w.shape[1], w.shape[0], rows, columns,
        w.stride(0), 0 if b is None else b.stride(0), 0 if v is None else v.stride(0),
        HAS_BIAS=b is not None, HAS_HEAD=v is not None, BLOCK_N=1024, num_warps=4,
    )  # fmt: skip
    return packed, c, beta


@triton.jit(do_not_specialize=["M"])
def _recurrence_fwd_kernel(
    # pointers
    parts_ptr, c_ptr, p_ptr, alpha_ptr, z_ptr,
    # sizes
    M, L, C, segments,
    # strides
    stride_z_m,
    # constexprs
    HAS_BIAS: tl.constexpr, KEEP_P: tl.constexpr, HAS_HEAD: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    step = M.to(tl.int64)
    DTYPE: tl.constexpr = c_ptr.dtype.element_ty
    alpha = tl.full((BLOCK_M,), 1.0, DTYPE)
    for layer in range(L + C):
        p = sum_segments(parts_ptr + layer * step, offs_m, mask_m, segments, (L + C) * step, DTYPE)
        if KEEP_P:
            tl.store(p_ptr + layer * step + offs_m, p, mask=mask_m)
        if layer < L:
            alpha = alpha * (1 + p)
            if HAS_BIAS:
                alpha += tl.load(c_ptr + layer)
        elif HAS_HEAD:
            z = alpha * p
            if HAS_BIAS:
                z += tl.load(c_ptr + layer)
            tl.store(z_ptr + offs_m * stride_z_m + (layer - L), z, mask=mask_m)
    if not HAS_HEAD:
        tl.store(alpha_ptr + offs_m, alpha, mask=mask_m)


def recurrence_fwd(
    parts: Tensor, c: Tensor, layers: int, has_bias: bool, keep_p: bool, z: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Dots by segment (S, L + C, M) -> p (L + C, M) and α_L (M); with a head, ``z`` is written instead of α_L."""
    segments, rows, M = parts.shape
    p = parts[0] if segments == 1 else parts.new_empty((rows, M) if keep_p else 0)
    alpha = parts.new_empty(M if z is None else 0)
    if M:
        options = launch.scalars(hardware.of(parts.device))
        _recurrence_fwd_kernel[(triton.cdiv(M, options["BLOCK_M"]),)](
            parts, c, p, alpha, alpha if z is None else z,
            M, layers, rows - layers, segments,
            0 if z is None else z.stride(0),
            HAS_BIAS=has_bias, KEEP_P=keep_p and segments > 1, HAS_HEAD=z is not None, **options,
        )  # fmt: skip
    return p, alpha


@triton.jit(do_not_specialize=["M"])
def _recurrence_bwd_kernel(
    # pointers
    a_ptr, dz_ptr, p_ptr, c_ptr, alpha_ptr, dp_ptr, dc_ptr,
    # sizes
    M, L, C, segments,
    # strides
    stride_dz_m,
    # constexprs
    HAS_BIAS: tl.constexpr, HAS_A: tl.constexpr, HAS_HEAD: tl.constexpr,
    NEED_DP: tl.constexpr, NEED_DC: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """dp_l = a_{l+1} α_l; dc_l = Σ_rows a_{l+1}; a_l = a_{l+1} (1 + p_l); with a head, a_L = Σ_c dz_c q_c."""
    pid = tl.program_id(0).to(tl.int64)
    offs_m = pid * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    step = M.to(tl.int64)
    DTYPE: tl.constexpr = c_ptr.dtype.element_ty
    dc_ptr += pid * (L + C)

    # The rows of dp hold α_l until the way back.
    if NEED_DP:
        alpha = tl.full((BLOCK_M,), 1.0, DTYPE)
        for layer in range(L):
            tl.store(dp_ptr + layer * step + offs_m, alpha, mask=mask_m)
            alpha = alpha * (1 + tl.load(p_ptr + layer * step + offs_m, mask=mask_m, other=0.0))
            if HAS_BIAS:
                alpha += tl.load(c_ptr + layer)
        if not HAS_HEAD:
            tl.store(alpha_ptr + offs_m, alpha, mask=mask_m)
        # α_l goes from thread to thread through memory: in the compiled code a thread stores every 32nd (64th) of the
        # program's rows and loads four neighbouring ones, so it reads what others wrote. Only threads of this program
        # are concerned, since no other touches its columns of dp; and each α_l is read once, below, before dp_l, which
        # is computed from it, takes its place. So the one thing to order is the last store above before the first load
        # below, and a barrier of the program does that; all threads reach it, for NEED_DP is a constant.
        # NVIDIA: bar.sync, after which the writes of its threads, to global memory too, are seen by all of them.
        # AMD: a release fence, s_barrier and an acquire fence of the work-group. gfx11 and gfx12 wait until the stores
        # are done and drop what the first cache holds. For gfx9 LLVM emits nothing: the work-group is a single wave
        # (num_warps=1), whose vector memory operations one first cache takes in the order of the program.
        tl.debug_barrier()

    if HAS_A:
        a = sum_segments(a_ptr, offs_m, mask_m, segments, step, DTYPE)
    elif HAS_HEAD:
        a = tl.zeros((BLOCK_M,), DTYPE)
        for layer in range(L, L + C):
            dz = tl.load(dz_ptr + offs_m * stride_dz_m + (layer - L), mask=mask_m, other=0.0).to(DTYPE)
            a += dz * tl.load(p_ptr + layer * step + offs_m, mask=mask_m, other=0.0)
            if NEED_DP:
                tl.store(dp_ptr + layer * step + offs_m, alpha * dz, mask=mask_m)
            if NEED_DC:
                tl.store(dc_ptr + layer, tl.sum(dz, 0))
    else:
        a = tl.full((BLOCK_M,), 1.0, DTYPE)

    for i in range(L):
        layer = L - 1 - i
        if NEED_DP:
            dp_ptrs = dp_ptr + layer * step + offs_m
            tl.store(dp_ptrs, a * tl.load(dp_ptrs, mask=mask_m, other=0.0), mask=mask_m)
        if NEED_DC:
            tl.store(dc_ptr + layer, tl.sum(a, 0))
        a = a * (1 + tl.load(p_ptr + layer * step + offs_m, mask=mask_m, other=0.0))


def recurrence_bwd(
    p: Tensor,
    c: Tensor,
    layers: int,
    has_bias: bool,
    a: Tensor | None = None,
    dz: Tensor | None = None,
    need_dp: bool = True,
    need_dc: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """α_L (M), dp (L + C, M) and dc by program (programs, L + C).

    ``a`` = dy·x0 by segment (S, M), or ``dz`` for a head. With neither, a_L is 1: dp_l lacks that factor.
    """
    rows, M = p.shape
    options = launch.scalars(hardware.of(p.device))
    programs = triton.cdiv(M, options["BLOCK_M"])
    alpha = p.new_empty(M if need_dp and dz is None else 0)
    dp, dc = p.new_empty((rows, M) if need_dp else 0), p.new_empty((programs if need_dc else 0, rows))
    if M:
        _recurrence_bwd_kernel[(programs,)](
            a, dz, p, c, alpha, dp, dc,
            M, layers, rows - layers, 1 if a is None else a.shape[0],
            0 if dz is None else dz.stride(0),
            HAS_BIAS=has_bias, HAS_A=a is not None, HAS_HEAD=dz is not None,
            NEED_DP=need_dp, NEED_DC=need_dc, **options,
        )  # fmt: skip
    return alpha, dp, dc
