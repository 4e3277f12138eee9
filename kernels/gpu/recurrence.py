"""Triton: the scalars of each row: its dots with the parameters, and the recurrence of the closed form.

    dots         P = X Wᵀ        one read of X, any number of rows in W;        a = g·x0
    forward      α_{l+1} = α_l (1 + p_l) + c_l;   z_c = α_L q_c + β_L·v_c
    backward     dp_l = a_{l+1} α_l;   dc_l = Σ_rows a_{l+1};   a_l = a_{l+1} (1 + p_l)
    folded       the same recurrence over dots that were taken before, one row of a table for each id

With a head (see ``pack``) dq_c = α_L dz_c = dp_{L+c} and Σ_rows dz_c = dc_{L+c}. If a row does not fit into registers,
a_L = dy·x0 is computed here: one more read of both.

A program holds a segment of its rows in registers, so each dot has S parts, one per segment; S is 1 unless rows are
longer than a segment. The reader adds the parts in order. The recurrence moves (L + C) scalars per row, in rows of M
scalars, so that loads are coalesced.
"""

import functools

import triton
import triton.language as tl
from torch import Tensor

from fastcross.kernels.gpu import launch
from fastcross.kernels.gpu.launch import Hardware, Plan, Work
from fastcross.kernels.gpu.parameters import Kept
from fastcross.kernels.gpu.tiles import dot, load_packed, load_rows, row_offsets, sum_segments


