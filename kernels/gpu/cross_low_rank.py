"""Triton: DCN-V2's low-rank layers, forward and backward.

    x_{l+1} = x0 ⊙ (U_l V_l x_l + b_l) + x_l

Every x_l is x0 ⊙ y_l, and every dL/dx_l is T_l; both follow from the r numbers s_l = V_l x_l and ds_l of a row:

    y_l = 1 + Σ_{j<l} (U_j s_j + b_j)       s_l  = V_l (x0 ⊙ y_l)             upwards, x_L = x0 ⊙ y_L
    T_l = dy + Σ_{j≥l} V_jᵀ ds_j            ds_l = U_lᵀ (x0 ⊙ T_{l+1})        downwards, the same kernel

    dx0  = dy ⊙ y_L + Σ_l (V_lᵀ ds_l) ⊙ y_l
    dU_l = Σ_rows (x0 ⊙ T_{l+1}) s_lᵀ,   dV_l = Σ_rows ds_l (x0 ⊙ y_l)ᵀ,   db_l = Σ_rows x0 ⊙ T_{l+1}

So no (M, d) tensor is written between layers. One kernel expands a tile of y or T from the numbers of the earlier
layers, multiplies it by x0 and reduces it to the numbers of this layer. Kept for the backward pass: s, (L, M, r). Per
row, in units of d elements: forward L + 1 reads + 1 write, backward 2 L reads for ds, 1 + 1 for dx0 and 2 L for the
weights, whose gradients are partial sums added in order.

Expanding again for each layer costs L (L + 1) / 2 products of rank r instead of L: good for few layers of small rank on
tensor cores. For ranks above 64, L r above 512, float32 in full precision, sm_75, an activation or a diagonal, the
layers run as PyTorch's GEMMs and the steps of ``multiplicative``.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastcross.kernels import layers_of_products
from fastcross.kernels.gpu import launch
from fastcross.kernels.gpu.cross_matrix import on_tensor_cores, padded, schedule
from fastcross.kernels.gpu.multiplicative import with_steps
from fastcross.kernels.gpu.recurrence import word
from fastcross.kernels.gpu.tiles import load_rows, store_rows
from fastcross.kernels.layout import empty_rows

MOST_RANK, MOST_NUMBERS = 64, 512  # r, and L r
LAYERS = with_steps(layers_of_products.LowRank)


@triton.jit
def _numbers(s_ptr, offs_m, mask_m, R, stride_s_m, DTYPE: tl.constexpr, BLOCK_R: tl.constexpr):
    """A tile of s_l or ds_l."""
    offs_r = tl.arange(0, BLOCK_R)[None, :]
    s_ptrs = s_ptr + offs_m.to(tl.int64)[:, None] * stride_s_m + offs_r
    return tl.load(s_ptrs, mask=mask_m[:, None] & (offs_r < R), other=0.0).to(DTYPE)


@triton.jit
def _factor(ptr, offs_n, columns, R, stride_n, stride_r, DTYPE: tl.constexpr, BLOCK_R: tl.constexpr):
    """A tile (BLOCK_N, BLOCK_R) of U_l or V_lᵀ."""
    offs_r = tl.arange(0, BLOCK_R)[None, :]
    ptrs = ptr + offs_n[:, None] * stride_n + offs_r * stride_r
    return tl.load(ptrs, mask=(offs_n < columns)[:, None] & (offs_r < R), other=0.0).to(DTYPE)


@triton.jit
def _expand(
    y, s_ptr, up_ptr, layers, offs_m, mask_m, offs_n, columns, R,
    stride_s_l, stride_s_m, stride_up_l, stride_up_n, stride_up_r,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """y + Σ_j s_j A_jᵀ over ``layers`` of them, A being U or Vᵀ."""
    for _ in range(layers):
        s = _numbers(s_ptr, offs_m, mask_m, R, stride_s_m, DTYPE, BLOCK_R)
        up = _factor(up_ptr, offs_n, columns, R, stride_up_n, stride_up_r, DTYPE, BLOCK_R)
        y = tl.dot(s, tl.trans(up), y, input_precision=PRECISION)
        s_ptr += stride_s_l
        up_ptr += stride_up_l
    return y


@triton.jit(do_not_specialize=["M", "layers"])
def _cross_low_rank_shrink_kernel(
    # pointers
    x0_ptr, base_ptr, beta_ptr, s_ptr, up_ptr, down_ptr, out_ptr,
    # sizes
    M, N, R, layers, up_columns, down_columns,
    # strides
    stride_x0_m, stride_base_m, stride_s_l, stride_s_m,
    stride_up_l, stride_up_n, stride_up_r, stride_down_n, stride_down_r,
    # constexprs
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr, REST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """out = (x0 ⊙ (β + Σ_j s_j A_jᵀ)) B: s_l with A = U, B = V_lᵀ; ds_l with A = Vᵀ, B = U_l, and dy for β."""
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M

    out = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for first in range(0, N, BLOCK_N):
        offs_n = first + tl.arange(0, BLOCK_N)
        if base_ptr is None:
            beta = tl.load(beta_ptr + offs_n, mask=offs_n < N, other=0.0)
            y = tl.broadcast_to(beta[None, :], (BLOCK_M, BLOCK_N))
        else:
            y = load_rows(base_ptr, offs_m, mask_m, first, N, stride_base_m, tl.float32, ALIGN, REST, BLOCK_N, 1)[0]
        y = _expand(
            y, s_ptr, up_ptr, layers, offs_m, mask_m, offs_n, up_columns, R,
            stride_s_l, stride_s_m, stride_up_l, stride_up_n, stride_up_r, DTYPE, PRECISION, BLOCK_R,
        )  # fmt: skip
        y *= load_rows(x0_ptr, offs_m, mask_m, first, N, stride_x0_m, tl.float32, ALIGN, REST, BLOCK_N, 1)[0]
        down = _factor(down_ptr, offs_n, down_columns, R, stride_down_n, stride_down_r, DTYPE, BLOCK_R)
        out = tl.dot(y.to(DTYPE), down, out, input_precision=PRECISION)

    offs_r = tl.arange(0, BLOCK_R)[None, :]
    out_ptrs = out_ptr + offs_m.to(tl.int64)[:, None] * stride_s_m + offs_r
    tl.store(out_ptrs, out, mask=mask_m[:, None] & (offs_r < R))


@triton.jit(do_not_specialize=["M", "L"])
def _cross_low_rank_fwd_kernel(
    # pointers
    x0_ptr, beta_ptr, s_ptr, u_ptr, x_ptr,
    # sizes
    M, N, R, L,
    # strides
    stride_x0_m, stride_s_l, stride_s_m, stride_u_l, stride_u_n, stride_x_m,
    # constexprs
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr, REST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """x_L = x0 ⊙ (β_L + Σ_l s_l U_lᵀ)."""
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    first = tl.program_id(1) * BLOCK_N
    offs_n = first + tl.arange(0, BLOCK_N)

    beta = tl.load(beta_ptr + offs_n, mask=offs_n < N, other=0.0)
    y = _expand(
        tl.broadcast_to(beta[None, :], (BLOCK_M, BLOCK_N)), s_ptr, u_ptr, L, offs_m, mask_m, offs_n, N, R,
        stride_s_l, stride_s_m, stride_u_l, stride_u_n, 1, DTYPE, PRECISION, BLOCK_R,
    )  # fmt: skip
    y *= load_rows(x0_ptr, offs_m, mask_m, first, N, stride_x0_m, tl.float32, ALIGN, REST, BLOCK_N, 1)[0]

    store_rows(x_ptr, (y,), offs_m, mask_m, first, N, stride_x_m, ALIGN, REST, BLOCK_N, 1)


@triton.jit(do_not_specialize=["M", "L"])
def _cross_low_rank_dx0_kernel(
    # pointers
    dy_ptr, s_ptr, ds_ptr, u_ptr, v_ptr, b_ptr, dx0_ptr,
    # sizes
    M, N, R, L, v_columns,
    # strides
    stride_dy_m, stride_s_l, stride_s_m, stride_u_l, stride_u_n, stride_v_l, stride_v_r, stride_dx0_m,
    # constexprs
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr, REST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """dx0 = dy ⊙ y_L + Σ_l (ds_l V_l) ⊙ y_l,  y_{l+1} = y_l + s_l U_lᵀ + b_l."""
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    first = tl.program_id(1) * BLOCK_N
    offs_n = first + tl.arange(0, BLOCK_N)

    y = tl.full((BLOCK_M, BLOCK_N), 1.0, tl.float32)
    dx0 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(L):
        ds = _numbers(ds_ptr, offs_m, mask_m, R, stride_s_m, DTYPE, BLOCK_R)
        v = _factor(v_ptr, offs_n, v_columns, R, 1, stride_v_r, DTYPE, BLOCK_R)
        dx0 += tl.dot(ds, tl.trans(v), input_precision=PRECISION) * y
        s = _numbers(s_ptr, offs_m, mask_m, R, stride_s_m, DTYPE, BLOCK_R)
        u = _factor(u_ptr, offs_n, N, R, stride_u_n, 1, DTYPE, BLOCK_R)
        y = tl.dot(s, tl.trans(u), y, input_precision=PRECISION)
        if b_ptr is not None:
            y += tl.load(b_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
            b_ptr += N
        s_ptr += stride_s_l
        ds_ptr += stride_s_l
        u_ptr += stride_u_l
        v_ptr += stride_v_l
    dx0 += load_rows(dy_ptr, offs_m, mask_m, first, N, stride_dy_m, tl.float32, ALIGN, REST, BLOCK_N, 1)[0] * y

    store_rows(dx0_ptr, (dx0,), offs_m, mask_m, first, N, stride_dx0_m, ALIGN, REST, BLOCK_N, 1)


@triton.jit(do_not_specialize=["M", "L"])
def _cross_low_rank_sums_kernel(
    # pointers
    x0_ptr, dy_ptr, beta_ptr, s_ptr, ds_ptr, u_ptr, v_ptr, sums_ptr, db_ptr,
    # sizes
    M, N, R, L, v_columns,
    # strides
    stride_x0_m, stride_dy_m, stride_s_l, stride_s_m, stride_u_l, stride_u_n, stride_v_l, stride_v_r,
    # constexprs
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr, REST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """dU_l = Σ_rows duᵀ s_l, dV_lᵀ = Σ_rows x_lᵀ ds_l and db_l = Σ_rows du of one layer, over the rows of a part.

    du = x0 ⊙ T_{l+1};  x_l = x0 ⊙ y_l.
    """
    first = tl.program_id(0) * BLOCK_N
    layer, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    offs_n = first + tl.arange(0, BLOCK_N)
    beta = tl.load(beta_ptr + layer * N + offs_n, mask=offs_n < N, other=0.0)
    above_s_ptr, above_v_ptr = ds_ptr + (layer + 1) * stride_s_l, v_ptr + (layer + 1) * stride_v_l

    dw_u = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    dw_v = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    db = tl.zeros((BLOCK_N,), tl.float32)
    for tile_m in range(part, tl.cdiv(M, BLOCK_M), tl.num_programs(2)):
        offs_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        mask_m = offs_m < M
        x0 = load_rows(x0_ptr, offs_m, mask_m, first, N, stride_x0_m, tl.float32, ALIGN, REST, BLOCK_N, 1)[0]

        du = load_rows(dy_ptr, offs_m, mask_m, first, N, stride_dy_m, tl.float32, ALIGN, REST, BLOCK_N, 1)[0]
        du = x0 * _expand(
            du, above_s_ptr, above_v_ptr, L - 1 - layer, offs_m, mask_m, offs_n, v_columns, R,
            stride_s_l, stride_s_m, stride_v_l, 1, stride_v_r, DTYPE, PRECISION, BLOCK_R,
        )  # fmt: skip
        s = _numbers(s_ptr + layer * stride_s_l, offs_m, mask_m, R, stride_s_m, DTYPE, BLOCK_R)
        dw_u = tl.dot(tl.trans(du.to(DTYPE)), s, dw_u, input_precision=PRECISION)
        db += tl.sum(du, 0)

        x = x0 * _expand(
            tl.broadcast_to(beta[None, :], (BLOCK_M, BLOCK_N)), s_ptr, u_ptr, layer, offs_m, mask_m, offs_n, N, R,
            stride_s_l, stride_s_m, stride_u_l, stride_u_n, 1, DTYPE, PRECISION, BLOCK_R,
        )  # fmt: skip
        ds = _numbers(ds_ptr + layer * stride_s_l, offs_m, mask_m, R, stride_s_m, DTYPE, BLOCK_R)
        dw_v = tl.dot(tl.trans(x.to(DTYPE)), ds, dw_v, input_precision=PRECISION)

    place = (part * L.to(tl.int64) + layer) * N + offs_n
    offs_r = tl.arange(0, BLOCK_R)[None, :]
    mask = (offs_n < N)[:, None] & (offs_r < R)
    sums_ptrs = sums_ptr + place[:, None] * (2 * R) + offs_r
    tl.store(sums_ptrs, dw_u, mask=mask)
    tl.store(sums_ptrs + R, dw_v, mask=mask)
    tl.store(db_ptr + place, db, mask=offs_n < N)


def _is_fused(u: Tensor, activation: str | None, diag_scale: float) -> bool:
    layers, _, r = u.shape
    small = r <= MOST_RANK and layers * r <= MOST_NUMBERS
    return activation is None and diag_scale == 0 and small and on_tensor_cores(u)


def cross_low_rank_fwd(
    x0: Tensor, u: Tensor, v: Tensor, b: Tensor | None, activation: str | None, diag_scale: float, keep: bool
) -> tuple[Tensor, list[Tensor]]:
    """x_L (M, d), and s (L, M, r) if kept."""
    if not _is_fused(u, activation, diag_scale):
        return layers_of_products.forward(LAYERS, x0, u, v, b, activation, diag_scale, keep)
    x, s = _fused_fwd(x0, u, v, b)
    return x, [s] if keep else []


def cross_low_rank_bwd(
    dy: Tensor, x0: Tensor, u: Tensor, v: Tensor, b: Tensor | None, activation: str | None, diag_scale: float,
    kept: Sequence[Tensor], needs: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    """dx0, du, dv and db, each empty unless needed."""
    if not _is_fused(u, activation, diag_scale):
        return layers_of_products.backward(LAYERS, dy, x0, u, v, b, activation, diag_scale, kept, needs)
    return _fused_bwd(dy, x0, u, v, b, kept[0], needs)


def _fused_fwd(x0: Tensor, u: Tensor, v: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor]:
    (M, N), (L, _, R), x = x0.shape, u.shape, empty_rows(x0)
    s, beta, up, down = x0.new_empty((L, M, R)), _betas(u, b), padded(u), padded(v).transpose(1, 2)
    if M == 0:
        return x, s
    for layer in range(L):
        _shrink(x0, beta[layer], s, up, layer, down[layer], s[layer])
    constexprs = _constexprs(R, 64, 64, x0, x)
    _cross_low_rank_fwd_kernel[(-(-M // constexprs["BLOCK_M"]), -(-N // constexprs["BLOCK_N"]))](
        x0, beta[L], s, up, x,
        M, N, R, L,
        x0.stride(0), s.stride(0), s.stride(1), up.stride(0), up.stride(1), x.stride(0),
        **constexprs,
    )  # fmt: skip
    return x, s


def _fused_bwd(
    dy: Tensor, x0: Tensor, u: Tensor, v: Tensor, b: Tensor | None, s: Tensor, needs: Sequence[bool]
) -> list[Tensor]:
    (M, N), (L, _, R), none = x0.shape, u.shape, x0.new_empty(0)
    ds, up, down = s.new_empty(s.shape), padded(u), padded(v).transpose(1, 2)
    for layer in reversed(range(L if M else 0)):
        _shrink(x0, dy, ds[layer + 1 :], down[layer + 1 :], L - 1 - layer, up[layer], ds[layer])
    dx0 = _dx0(dy, s, ds, up, down, b) if needs[0] else none
    if not any(needs[1:]):
        return [dx0, none, none, none]
    device = launch.hardware_of(x0.device)
    constexprs = _constexprs(R, 32, 16 if device.amd else 32, x0, dy)
    tiles = -(-N // constexprs["BLOCK_N"])
    parts = max(1, min(2 * device.processors // (tiles * L), M // 128))
    sums, db_sums = (x0.new_empty((parts, L, N, *last), dtype=torch.float32) for last in ((2, R), ()))
    _cross_low_rank_sums_kernel[(tiles, L, parts)](
        x0, dy, _betas(u, b), s, ds, up, down, sums, db_sums,
        M, N, R, L, down.shape[1],
        x0.stride(0), dy.stride(0), s.stride(0), s.stride(1), *up.stride()[:2], down.stride(0), down.stride(2),
        **constexprs,
    )  # fmt: skip
    total = sums.sum(0)
    found = total[:, :, 0], total[:, :, 1].transpose(1, 2), db_sums.sum(0)
    wanted = zip(found, (needs[1], needs[2], needs[3] and b is not None), strict=True)
    return [dx0, *(g.to(u.dtype).contiguous() if need else none for g, need in wanted)]


def _shrink(x0: Tensor, base: Tensor, s: Tensor, up: Tensor, layers: int, down: Tensor, out: Tensor) -> None:
    """out = (x0 ⊙ (base + Σ_j s_j up_jᵀ)) down: base (N,) or (M, N), up (…, N, R), down (N, R)."""
    (M, N), (_, R), by_row = x0.shape, out.shape, base.dim() == 2
    processors = launch.hardware_of(x0.device).processors
    rows = next((rows for rows in (64, 32) if rows * processors <= M), 16)  # each processor has some
    constexprs = _constexprs(R, rows, 64, x0, *([base] if by_row else []))
    _cross_low_rank_shrink_kernel[(-(-M // constexprs["BLOCK_M"]),)](
        x0, base if by_row else None, None if by_row else base, s, up, down, out,
        M, N, R, layers, up.shape[1], down.shape[0],
        x0.stride(0), base.stride(0), s.stride(0), out.stride(0), *up.stride(), *down.stride(),
        **constexprs,
    )  # fmt: skip


def _dx0(dy: Tensor, s: Tensor, ds: Tensor, up: Tensor, down: Tensor, b: Tensor | None) -> Tensor:
    (M, N), (L, _, R), dx0 = dy.shape, s.shape, empty_rows(dy)
    if M:
        constexprs = _constexprs(R, 32 if launch.hardware_of(dy.device).amd else 64, 32, dy, dx0)
        _cross_low_rank_dx0_kernel[(-(-M // constexprs["BLOCK_M"]), -(-N // constexprs["BLOCK_N"]))](
            dy, s, ds, up, down, None if b is None else b.contiguous(), dx0,
            M, N, R, L, down.shape[1],
            dy.stride(0), s.stride(0), s.stride(1), *up.stride()[:2], down.stride(0), down.stride(2), dx0.stride(0),
            **constexprs,
        )  # fmt: skip
    return dx0


def _betas(u: Tensor, b: Tensor | None) -> Tensor:
    """β_l = 1 + Σ_{j<l} b_j, (L + 1, N)."""
    beta = u.new_ones((u.shape[0] + 1, u.shape[1]), dtype=torch.float32)
    return beta if b is None else torch.cat((beta[:1], b)).cumsum(0, dtype=torch.float32)


def _constexprs(R: int, rows: int, columns: int, *operands: Tensor) -> dict[str, Any]:
    """A tile of so many rows and columns with all of a row's numbers; loops over layers are too short to run ahead."""
    align, chosen = word(*operands), schedule(operands[0], rows)
    del chosen["BLOCK_K"]
    rest, block_r = int(operands[0].shape[1] % align > 0), max(16, triton.next_power_of_2(R))
    if launch.hardware_of(operands[0].device).amd:
        chosen["num_warps"] = 4  # with 8 it spills, or Triton's compiler (3.7) does not terminate
    return {**chosen, "ALIGN": align, "REST": rest, "BLOCK_N": columns, "BLOCK_R": block_r, "num_stages": 1}
