"""Triton: the whole cross network, forward and backward.

    p_l = x0·w_l,   α_{l+1} = α_l (1 + p_l) + c_l,   y = α_L x0 + β_L

A row of x0 stays in registers while all layers pass over it. Per row, in units of d elements: forward 1 read + 1 write,
backward 2 reads + 1 write, whatever L is. p (L scalars per row) is kept for the backward pass; c and β_L, which know
nothing of the batch, are computed again (``recurrence``).

Backward, with a = dy·x0 and dp_l = a u_l, where u_l depends on p and c alone:

    dx0  = α_L dy + Σ_l dp_l w_l
    dw_l = Σ_rows dp_l x0 + dc_l β_l,   db_j = Σ_rows dy + Σ_{l>j} dc_l w_l

Persistent programs sum dp_l x0 and dy over their rows in registers, or, where L·d is too much for them, in a buffer of
their own that stays in L2; ``reduction`` adds up the programs. From there on (d = 1026: L > 11; d = 3456: L > 4) the
traffic to L2 grows with L, though x0 and dy are still read once. Rows too long for registers (more than 32,768 columns
forward, 4,096 backward) take their dots in a pass of their own: one more read of each operand.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from fastcross.kernels.gpu import hardware, launch
from fastcross.kernels.gpu.launch import Plan
from fastcross.kernels.gpu.projection import project, row_dot, tile
from fastcross.kernels.gpu.recurrence import pack, recurrence_bwd, recurrence_fwd
from fastcross.kernels.gpu.reduction import reduce_sums
from fastcross.kernels.gpu.tiles import (
    add,
    add_sums,
    dot,
    fold,
    load_packed,
    load_rows,
    scale,
    store_rows,
    store_sums,
    zeros,
)
from fastcross.kernels.rows import empty_rows


@triton.jit(do_not_specialize=["M", "L"])
def _cross_network_fwd_kernel(
    # pointers
    x0_ptr, w_ptr, c_ptr, beta_ptr, alpha_ptr, y_ptr, p_ptr,
    # sizes
    M, N, L,
    # strides
    stride_x0_m, stride_w_l, stride_y_m,
    # constexprs
    WHOLE_ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, KEEP_P: tl.constexpr,
    ALIGN: tl.constexpr, REST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr,
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
            w = load_packed(w_ptr, first, DTYPE, BLOCK_N, CHUNKS)
            p = dot(x0, w, CHUNKS)
            if KEEP_P:
                tl.store(p_ptrs, p, mask=mask_m)
            alpha = alpha * (1 + p)
            if HAS_BIAS:
                alpha += tl.load(c_ptr + layer)
            w_ptr += stride_w_l
            p_ptrs += M
    else:
        alpha = tl.load(alpha_ptr + offs_m, mask=mask_m, other=0.0)
    y = scale(alpha, x0, CHUNKS)
    if HAS_BIAS:
        beta = load_packed(beta_ptr, first, DTYPE, BLOCK_N, CHUNKS)
        y = add(y, beta, CHUNKS)

    store_rows(y_ptr, y, offs_m, mask_m, first, N, stride_y_m, ALIGN, REST, BLOCK_N, CHUNKS)


def cross_network_fwd(x0: Tensor, w: Tensor, b: Tensor | None, keep_p: bool) -> tuple[Tensor, Tensor]:
    """y (M, d), and p (L, M) if it is to be kept."""
    (M, N), L = x0.shape, w.shape[0]
    plan = launch.forward(N, x0.element_size(), hardware.of(x0.device))
    segments = plan.segments(N)
    packed, c, beta = pack(w, b, None, segments * plan.columns, x0)
    y, p, alpha = empty_rows(x0), c.new_empty((L, M) if keep_p else 0), None
    if not plan.whole_rows:
        parts = c.new_empty((segments, L, M))
        project(x0, packed, plan, parts)
        p, alpha = recurrence_fwd(parts, c, L, b is not None, keep_p)
    if M:
        _cross_network_fwd_kernel[(triton.cdiv(M, plan.BLOCK_M), segments)](
            x0, packed, c, beta, alpha, y, p,
            M, N, L,
            x0.stride(0), packed.stride(0), y.stride(0),
            WHOLE_ROWS=plan.whole_rows, HAS_BIAS=b is not None, KEEP_P=keep_p,
            **tile(plan, x0, y),
        )  # fmt: skip
    return y, p


@triton.jit
def _load_dp(ptrs, mask_m, a, WHOLE_ROWS: tl.constexpr):
    dp = tl.load(ptrs, mask=mask_m, other=0.0)
    if WHOLE_ROWS:
        dp *= a
    return dp


@triton.jit(do_not_specialize=["M", "L"])
def _cross_network_bwd_kernel(
    # pointers
    dy_ptr, x0_ptr, w_ptr, alpha_ptr, dp_ptr, a_ptr, dx0_ptr, sums_ptr,
    # sizes
    M, N, L,
    # strides
    stride_dy_m, stride_x0_m, stride_w_l, stride_dx0_m,
    # constexprs
    WHOLE_ROWS: tl.constexpr, HAS_DY: tl.constexpr, KEEP_A: tl.constexpr,
    NEED_DX0: tl.constexpr, NEED_DW: tl.constexpr, NEED_DY_SUM: tl.constexpr, LAYERS: tl.constexpr,
    ALIGN: tl.constexpr, REST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dx0 = α_L dy + Σ_l dp_l w_l; dw_l = Σ_rows dp_l x0; Σ_rows dy. LAYERS: L if sums are in registers, else 0.

    Whole rows: a = dy·x0 is taken here, and ``dp_ptr`` holds dp_l / a. Without dy (a head): α_L dy is left out.
    """
    pid = tl.program_id(0)
    first = tl.program_id(1) * (CHUNKS * BLOCK_N)
    DTYPE: tl.constexpr = dp_ptr.dtype.element_ty
    columns = tl.num_programs(1) * (CHUNKS * BLOCK_N)
    stride_part = (L + NEED_DY_SUM).to(tl.int64) * columns
    sums_ptr += pid * ROWS * stride_part + first

    dw = zeros(LAYERS * CHUNKS, ROWS, BLOCK_N, DTYPE)
    dy_sum = zeros(NEED_DY_SUM * CHUNKS, ROWS, BLOCK_N, DTYPE)
    if NEED_DW and LAYERS == 0:
        none = zeros(CHUNKS, ROWS, BLOCK_N, DTYPE)
        for layer in range(L):
            store_sums(sums_ptr + layer * columns, none, stride_part, ROWS, BLOCK_N, CHUNKS)
        tl.debug_barrier()

    for tile_m in range(pid, tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        offs_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        mask_m = offs_m < M

        if HAS_DY:
            dy = load_rows(dy_ptr, offs_m, mask_m, first, N, stride_dy_m, DTYPE, ALIGN, REST, BLOCK_N, CHUNKS)
        if WHOLE_ROWS or NEED_DW:
            x0 = load_rows(x0_ptr, offs_m, mask_m, first, N, stride_x0_m, DTYPE, ALIGN, REST, BLOCK_N, CHUNKS)

        a = 1.0
        if WHOLE_ROWS:
            a = dot(dy, x0, CHUNKS)
            if KEEP_A:
                tl.store(a_ptr + offs_m, a, mask=mask_m)
        if NEED_DY_SUM:
            dy_sum = add(dy_sum, fold(dy, ROWS, CHUNKS), CHUNKS)
        if NEED_DX0:
            if HAS_DY:
                dx0 = scale(tl.load(alpha_ptr + offs_m, mask=mask_m, other=0.0), dy, CHUNKS)
            else:
                dx0 = zeros(CHUNKS, BLOCK_M, BLOCK_N, DTYPE)
        dp_ptrs = dp_ptr + offs_m
        w_ptrs = w_ptr
        if LAYERS:
            total = zeros(0, ROWS, BLOCK_N, DTYPE)
            for layer in tl.static_range(LAYERS):
                dp = _load_dp(dp_ptrs, mask_m, a, WHOLE_ROWS)
                if NEED_DX0:
                    w = load_packed(w_ptrs, first, DTYPE, BLOCK_N, CHUNKS)
                    dx0 = add(dx0, scale(dp, w, CHUNKS), CHUNKS)
                sums = fold(scale(dp, x0, CHUNKS), ROWS, CHUNKS)
                total = total + add(dw[layer * CHUNKS : (layer + 1) * CHUNKS], sums, CHUNKS)
                dp_ptrs += M
                w_ptrs += stride_w_l
            dw = total
        elif NEED_DX0 or NEED_DW:
            for layer in range(L):
                dp = _load_dp(dp_ptrs, mask_m, a, WHOLE_ROWS)
                if NEED_DX0:
                    w = load_packed(w_ptrs, first, DTYPE, BLOCK_N, CHUNKS)
                    dx0 = add(dx0, scale(dp, w, CHUNKS), CHUNKS)
                if NEED_DW:
                    sums = fold(scale(dp, x0, CHUNKS), ROWS, CHUNKS)
                    add_sums(sums_ptr + layer * columns, sums, stride_part, ROWS, BLOCK_N, CHUNKS)
                dp_ptrs += M
                w_ptrs += stride_w_l

        if NEED_DW and LAYERS == 0:
            # Loads and stores of the sums may lie differently over the threads: one may read what another wrote.
            tl.debug_barrier()
        if NEED_DX0:
            store_rows(dx0_ptr, dx0, offs_m, mask_m, first, N, stride_dx0_m, ALIGN, REST, BLOCK_N, CHUNKS)

    for layer in tl.static_range(LAYERS):
        sums = dw[layer * CHUNKS : (layer + 1) * CHUNKS]
        store_sums(sums_ptr + layer * columns, sums, stride_part, ROWS, BLOCK_N, CHUNKS)
    if NEED_DY_SUM:
        store_sums(sums_ptr + L * columns, dy_sum, stride_part, ROWS, BLOCK_N, CHUNKS)


def cross_network_bwd(
    dy: Tensor, x0: Tensor, w: Tensor, b: Tensor | None, p: Tensor, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """dx0, dw and db, each empty unless needed."""
    need_dx0, need_dw, need_db = needs
    L, has_bias = w.shape[0], b is not None
    need_dc = need_db or (need_dw and has_bias)
    plan = launch.backward(x0.shape[1], x0.element_size(), hardware.of(x0.device), 2, L * need_dw + need_db)
    packed, c, _ = pack(w, b, None, plan.segments(x0.shape[1]) * plan.columns, x0)
    a = None if plan.whole_rows else row_dot(dy, x0, c)
    alpha, dp, dc = recurrence_bwd(p, c, L, has_bias, a, need_dc=need_dc and not plan.whole_rows)
    keep_a = need_dc and plan.whole_rows
    dx0, sums, a = rows_bwd(
        plan, dy, x0, packed, alpha, dp, need_dx0=need_dx0, need_dw=need_dw, need_dy_sum=need_db, keep_a=keep_a
    )
    if need_dc and plan.whole_rows:
        _, _, dc = recurrence_bwd(p, c, L, has_bias, a, need_dp=False, need_dc=True)
    dw = w.new_empty(w.shape if need_dw else 0)
    db = (w if b is None else b).new_empty(w.shape if need_db else 0)
    if need_dw or need_db:
        reduce_sums(sums, dc if need_dc else None, packed, b, dw if need_dw else None, None, db if need_db else None, L)
    return dx0, dw, db


def rows_bwd(
    plan: Plan,
    dy: Tensor | None,
    x0: Tensor,
    packed: Tensor,
    alpha: Tensor,
    dp: Tensor,
    *,
    need_dx0: bool,
    need_dw: bool,
    need_dy_sum: bool = False,
    keep_a: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The pass over the rows: dx0, the programs' sums (parts, L + 1, columns), and a = dy·x0 (1, M) if it is kept."""
    (M, N), (L, columns) = x0.shape, packed.shape
    programs = plan.programs(M, hardware.of(x0.device))
    dx0 = empty_rows(x0) if need_dx0 else x0.new_empty(0)
    sums = dp.new_empty((programs * plan.ROWS, L + need_dy_sum, columns) if need_dw or need_dy_sum else (0, 0, 0))
    a = dp.new_empty((1, M) if keep_a else 0)
    _cross_network_bwd_kernel[(programs, plan.segments(N))](
        dy, x0, packed, alpha, dp, a, dx0, sums,
        M, N, L,
        0 if dy is None else dy.stride(0), x0.stride(0), packed.stride(0), dx0.stride(0),
        WHOLE_ROWS=plan.whole_rows and dy is not None, HAS_DY=dy is not None, KEEP_A=keep_a,
        NEED_DX0=need_dx0, NEED_DW=need_dw, NEED_DY_SUM=int(need_dy_sum),
        LAYERS=L if need_dw and plan.sums_in_registers else 0, ROWS=plan.ROWS,
        **tile(plan, *(t for t in (dy, x0, dx0 if need_dx0 else None) if t is not None)),
    )  # fmt: skip
    return dx0, sums, a
