"""Triton: one cross layer, forward and backward.

    s = x·w,   y = s x0 + b + x

The dot and the sum are one pass. The backward pass recomputes s. Per row, in units of d elements: forward 2 reads +
1 write, backward 3 reads + 2 writes. Rows too long for registers (more than 14,000 columns forward, 4,000
backward) need a separate pass for their dots (``projection``), which reads the operands of the dots once more.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastcross.kernels.gpu import launch
from fastcross.kernels.gpu.launch import Work
from fastcross.kernels.gpu.parameters import pack, reduce_sums
from fastcross.kernels.gpu.recurrence import project, row_dot, tile, word
from fastcross.kernels.gpu.tiles import (
    add,
    dot,
    fold,
    limit_word,
    load_rows,
    load_vector,
    scale,
    store_rows,
    store_sums,
    sum_segments,
    zeros,
)
from fastcross.kernels.layout import accumulation_dtype, empty_rows


@triton.jit(do_not_specialize=["M", "segments"])
def _cross_layer_fwd_kernel(
    # pointers
    x0_ptr, x_ptr, w_ptr, b_ptr, s_ptr, y_ptr,
    # sizes
    M, N, segments,
    # strides
    stride_x0_m, stride_x_m, stride_y_m,
    # constexprs
    DTYPE: tl.constexpr, WHOLE_ROWS: tl.constexpr, HAS_BIAS: tl.constexpr,
    ALIGN: tl.constexpr, REST: tl.constexpr, RAGGED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    first = tl.program_id(1) * (CHUNKS * BLOCK_N)

    x0 = load_rows(x0_ptr, offs_m, mask_m, first, N, stride_x0_m, DTYPE, ALIGN, REST, BLOCK_N, CHUNKS)
    x = load_rows(x_ptr, offs_m, mask_m, first, N, stride_x_m, DTYPE, ALIGN, REST, BLOCK_N, CHUNKS)
    if HAS_BIAS:
        b = load_vector(b_ptr, first, N, DTYPE, ALIGN, REST, BLOCK_N, CHUNKS)

    if WHOLE_ROWS:
        s = dot(x, load_vector(w_ptr, first, N, DTYPE, ALIGN, REST, BLOCK_N, CHUNKS), CHUNKS)
    else:
        s = sum_segments(s_ptr, offs_m, mask_m, segments, M, DTYPE)
    y = add(scale(s, x0, CHUNKS), x, CHUNKS)
    if HAS_BIAS:
        y = add(y, b, CHUNKS)

    store_rows(y_ptr, y, offs_m, mask_m, first, N, stride_y_m, ALIGN, REST, BLOCK_N, CHUNKS)


def cross_layer_fwd(x0: Tensor, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """y (M, d)."""
    M, N = x0.shape
    y = empty_rows(x0)
    work = Work(x0.element_size(), word(x0, x, y), 1, held=2, moved=3, dots=1)
    plan = launch.forward(N, work, launch.hardware_of(x0.device))
    segments = plan.segments(N)
    w, b = w.contiguous(), None if b is None else b.contiguous()
    s = None if plan.whole_rows else _project(x, w)
    if M:
        _cross_layer_fwd_kernel[(-(-M // plan.BLOCK_M), segments)](
            x0, x, w, b, s, y,
            M, N, 0 if s is None else s.shape[0],
            x0.stride(0), x.stride(0), y.stride(0),
            DTYPE=_dtype(x0, w, b), WHOLE_ROWS=plan.whole_rows, HAS_BIAS=b is not None,
            **tile(plan, N),
        )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["M", "s_segments", "ds_segments"])
def _cross_layer_bwd_kernel(
    # pointers
    dy_ptr, x0_ptr, x_ptr, w_ptr, s_ptr, ds_ptr, dx0_ptr, dx_ptr, sums_ptr,
    # sizes
    M, N, s_segments, ds_segments, columns,
    # strides
    stride_dy_m, stride_x0_m, stride_x_m, stride_dx0_m, stride_dx_m,
    # constexprs
    DTYPE: tl.constexpr, WHOLE_ROWS: tl.constexpr,
    NEED_DX0: tl.constexpr, NEED_DX: tl.constexpr, NEED_DW: tl.constexpr, NEED_DB: tl.constexpr,
    ALIGN: tl.constexpr, REST: tl.constexpr, RAGGED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ds = dy·x0; dx0 = s dy; dx = dy + ds w; dw = Σ_rows ds x; db = Σ_rows dy."""
    pid = tl.program_id(0)
    first = tl.program_id(1) * (CHUNKS * BLOCK_N)
    sums_ptr += pid.to(tl.int64) * (1 + NEED_DB) * columns
    dy_ptr, x0_ptr, x_ptr = limit_word(dy_ptr, ALIGN), limit_word(x0_ptr, ALIGN), limit_word(x_ptr, ALIGN)
    dx0_ptr, dx_ptr = limit_word(dx0_ptr, ALIGN), limit_word(dx_ptr, ALIGN)

    dw = zeros(NEED_DW * CHUNKS, ROWS, BLOCK_N, DTYPE)
    db = zeros(NEED_DB * CHUNKS, ROWS, BLOCK_N, DTYPE)
    if NEED_DX or (NEED_DX0 and WHOLE_ROWS):
        w = load_vector(w_ptr, first, N, DTYPE, ALIGN, REST, BLOCK_N, CHUNKS)

    for tile_m in range(pid, tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        offs_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        mask_m = offs_m < M

        dy = load_rows(dy_ptr, offs_m, mask_m, first, N, stride_dy_m, DTYPE, ALIGN, REST, BLOCK_N, CHUNKS)
        if NEED_DW or (NEED_DX0 and WHOLE_ROWS):
            x = load_rows(x_ptr, offs_m, mask_m, first, N, stride_x_m, DTYPE, ALIGN, REST, BLOCK_N, CHUNKS)

        if WHOLE_ROWS and (NEED_DX or NEED_DW):
            x0 = load_rows(x0_ptr, offs_m, mask_m, first, N, stride_x0_m, DTYPE, ALIGN, REST, BLOCK_N, CHUNKS)

        if NEED_DX or NEED_DW:
            ds = dot(dy, x0, CHUNKS) if WHOLE_ROWS else sum_segments(ds_ptr, offs_m, mask_m, ds_segments, M, DTYPE)
        if NEED_DX0:
            s = dot(x, w, CHUNKS) if WHOLE_ROWS else sum_segments(s_ptr, offs_m, mask_m, s_segments, M, DTYPE)
        if NEED_DW:
            dw = add(dw, fold(scale(ds, x, CHUNKS), ROWS, CHUNKS), CHUNKS)
        if NEED_DB:
            db = add(db, fold(dy, ROWS, CHUNKS), CHUNKS)

        if NEED_DX0:
            dx0 = scale(s, dy, CHUNKS)
            store_rows(dx0_ptr, dx0, offs_m, mask_m, first, N, stride_dx0_m, ALIGN, REST, BLOCK_N, CHUNKS)
        if NEED_DX:
            dx = add(dy, scale(ds, w, CHUNKS), CHUNKS)
            store_rows(dx_ptr, dx, offs_m, mask_m, first, N, stride_dx_m, ALIGN, REST, BLOCK_N, CHUNKS)

    if NEED_DW:
        store_sums(sums_ptr, dw, first, columns, BLOCK_N, CHUNKS)
    if NEED_DB:
        store_sums(sums_ptr + columns, db, first, columns, BLOCK_N, CHUNKS)


def cross_layer_bwd(
    dy: Tensor, x0: Tensor, x: Tensor, w: Tensor, b: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx0, dx, dw and db, each empty unless needed."""
    need_dx0, need_dx, need_dw, need_db = needs
    M, N = x0.shape
    device, size = launch.hardware_of(x0.device), x0.element_size()
    dx0 = empty_rows(x0) if need_dx0 else x0.new_empty(0)
    dx = empty_rows(x) if need_dx else x.new_empty(0)
    align = word(dy, x0, x, *([dx0] if need_dx0 else []), *([dx] if need_dx else []))
    work = Work(size, align, 1, held=3, moved=5, sums=1 + need_db)
    plan = launch.backward(N, work, device)
    segments, programs = plan.segments(N), plan.programs(M, N, work, device)
    w = w.contiguous()
    columns = -(-N // 16) * 16
    sums = w.new_empty(programs * (1 + need_db) * columns, dtype=accumulation_dtype(x0, w, b))
    s = _project(x, w) if need_dx0 and not plan.whole_rows else None
    ds = row_dot(dy, x0, sums) if (need_dx or need_dw) and not plan.whole_rows else None
    _cross_layer_bwd_kernel[(programs, segments)](
        dy, x0, x, w, s, ds, dx0, dx, sums,
        M, N, 0 if s is None else s.shape[0], 0 if ds is None else ds.shape[0], columns,
        dy.stride(0), x0.stride(0), x.stride(0), dx0.stride(0), dx.stride(0),
        DTYPE=_dtype(x0, w, b), WHOLE_ROWS=plan.whole_rows,
        NEED_DX0=need_dx0, NEED_DX=need_dx, NEED_DW=int(need_dw), NEED_DB=int(need_db),
        **tile(plan, N),
    )  # fmt: skip
    dw, db = w.new_empty(N if need_dw else 0), (w if b is None else b).new_empty(N if need_db else 0)
    if need_dw or need_db:
        reduce_sums(
            sums, None, w.unsqueeze(0), None,
            (dw if need_dw else None, None, db if need_db else None),
            layers=1, columns=columns, parts=programs, dc_parts=0, has_dy=need_db,
        )  # fmt: skip
    return dx0, dx, dw, db


def _project(x: Tensor, w: Tensor) -> Tensor:
    """s = x·w by segment, (S, M)."""
    M, N = x.shape
    work = Work(x.element_size(), word(x), 1, held=1, moved=1, dots=1)
    plan = launch.forward(min(N, launch.SEGMENT), work, launch.hardware_of(x.device))
    buffer, kept = pack(w.unsqueeze(0), None, None, x, 0)
    s = buffer.new_empty((plan.segments(N), M))
    project(x, kept.packed, plan, s)
    return s


def _dtype(*tensors: Tensor | None) -> tl.dtype:
    return tl.float64 if accumulation_dtype(*tensors) == torch.float64 else tl.float32