@triton.jit(do_not_specialize=["M", "L", "C", "segments"])
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
    parts: Tensor, kept: Kept, M: int, layers: int, has_bias: bool, z: Tensor | None = None
) -> Tensor | None:
    """Dots by segment (S, L + C, M) -> α_L (M); with a head, ``z`` is written instead. The dots are put together in
    ``kept.p``, unless that is where they are, or empty."""
    alpha = parts.new_empty(M) if z is None else None
    if M:
        rows = kept.packed.shape[0]
        segments = parts.numel() // (rows * M)
        options = launch.scalars(launch.hardware_of(parts.device))
        _recurrence_fwd_kernel[(-(-M // options["BLOCK_M"]),)](
            parts, kept.c, kept.p, alpha, z,
            M, layers, rows - layers, segments,
            0 if z is None else z.stride(0),
            HAS_BIAS=has_bias, KEEP_P=kept.p.numel() > 0 and segments > 1, HAS_HEAD=z is not None, **options,
        )  # fmt: skip
    return alpha


@triton.jit
def _row_dot(
    dy_ptr, x0_ptr, offs_m, mask_m, N, stride_dy_m, stride_x0_m,
    DTYPE: tl.constexpr, ALIGN: tl.constexpr, REST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dy·x0 for rows of any length: chunk by chunk within a thread, then once across threads."""
    aligned = N // ALIGN * ALIGN
    dy_ptrs = dy_ptr + row_offsets(offs_m, stride_dy_m, ALIGN)
    x0_ptrs = x0_ptr + row_offsets(offs_m, stride_x0_m, ALIGN)
    total = tl.zeros((BLOCK_M, BLOCK_N), DTYPE)
    for first in range(0, aligned, BLOCK_N):
        offs_n = first + tl.arange(0, BLOCK_N)[None, :]
        mask = mask_m[:, None] & (offs_n < aligned)
        dy = tl.load(dy_ptrs + offs_n, mask=mask, other=0.0).to(DTYPE)
        total += dy * tl.load(x0_ptrs + offs_n, mask=mask, other=0.0).to(DTYPE)
    a = tl.sum(total, 1)
    if REST:  # the last N % ALIGN columns
        offs_n = aligned + tl.arange(0, ALIGN)[None, :]
        mask = mask_m[:, None] & (offs_n < N)
        dy = tl.load(dy_ptrs + offs_n, mask=mask, other=0.0).to(DTYPE)
        a += tl.sum(dy * tl.load(x0_ptrs + offs_n, mask=mask, other=0.0).to(DTYPE), 1)
    return a


@triton.jit(do_not_specialize=["M", "L", "C"])
def _recurrence_bwd_kernel(
    # pointers
    dy_ptr, x0_ptr, p_ptr, c_ptr, scalars_ptr, dc_ptr,
    # sizes
    M, N, L, C,
    # strides
    stride_dy_m, stride_x0_m,
    # constexprs
    HAS_BIAS: tl.constexpr, HAS_A: tl.constexpr, HAS_HEAD: tl.constexpr, NEED_DC: tl.constexpr,
    ALIGN: tl.constexpr, REST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dp_l = a_{l+1} α_l; dc_l = Σ_rows a_{l+1}; a_l = a_{l+1} (1 + p_l); with a head, dy is dz and a_L = Σ_c dz_c q_c.

    Scalars of a row lie side by side: dp (L + C), α_L. Without a (neither a head nor HAS_A) a_L is 1: dp_l lacks that
    factor.
    """
    pid = tl.program_id(0).to(tl.int64)
    offs_m = pid * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    step = M.to(tl.int64)
    DTYPE: tl.constexpr = c_ptr.dtype.element_ty
    dc_ptr += pid * (L + C)
    dp_ptrs = scalars_ptr + offs_m * (L + C + 1)

    # dp_l holds α_l until the way back.
    alpha = tl.full((BLOCK_M,), 1.0, DTYPE)
    for layer in range(L):
        tl.store(dp_ptrs + layer, alpha, mask=mask_m)
        alpha = alpha * (1 + tl.load(p_ptr + layer * step + offs_m, mask=mask_m, other=0.0))
        if HAS_BIAS:
            alpha += tl.load(c_ptr + layer)
    if not HAS_HEAD:
        tl.store(dp_ptrs + (L + C), alpha, mask=mask_m)
    # α_l goes through memory, and a load may lie over the threads otherwise than the store did: a thread may read what
    # others wrote. Only threads of this program are concerned, since no other touches its rows of dp; and each α_l is
    # read once, below, before dp_l, which is computed from it, takes its place. So the one thing to order is the last
    # store above before the first load below, and a barrier of the program, which all its threads reach, does that.
    # NVIDIA: bar.sync, after which the writes of its threads, to global memory too, are seen by all of them.
    # AMD: a release fence, s_barrier and an acquire fence of the work-group. gfx11 and gfx12 wait until the stores are
    # done and drop what the first cache holds. On gfx9 the waves of a work-group share one first cache, which takes
    # their vector memory operations in order; for a single wave (num_warps=1) LLVM emits nothing.
    tl.debug_barrier()

    if HAS_HEAD:
        a = tl.zeros((BLOCK_M,), DTYPE)
        for layer in range(L, L + C):
            dz = tl.load(dy_ptr + offs_m * stride_dy_m + (layer - L), mask=mask_m, other=0.0).to(DTYPE)
            a += dz * tl.load(p_ptr + layer * step + offs_m, mask=mask_m, other=0.0)
            tl.store(dp_ptrs + layer, alpha * dz, mask=mask_m)
            if NEED_DC:
                tl.store(dc_ptr + layer, tl.sum(dz, 0))
    elif HAS_A:
        a = _row_dot(
            dy_ptr, x0_ptr, offs_m, mask_m, N, stride_dy_m, stride_x0_m, DTYPE, ALIGN, REST, BLOCK_M, BLOCK_N
        )  # fmt: skip
    else:
        a = tl.full((BLOCK_M,), 1.0, DTYPE)

    for i in range(L):
        layer = L - 1 - i
        tl.store(dp_ptrs + layer, a * tl.load(dp_ptrs + layer, mask=mask_m, other=0.0), mask=mask_m)
        if NEED_DC:
            tl.store(dc_ptr + layer, tl.sum(a, 0))
        a = a * (1 + tl.load(p_ptr + layer * step + offs_m, mask=mask_m, other=0.0))


def recurrence_bwd(
    g: Tensor,
    x0: Tensor,
    kept: Kept,
    scalars: Tensor,
    dc: Tensor,
    layers: int,
    options: dict[str, int],
    *,
    has_bias: bool,
    has_a: bool,
    need_dc: bool,
) -> None:
    """From the incoming gradient (dy, or dz if there is a head) to ``scalars`` (M, L + C + 1) and dc.

    ``has_a``: a = dy·x0 is taken here and multiplied in; else, without a head, dp lacks that factor.
    """
    rows, (M, N) = kept.packed.shape[0], x0.shape
    has_head = rows > layers
    _recurrence_bwd_kernel[(-(-M // options["BLOCK_M"]),)](
        g if has_head or has_a else None, x0 if has_a else None, kept.p, kept.c, scalars, dc,
        M, N, layers, rows - layers,
        g.stride(0), x0.stride(0),
        HAS_BIAS=has_bias, HAS_A=has_a, HAS_HEAD=has_head, NEED_DC=need_dc,
        REST=N % options["ALIGN"] > 0, **options,
    )  # fmt: skip


def recurrence_tile(device: Hardware, align: int, has_a: bool) -> dict[str, int]:
    """The constexprs of the backward recurrence, with a dot of rows or without."""
    if has_a:
        return {"ALIGN": align, "BLOCK_M": 4, "BLOCK_N": 2 * device.warp_size * align, "num_warps": 4}
    return {"ALIGN": 1, "BLOCK_N": 1, **launch.scalars(device)}


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


def project(x: Tensor, packed: Tensor, plan: Plan, out: Tensor) -> None:
    """out[s, l] = x·w_l over segment s; ``packed`` is W, as ``pack`` lays it out."""
    M, N = x.shape
    if M:
        _project_kernel[(-(-M // plan.BLOCK_M), plan.segments(N))](
            x, packed, out,
            M, N, *packed.shape,
            x.stride(0),
            **tile(plan, N),
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
    work = Work(x0.element_size(), word(dy, x0), 0, held=2, moved=2)
    plan = launch.forward(min(N, launch.SEGMENT), work, launch.hardware_of(x0.device))
    a = like.new_empty((plan.segments(N), M))
    if M:
        _row_dot_kernel[(-(-M // plan.BLOCK_M), a.shape[0])](
            dy, x0, a,
            M, N,
            dy.stride(0), x0.stride(0),
            **tile(plan, N),
        )  # fmt: skip
    return a


def word(*rows: Tensor) -> int:
    """Elements per vector load: the widest that the strides and addresses of ``rows`` allow."""
    size = rows[0].element_size()
    align = launch.WORD // size
    for r in rows:
        while r.stride(0) % align or r.data_ptr() % (align * size):
            align //= 2
    return align


@functools.lru_cache(maxsize=4096)
def tile(plan: Plan, N: int) -> dict[str, int]:
    """The constexprs for the layout of rows of N elements in memory and in a program, and the compiler's options."""
    whole = plan.segments(N) == 1
    limit = {} if plan.maxnreg is None else {"maxnreg": plan.maxnreg}
    return limit | {
        "ALIGN": plan.ALIGN,
        "REST": 0 if N % plan.ALIGN == 0 else 1 if whole else plan.CHUNKS,
        "RAGGED": 0 if plan.columns * plan.segments(N) <= -(-N // 16) * 16 else 1 if whole else plan.CHUNKS,
        "BLOCK_M": plan.BLOCK_M,
        "BLOCK_N": plan.BLOCK_N,
        "CHUNKS": plan.CHUNKS,
        "ROWS": plan.ROWS,
        "num_warps": plan.num_warps,
    }


@triton.jit(do_not_specialize=["M", "L", "C", "k"])
def _folded_logits_fwd_kernel(
    # pointers
    table_ptr, ids_ptr, starts_ptr, base_ptr, constants_ptr, z_ptr,
    # sizes
    M, L, C, k,
    # strides
    stride_ids_m, stride_ids_k, stride_base_m,
    # constexprs
    BY_ROW: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """s = base + Σ_j table[starts_j + ids_j], or base + table; α and z of s. NaN for a row with an id that is none."""
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    K = (L + C).to(tl.int64)
    DTYPE: tl.constexpr = table_ptr.dtype.element_ty
    wrong = tl.zeros((BLOCK_M,), tl.int1)
    for j in range(k):
        ids = tl.load(ids_ptr + offs_m * stride_ids_m + j * stride_ids_k, mask=mask_m, other=0)
        height = tl.load(starts_ptr + j + 1) - tl.load(starts_ptr + j)
        wrong = wrong | (ids < 0) | (ids >= height)
    mask = mask_m & (wrong == 0)

    alpha = tl.full((BLOCK_M,), 1.0, DTYPE)
    for column in range(L + C):
        s = tl.load(base_ptr + offs_m * stride_base_m + column, mask=mask, other=float("nan"))
        if BY_ROW:
            s += tl.load(table_ptr + offs_m * K + column, mask=mask, other=0.0)
        for j in range(k):
            ids = tl.load(ids_ptr + offs_m * stride_ids_m + j * stride_ids_k, mask=mask, other=0)
            rows = tl.load(starts_ptr + j) + ids
            s += tl.load(table_ptr + rows * K + column, mask=mask, other=0.0)
        constant = tl.load(constants_ptr + column)
        if column < L:
            alpha = alpha * (1 + s) + constant
        else:
            tl.store(z_ptr + offs_m * C + (column - L), alpha * s + constant, mask=mask_m)


def folded_logits_fwd(
    table: Tensor, ids: Tensor | None, starts: Tensor | None, base: Tensor, constants: Tensor, layers: int
) -> Tensor:
    """The logits (M, C) of dots that were taken before: see ``kernels/closed_form.py``. The ids are read once for each
    column of the table, from the cache."""
    table, base = table.contiguous(), base.contiguous()
    M, k = ids.shape if ids is not None else (table.shape[0], 0)
    z = table.new_empty((M, table.shape[1] - layers))
    if M:
        options = launch.scalars(launch.hardware_of(table.device))
        _folded_logits_fwd_kernel[(-(-M // options["BLOCK_M"]),)](
            table, ids, starts, base, constants.to(table.dtype), z,
            M, layers, z.shape[1], k,
            *((0, 0) if ids is None else ids.stride()), 0 if base.shape[0] == 1 else base.stride(0),
            BY_ROW=ids is None, **options,
        )  # fmt: skip
    return z
