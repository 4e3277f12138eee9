"""Triton: the whole cross network and its logits, forward and backward.

    p_l = x0·w_l,   α_{l+1} = α_l (1 + p_l) + c_l,   y = α_L x0 + β_L
    q = x0 Vᵀ,      z = α_L q + β_L Vᵀ                                   the logits: x_L is neither written nor read

    network:  a_L = dy·x0          logits:  a_L = Σ_c dz_c q_c,  dq = α_L dz
    dp_l = a_{l+1} α_l,   dx0 = α_L dy + Σ_l dp_l w_l + Σ_c dq_c v_c
    dw_l = Σ_rows dp_l x0 + dc_l β_l,   db_j = Σ_rows dy + Σ_{l>j} dc_l w_l,   dV = dqᵀ x0 + (Σ_rows dz) β_Lᵀ

A row of x0 stays in registers for all layers. Per row, in units of d elements, for any L: forward 1 read + 1 write,
backward 2 reads + 1 write; logits 1 read, and 1 + 1. Kept for the backward pass: p (L numbers per row), and the packed
parameters (``pack``), which do not depend on the batch. Rows too long for registers (more than 22,000 columns) need a
separate pass for their dots: one more read. With hundreds of outputs a GEMM on x_L is faster than logits.

The backward pass takes two launches: the rows, and the sums of the programs (``reduce_sums``). Persistent programs sum
dp_l x0 and dy over their rows in registers. If L·d is too large for that, a program takes segments of rows, whose dots
need another read (and if even a segment's sums are too many, a pass over x0 for each group of layers). There, and where
no weight needs a gradient, the scalars are computed before (``recurrence``): one launch more.
"""

# mypy: disable-error-code=assignment

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from fastcross.kernels.gpu import launch
from fastcross.kernels.gpu.launch import Work
from fastcross.kernels.gpu.parameters import open_kept, pack, reduce_sums
from fastcross.kernels.gpu.recurrence import project, recurrence_bwd, recurrence_fwd, recurrence_tile, tile, word
from fastcross.kernels.gpu.tiles import (
    add,
    carve,
    dot,
    fold,
    limit_word,
    load_packed,
    load_rows,
    scale,
    store_rows,
    store_sums,
    zeros,
)
from fastcross.kernels.layout import empty_rows


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
    work = Work(x0.element_size(), word(x0, y), L, held=1, moved=2, dots=1)
    plan = launch.forward(N, work, launch.hardware_of(x0.device))
    buffer, kept = pack(w, b, None, x0, M if keep_p else 0)
    alpha, segments = None, plan.segments(N)
    if M:
        if not plan.whole_rows:
            parts = buffer.new_empty(segments * L * M)
            project(x0, kept.packed, plan, parts)
            alpha = recurrence_fwd(parts, kept, M, L, b is not None)
        _cross_network_fwd_kernel[(-(-M // plan.BLOCK_M), segments)](
            x0, kept.packed, kept.c, kept.beta, alpha, y, kept.p,
            M, N, L, kept.packed.shape[1],
            x0.stride(0), y.stride(0),
            WHOLE_ROWS=plan.whole_rows, HAS_BIAS=b is not None, KEEP_P=keep_p,
            **tile(plan, N),
        )  # fmt: skip
    return y, buffer if keep_p else buffer.new_empty(0)


def cross_network_bwd(
    dy: Tensor, x0: Tensor, w: Tensor, b: Tensor | None, kept: Tensor, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """dx0, dw and db, each empty unless needed."""
    return network_bwd(dy, x0, w, b, None, kept, (*needs, False))[:3]


def cross_logits_fwd(x0: Tensor, w: Tensor, b: Tensor | None, v: Tensor, keep_p: bool) -> tuple[Tensor, Tensor]:
    """z (M, C), and the buffer with p followed by q (L + C, M) if they are to be kept."""
    M, N = x0.shape
    rows = w.shape[0] + v.shape[0]
    work = Work(x0.element_size(), word(x0), rows, held=1, moved=1, dots=1)
    plan = launch.forward(N, work, launch.hardware_of(x0.device))
    segments = plan.segments(N)
    in_place = segments == 1  # the dots of whole rows need no putting together
    buffer, kept = pack(w, b, v, x0, M if keep_p or in_place else 0)
    parts = kept.p if in_place else buffer.new_empty(segments * rows * M)
    project(x0, kept.packed, plan, parts)
    z = x0.new_empty((M, v.shape[0]))
    recurrence_fwd(parts, kept, M, w.shape[0], b is not None, z)
    return z, buffer if keep_p else buffer.new_empty(0)


def cross_logits_bwd(
    dz: Tensor, x0: Tensor, w: Tensor, b: Tensor | None, v: Tensor, kept: Tensor, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx0, dw, db and dv, each empty unless needed."""
    return network_bwd(dz, x0, w, b, v, kept, needs)


@triton.jit(do_not_specialize=["M"])
def _cross_network_bwd_kernel(
    # pointers
    dy_ptr, x0_ptr, w_ptr, c_ptr, p_ptr, scalars_ptr, dx0_ptr, sums_ptr, dc_ptr,
    # sizes
    M, N,
    # strides
    stride_dy_m, stride_x0_m, stride_dx0_m,
    # constexprs
    WHOLE_ROWS: tl.constexpr, TAKES_SCALARS: tl.constexpr, HAS_BIAS: tl.constexpr, C: tl.constexpr,
    NEED_DX0: tl.constexpr, NEED_DW: tl.constexpr, NEED_DY_SUM: tl.constexpr, NEED_DC: tl.constexpr,
    L: tl.constexpr, LAYERS: tl.constexpr, STORED: tl.constexpr, COLUMNS: tl.constexpr,
    ALIGN: tl.constexpr, REST: tl.constexpr, RAGGED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dx0 = α_L dy + Σ_l dp_l w_l; dw_l = Σ_rows dp_l x0; Σ_rows dy; dc_l = Σ_rows a_{l+1}.

    Whole rows: a = dy·x0 is taken here. The scalars are computed from p, or read if the kernel TAKES_SCALARS: dp_l, or
    dp_l / a for whole rows. With a head of C outputs, dy is dz, and α_L dy is left out. LAYERS: how many a program
    takes, one group of several; 0 where nothing is summed by layer.
    STORED: rows of a program's sums beside the layers', 1 where Σ_rows dy is among them. L and COLUMNS are known to the
    compiler, which then needs no register for the address of a layer.
    """
    pid = tl.program_id(0)
    first = tl.program_id(1) * (CHUNKS * BLOCK_N)
    group = tl.program_id(2) * LAYERS
    DTYPE: tl.constexpr = c_ptr.dtype.element_ty
    sums_ptr += pid.to(tl.int64) * ((L + STORED) * COLUMNS)
    # So that rows and W lie over the threads alike.
    x0_ptr, dx0_ptr, w_ptr = limit_word(x0_ptr, ALIGN), limit_word(dx0_ptr, ALIGN), limit_word(w_ptr, ALIGN)
    if C == 0:
        dy_ptr = limit_word(dy_ptr, ALIGN)

    SUMS: tl.constexpr = LAYERS * NEED_DW
    dw = zeros(SUMS * CHUNKS, ROWS, BLOCK_N, DTYPE)
    dy_sum = zeros(NEED_DY_SUM * CHUNKS, ROWS, BLOCK_N, DTYPE)
    dc = ()
    for _ in tl.static_range(NEED_DC * LAYERS):
        dc = dc + (tl.zeros((BLOCK_M,), DTYPE),)

    for tile_m in range(pid, tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        offs_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        mask_m = offs_m < M

        # Scalars first: after the dot, which waits for all threads, they would be waited for once more.
        p, alphas, dp = (), (), ()
        if TAKES_SCALARS:
            dp_ptrs = scalars_ptr + offs_m.to(tl.int64) * (L + 1)
            for i in tl.static_range(LAYERS):
                dp = dp + (tl.load(dp_ptrs + group + i, mask=mask_m & (group + i < L), other=0.0),)
            if NEED_DX0 and C == 0:
                alpha = tl.load(dp_ptrs + L, mask=mask_m, other=0.0)
        else:
            alpha = tl.full((BLOCK_M,), 1.0, DTYPE)
            for layer in tl.static_range(L - C):
                alphas = alphas + (alpha,)
                p_l = tl.load(p_ptr + layer * M.to(tl.int64) + offs_m, mask=mask_m, other=0.0)
                alpha = alpha * (1 + p_l)
                if HAS_BIAS:
                    alpha += tl.load(c_ptr + layer)
                p = p + (p_l,)
            if C:
                a = tl.zeros((BLOCK_M,), DTYPE)
            for c in tl.static_range(C):
                dz = tl.load(dy_ptr + offs_m.to(tl.int64) * stride_dy_m + c, mask=mask_m, other=0.0).to(DTYPE)
                a += dz * tl.load(p_ptr + (L - C + c) * M.to(tl.int64) + offs_m, mask=mask_m, other=0.0)
                p = p + (dz,)
        if C == 0:
            dy = load_rows(dy_ptr, offs_m, mask_m, first, N, stride_dy_m, DTYPE, ALIGN, REST, BLOCK_N, CHUNKS)
        if WHOLE_ROWS or NEED_DW:
            x0 = load_rows(x0_ptr, offs_m, mask_m, first, N, stride_x0_m, DTYPE, ALIGN, REST, BLOCK_N, CHUNKS)

        if WHOLE_ROWS:
            a = dot(dy, x0, CHUNKS)
        if NEED_DY_SUM:
            dy_sum = add(dy_sum, fold(dy, ROWS, CHUNKS), CHUNKS)
        if NEED_DX0:
            dx0 = scale(alpha, dy, CHUNKS) if C == 0 else zeros(CHUNKS, BLOCK_M, BLOCK_N, DTYPE)
        if LAYERS:
            total, dc_total = (), ()
            for i in tl.static_range(LAYERS - 1, -1, -1):
                if not TAKES_SCALARS:
                    above = a if i < L - C else p[i]  # a_{l+1}; of an output dz_c
                    dp_i = above * (alphas[i] if i < L - C else alpha)
                    if NEED_DC:
                        dc_total = (dc[i] + above,) + dc_total
                    if i < L - C:
                        a = a * (1 + p[i])
                else:
                    dp_i = dp[i]
                if NEED_DX0:
                    w = load_packed(w_ptr + i * COLUMNS, first, COLUMNS, DTYPE, RAGGED, BLOCK_M, BLOCK_N, CHUNKS, ROWS)
                    dx0 = add(dx0, scale(dp_i, w, CHUNKS), CHUNKS)
                if SUMS:
                    sums = fold(scale(dp_i, x0, CHUNKS), ROWS, CHUNKS)
                    total = add(dw[i * CHUNKS : (i + 1) * CHUNKS], sums, CHUNKS) + total
            dw, dc = total, dc_total
        elif NEED_DX0:
            w_ptrs = w_ptr
            for layer in range(L):
                dp_l = tl.load(dp_ptrs + layer, mask=mask_m, other=0.0)
                if WHOLE_ROWS:
                    dp_l *= a
                w = load_packed(w_ptrs, first, COLUMNS, DTYPE, RAGGED, BLOCK_M, BLOCK_N, CHUNKS, ROWS)
                dx0 = add(dx0, scale(dp_l, w, CHUNKS), CHUNKS)
                w_ptrs += COLUMNS

        if NEED_DX0:
            store_rows(dx0_ptr, dx0, offs_m, mask_m, first, N, stride_dx0_m, ALIGN, REST, BLOCK_N, CHUNKS)

    for i in tl.static_range(LAYERS):
        layer = group + i
        if SUMS:  # noqa: SIM102 the compiler knows this, and not the next
            if layer < L:
                sums = dw[i * CHUNKS : (i + 1) * CHUNKS]
                store_sums(sums_ptr + layer * COLUMNS, sums, first, COLUMNS, BLOCK_N, CHUNKS)
        if NEED_DC:
            if C:  # all segments of a row have the same
                tl.store(dc_ptr + pid * L + layer, tl.sum(dc[i], 0), mask=first == 0)
            else:  # a mask would take registers
                tl.store(dc_ptr + pid * L + layer, tl.sum(dc[i], 0))
    if NEED_DY_SUM:
        store_sums(sums_ptr + L * COLUMNS, dy_sum, first, COLUMNS, BLOCK_N, CHUNKS)


def network_bwd(
    g: Tensor, x0: Tensor, w: Tensor, b: Tensor | None, v: Tensor | None, buffer: Tensor, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx0, dw, db and dv, each empty unless needed, from dy; with a head from dz, and without x_L."""
    need_dx0, need_dw, need_db, need_dv = needs
    (M, N), L, device = x0.shape, w.shape[0], launch.hardware_of(x0.device)
    rows = L if v is None else L + v.shape[0]
    need_sums, need_dy_sum = need_dw or need_dv, need_db and v is None
    need_dc = need_db or (need_sums and b is not None)
    dx0 = empty_rows(x0) if need_dx0 else x0.new_empty(0)
    dw, db = w.new_empty(w.shape if need_dw else 0), (w if b is None else b).new_empty(w.shape if need_db else 0)
    dv = w.new_empty(0) if v is None else v.new_empty(v.shape if need_dv else 0)
    kept = open_kept(buffer, rows, M, w, v)

    align = word(x0, *([g] if v is None else []), *([dx0] if need_dx0 else []))
    work = Work(
        x0.element_size(), align, rows, held=2, moved=2 + (v is None),
        # A head's α_l are there before the sums begin: they wait for no dot.
        sums=rows * need_sums + need_dy_sum, scalars=rows * (need_dc + (need_sums and v is not None)),
    )  # fmt: skip
    plan = launch.backward(N, work, device, v is None)
    programs, whole = plan.programs(M, N, work, device), plan.whole_rows
    options = recurrence_tile(device, align, not whole and v is None)
    by_layer = need_sums or (need_dc and v is None)  # a head's db takes no more than the scalars
    takes_scalars = not by_layer or plan.groups > 1 or (not whole and v is None)
    dc_parts = -(-M // options["BLOCK_M"]) if takes_scalars else programs
    sums, scalars, dc = carve(
        buffer,
        programs * (rows + need_dy_sum) * kept.packed.shape[1] * (need_sums or need_dy_sum),
        M * (rows + 1) * takes_scalars,
        dc_parts * rows * need_dc,
    )
    if M and takes_scalars:
        recurrence_bwd(
            g, x0, kept, scalars, dc, L, options,
            has_bias=b is not None, has_a=not whole and v is None, need_dc=need_dc,
        )  # fmt: skip

    def pass_over_rows(need_dx0: bool, need_dw: bool, adds_dy: bool, groups: int) -> None:
        layers = -(-rows // groups) if need_dw or (need_dc and not takes_scalars) else 0
        _cross_network_bwd_kernel[(programs, plan.segments(N), groups)](
            g, x0, kept.packed, kept.c, kept.p, scalars, dx0, sums, dc,
            M, N,
            g.stride(0), x0.stride(0), dx0.stride(0),
            WHOLE_ROWS=whole, TAKES_SCALARS=takes_scalars, HAS_BIAS=b is not None, C=rows - L,
            NEED_DX0=need_dx0, NEED_DW=int(need_dw), NEED_DY_SUM=int(adds_dy),
            NEED_DC=int(need_dc and not takes_scalars),
            L=rows, LAYERS=layers, STORED=int(need_dy_sum), COLUMNS=kept.packed.shape[1],
            **tile(plan, N),
        )  # fmt: skip

    if plan.groups == 1:
        if need_dx0 or by_layer or need_dy_sum:
            pass_over_rows(need_dx0, need_sums, need_dy_sum, 1)
    else:
        if need_dx0 or need_dy_sum:
            pass_over_rows(need_dx0, False, need_dy_sum, 1)
        pass_over_rows(False, True, False, plan.groups)
    if need_sums or need_db:
        reduce_sums(
            sums, dc if need_dc else None, kept.packed, b,
            (dw if need_dw else None, dv if need_dv else None, db if need_db else None),
            layers=L, columns=kept.packed.shape[1], parts=programs, dc_parts=dc_parts, has_dy=need_dy_sum,
        )  # fmt: skip
    return dx0, dw, db, dv
