"""Triton: the elementwise steps of DCN-V2's layers between PyTorch's GEMMs, for the layers whose GEMMs are cuBLAS's.

    product    h = f(u + b) + diag x;  y = x0 h + x
               du = g x0 f'(u + b);  dx0 = g h;  g <- g (1 + diag x0);  db = Σ_rows du
    experts    p = softmax(logits + c);  h_k <- f(h_k);  q_k = p_k h_k
               dp_k = dq_k·h_k;  dh_k = p_k dq_k f'(h_k);  dlogits_k = p_k (dp_k - Σ_j p_j dp_j)
    FCN        n = (h - mean) / σ, m = relu(w n + c);  z = [h, h m] + b;  y = e z + x,  e = x0, or x if exponential
               dz = g e, dm = h dz_2 [m > 0], dn = w dm;
               dh = dz_1 + m dz_2 + (dn - mean(dn) - n mean(n dn)) / σ;  de = g z;
               db = Σ_rows dz;  dw = Σ_rows n dm;  dc = Σ_rows dm

Each is one pass, with arithmetic in float32. Per row, in units of d elements: product 3 reads + 1 write, backward 4 + 2
(one read less in the last layer, one read and a write more with a diagonal); experts, of K r elements, 1 + 2 and 2 + 1;
FCN 2.5 reads + 1 write, backward 3.5 + 1.5. Sums over rows are partial sums of persistent programs, added in order. A
program holds FCN's whole rows, for their mean, which is slow for many thousands of columns.
"""

import functools
import sys
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastcross.kernels import layers_of_products
from fastcross.kernels.gpu import launch
from fastcross.kernels.gpu.recurrence import word
from fastcross.kernels.gpu.tiles import load_rows, store_rows

ELEMENTS = 2048  # of a program's tile


@triton.jit
def _activated(v, F: tl.constexpr):
    """f(v). tanh is (1 - e) / (1 + e) of e = exp(-2 |v|), with the sign of v."""
    if F == "relu":
        v = tl.where(v < 0, 0.0, v)
    elif F == "tanh":
        e = tl.exp(-2 * tl.abs(v))
        size = (1 - e) / (1 + e)
        v = tl.where(v < 0, -size, size)
    return v


@triton.jit
def _slope(e, F: tl.constexpr):
    """f'(v), given e = f(v)."""
    if F == "relu":
        slope = tl.where(e > 0, 1.0, 0.0)
    elif F == "tanh":
        slope = 1 - e * e
    else:
        slope = tl.full(e.shape, 1.0, tl.float32)
    return slope


@triton.jit
def _bias(b_ptr, offs_n, N):
    if b_ptr is None:
        return tl.zeros(offs_n.shape, tl.float32)[None, :]
    else:
        return tl.load(b_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["M"])
def _product_fwd_kernel(
    # pointers
    x0_ptr, u_ptr, b_ptr, x_ptr, y_ptr,
    # sizes
    M, N, diag,
    # strides
    stride_x0_m, stride_u_m, stride_x_m, stride_y_m,
    # constexprs
    F: tl.constexpr, ALIGN: tl.constexpr, REST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    first = tl.program_id(1) * BLOCK_N

    x0 = load_rows(x0_ptr, offs_m, mask_m, first, N, stride_x0_m, tl.float32, ALIGN, REST, BLOCK_N, 1)[0]
    u = load_rows(u_ptr, offs_m, mask_m, first, N, stride_u_m, tl.float32, ALIGN, REST, BLOCK_N, 1)[0]
    x = load_rows(x_ptr, offs_m, mask_m, first, N, stride_x_m, tl.float32, ALIGN, REST, BLOCK_N, 1)[0]

    h = _activated(u + _bias(b_ptr, first + tl.arange(0, BLOCK_N), N), F) + diag * x
    y = x0 * h + x

    store_rows(y_ptr, (y,), offs_m, mask_m, first, N, stride_y_m, ALIGN, REST, BLOCK_N, 1)


def product_fwd(x0: Tensor, u: Tensor, b: Tensor | None, x: Tensor, f: str, diag: float, y: Tensor) -> None:
    """y = x0 (f(u + b) + diag x) + x; y may be u or x."""
    (M, N), constexprs = x0.shape, _tile(x0, u, x, y)
    if M:
        _product_fwd_kernel[(-(-M // constexprs["BLOCK_M"]), -(-N // constexprs["BLOCK_N"]))](
            x0, u, b, x, y,
            M, N, float(diag),
            x0.stride(0), u.stride(0), x.stride(0), y.stride(0),
            F=f, **constexprs,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def _product_bwd_kernel(
    # pointers
    g_ptr, x0_ptr, u_ptr, b_ptr, x_ptr, du_ptr, dx0_ptr, sums_ptr,
    # sizes
    M, N, diag,
    # strides
    stride_g_m, stride_x0_m, stride_u_m, stride_x_m, stride_du_m, stride_dx0_m,
    # constexprs
    F: tl.constexpr, DIAGONAL: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    ALIGN: tl.constexpr, REST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(1) * BLOCK_N
    offs_n = first + tl.arange(0, BLOCK_N)
    b = _bias(b_ptr, offs_n, N)

    db = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tile_m in range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        offs_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        mask_m = offs_m < M
        g = load_rows(g_ptr, offs_m, mask_m, first, N, stride_g_m, tl.float32, ALIGN, REST, BLOCK_N, 1)[0]
        x0 = load_rows(x0_ptr, offs_m, mask_m, first, N, stride_x0_m, tl.float32, ALIGN, REST, BLOCK_N, 1)[0]
        u = load_rows(u_ptr, offs_m, mask_m, first, N, stride_u_m, tl.float32, ALIGN, REST, BLOCK_N, 1)[0]

        e = _activated(u + b, F)
        du = g * x0 * _slope(e, F)
        db += du
        dx0 = g * e
        if DIAGONAL:
            x = load_rows(x_ptr, offs_m, mask_m, first, N, stride_x_m, tl.float32, ALIGN, REST, BLOCK_N, 1)[0]
            dx0 += g * (diag * x)
            g += g * (diag * x0)
            store_rows(g_ptr, (g,), offs_m, mask_m, first, N, stride_g_m, ALIGN, REST, BLOCK_N, 1)

        store_rows(du_ptr, (du,), offs_m, mask_m, first, N, stride_du_m, ALIGN, REST, BLOCK_N, 1)
        if dx0_ptr is not None:
            if not FIRST:
                dx0 += load_rows(dx0_ptr, offs_m, mask_m, first, N, stride_dx0_m, tl.float32, ALIGN, REST, BLOCK_N, 1)[
                    0
                ]
            if LAST:
                dx0 += g
            store_rows(dx0_ptr, (dx0,), offs_m, mask_m, first, N, stride_dx0_m, ALIGN, REST, BLOCK_N, 1)

    if sums_ptr is not None:
        tl.store(sums_ptr + tl.program_id(0).to(tl.int64) * N + offs_n, tl.sum(db, 0), mask=offs_n < N)


def product_bwd(
    g: Tensor, x0: Tensor, u: Tensor, b: Tensor | None, x: Tensor, f: str, diag: float,
    du: Tensor, dx0: Tensor | None, db: Tensor | None, first: bool, last: bool,
) -> None:  # fmt: skip
    """du = g x0 f'(u + b), which may be u; dx0 = g h, added unless ``first``, with g if ``last``; db += Σ_rows du."""
    (M, N), constexprs = x0.shape, _tile(*(t for t in (g, x0, u, x, du, dx0) if t is not None))
    if M == 0:
        return
    programs, blocks = _programs(M, N, x0, constexprs)
    sums = None if db is None else x0.new_empty((programs, N), dtype=torch.float32)
    _product_bwd_kernel[(programs, blocks)](
        g, x0, u, b, x, du, dx0, sums,
        M, N, float(diag),
        g.stride(0), x0.stride(0), u.stride(0), x.stride(0), du.stride(0), 0 if dx0 is None else dx0.stride(0),
        F=f, DIAGONAL=diag != 0, FIRST=first, LAST=last, **constexprs,
    )  # fmt: skip
    if db is not None and sums is not None:
        db += sums.sum(0)


def activate_fwd(a: Tensor, f: str, e: Tensor) -> None:
    """e = f(a), a kernel of PyTorch's: a (M, K r), e (K, M, r)."""
    a = _by_expert(a, e)
    if f == "tanh":
        torch.tanh(a, out=e)
    elif f == "relu":
        torch.clamp_min(a, 0, out=e)
    else:
        e.copy_(a)


def activate_bwd(de: Tensor, e: Tensor, f: str, da: Tensor) -> None:
    """da = de f', given e = f(a): de, e (K, M, r), da (M, K r)."""
    da = _by_expert(da, e)
    if f == "tanh":
        torch.ops.aten.tanh_backward.grad_input(de, e, grad_input=da)
    elif f == "relu":
        torch.ops.aten.threshold_backward.grad_input(de, e, 0, grad_input=da)
    else:
        da.copy_(de)


def _by_expert(a: Tensor, e: Tensor) -> Tensor:
    """(M, K r) as (K, M, r), like e; a view."""
    return a.unflatten(1, (e.shape[0], e.shape[2])).transpose(0, 1)


@triton.jit
def _softmax(logits_ptr, c_ptr, offs_m, mask_m, offs_k, K, stride_logits_m):
    """p (BLOCK_M, BLOCK_K), zero beyond K; ones for one expert without a gate."""
    if logits_ptr is None:
        return tl.where(mask_m[:, None] & (offs_k < K)[None, :], 1.0, 0.0)
    else:
        mask = mask_m[:, None] & (offs_k < K)[None, :]
        ptrs = logits_ptr + offs_m.to(tl.int64)[:, None] * stride_logits_m + offs_k[None, :]
        logits = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32) + _bias(c_ptr, offs_k, K)
        logits = tl.where((offs_k < K)[None, :], logits, -float("inf"))
        e = tl.exp(logits - tl.max(logits, 1)[:, None])
        return e / tl.sum(e, 1)[:, None]


@triton.jit(do_not_specialize=["M"])
def _experts_fwd_kernel(
    # pointers
    h_ptr, logits_ptr, c_ptr, q_ptr,
    # sizes
    M, K, R,
    # strides
    stride_logits_m, stride_q_m,
    # constexprs
    F: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    rows = offs_m.to(tl.int64)[:, None]
    offs_k = tl.arange(0, BLOCK_K)

    p = _softmax(logits_ptr, c_ptr, offs_m, mask_m, offs_k, K, stride_logits_m)
    for k in range(K):
        p_k = tl.sum(tl.where(offs_k[None, :] == k, p, 0.0), 1)[:, None]
        for first in range(0, R, BLOCK_R):
            offs_r = first + tl.arange(0, BLOCK_R)[None, :]
            mask = mask_m[:, None] & (offs_r < R)
            h_ptrs = h_ptr + (k * M.to(tl.int64) + rows) * R + offs_r
            h = _activated(tl.load(h_ptrs, mask=mask, other=0.0).to(tl.float32), F)
            tl.store(h_ptrs, h, mask=mask)
            tl.store(q_ptr + rows * stride_q_m + k * R + offs_r, p_k * h, mask=mask)


def experts_fwd(h: Tensor, logits: Tensor | None, gate_bias: Tensor | None, f: str, q: Tensor) -> None:
    """h_k <- f(h_k), q_k = softmax(logits + c)_k h_k: h (K, M, r), logits (M, K), q (M, K r)."""
    K, M, R = h.shape
    if M:
        constexprs = _expert_tile(K, R)
        _experts_fwd_kernel[(-(-M // constexprs["BLOCK_M"]),)](
            h, logits, gate_bias, q,
            M, K, R,
            0 if logits is None else logits.stride(0), q.stride(0),
            F=f, **constexprs,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def _experts_bwd_kernel(
    # pointers
    dq_ptr, h_ptr, logits_ptr, c_ptr, dh_ptr, dlogits_ptr,
    # sizes
    M, K, R,
    # strides
    stride_dq_m, stride_logits_m, stride_dlogits_m,
    # constexprs
    F: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    rows = offs_m.to(tl.int64)[:, None]
    offs_k = tl.arange(0, BLOCK_K)

    p = _softmax(logits_ptr, c_ptr, offs_m, mask_m, offs_k, K, stride_logits_m)
    dp = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for k in range(K):
        p_k = tl.sum(tl.where(offs_k[None, :] == k, p, 0.0), 1)[:, None]
        dp_k = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for first in range(0, R, BLOCK_R):
            offs_r = first + tl.arange(0, BLOCK_R)[None, :]
            mask = mask_m[:, None] & (offs_r < R)
            places = (k * M.to(tl.int64) + rows) * R + offs_r
            h = tl.load(h_ptr + places, mask=mask, other=0.0).to(tl.float32)
            dq = tl.load(dq_ptr + rows * stride_dq_m + k * R + offs_r, mask=mask, other=0.0).to(tl.float32)
            dp_k += dq * h
            tl.store(dh_ptr + places, p_k * dq * _slope(h, F), mask=mask)
        dp = tl.where(offs_k[None, :] == k, tl.sum(dp_k, 1)[:, None], dp)

    if dlogits_ptr is not None:
        dlogits = p * (dp - tl.sum(p * dp, 1)[:, None])
        ptrs = dlogits_ptr + rows * stride_dlogits_m + offs_k[None, :]
        tl.store(ptrs, dlogits, mask=mask_m[:, None] & (offs_k < K)[None, :])


def experts_bwd(
    dq: Tensor, h: Tensor, logits: Tensor | None, gate_bias: Tensor | None, f: str, dh: Tensor, dlogits: Tensor | None
) -> None:
    """dh_k = p_k dq_k f';  dlogits_k = p_k (dp_k - Σ_j p_j dp_j),  dp_k = dq_k·h_k; h is activated."""
    K, M, R = h.shape
    if M:
        constexprs = _expert_tile(K, R)
        _experts_bwd_kernel[(-(-M // constexprs["BLOCK_M"]),)](
            dq, h, logits, gate_bias, dh, dlogits,
            M, K, R,
            dq.stride(0), 0 if logits is None else logits.stride(0), 0 if dlogits is None else dlogits.stride(0),
            F=f, **constexprs,
        )  # fmt: skip


@triton.jit
def _normal(h, mask_m, mask_n, half, eps):
    """n = (h - mean) / σ and 1 / σ of each row; 0 and 1 of what is none."""
    centred = tl.where(mask_n, h - (tl.sum(h, 1) / half)[:, None], 0.0)
    variance = tl.where(mask_m, tl.sum(centred * centred, 1) / half + eps, 1.0)
    scale = 1 / tl.sqrt(variance)[:, None]
    return centred * scale, scale


@triton.jit(do_not_specialize=["M"])
def _fcn_fwd_kernel(
    # pointers
    e_ptr, h_ptr, b_ptr, w_ptr, c_ptr, x_ptr, y_ptr,
    # sizes
    M, half, eps,
    # strides
    stride_e_m, stride_h_m, stride_x_m, stride_y_m,
    # constexprs
    ALIGN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    offs_n = tl.arange(0, BLOCK_N)
    second = half // ALIGN * ALIGN

    h = load_rows(h_ptr, offs_m, mask_m, 0, half, stride_h_m, tl.float32, ALIGN, 0, BLOCK_N, 1)[0]
    n, _ = _normal(h, mask_m, (offs_n < half)[None, :], half, eps)
    m = _activated(n * _bias(w_ptr, offs_n, half) + _bias(c_ptr, offs_n, half), "relu")

    e = load_rows(e_ptr, offs_m, mask_m, 0, half, stride_e_m, tl.float32, ALIGN, 0, BLOCK_N, 1)[0]
    x = load_rows(x_ptr, offs_m, mask_m, 0, half, stride_x_m, tl.float32, ALIGN, 0, BLOCK_N, 1)[0]
    y = e * (h + _bias(b_ptr, offs_n, half)) + x
    store_rows(y_ptr, (y,), offs_m, mask_m, 0, half, stride_y_m, ALIGN, 0, BLOCK_N, 1)

    e = load_rows(e_ptr + second, offs_m, mask_m, 0, half, stride_e_m, tl.float32, ALIGN, 0, BLOCK_N, 1)[0]
    x = load_rows(x_ptr + second, offs_m, mask_m, 0, half, stride_x_m, tl.float32, ALIGN, 0, BLOCK_N, 1)[0]
    y = e * (h * m + _bias(b_ptr + half, offs_n, half)) + x
    store_rows(y_ptr + second, (y,), offs_m, mask_m, 0, half, stride_y_m, ALIGN, 0, BLOCK_N, 1)


def fcn_fwd(
    x0: Tensor,
    h: Tensor,
    b: Tensor,
    norm_w: Tensor,
    norm_b: Tensor,
    x: Tensor,
    exponential: bool,
    eps: float,
    y: Tensor,
) -> None:
    """y = e ([h, h m] + b) + x with m = relu(LayerNorm(h)); e is x0, or x if exponential. y may be x."""
    (M, half), e = h.shape, x if exponential else x0
    if M:
        constexprs = _row_tile(half, e, h, x, y)
        _fcn_fwd_kernel[(-(-M // constexprs["BLOCK_M"]),)](
            e, h, b, norm_w, norm_b, x, y,
            M, half, float(eps),
            e.stride(0), h.stride(0), x.stride(0), y.stride(0),
            **constexprs,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def _fcn_bwd_kernel(
    # pointers
    g_ptr, e_ptr, h_ptr, b_ptr, w_ptr, c_ptr, dh_ptr, to_ptr, sums_ptr,
    # sizes
    M, half, eps,
    # strides
    stride_g_m, stride_e_m, stride_h_m, stride_dh_m, stride_to_m,
    # constexprs
    ADD: tl.constexpr, WITH_G: tl.constexpr, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """``to`` takes g z, with g WITH_G, and is added to if ADD; sums are those of b, then of w and of c."""
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = (offs_n < half)[None, :]
    second = half // ALIGN * ALIGN
    w = _bias(w_ptr, offs_n, half)

    db_1 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    db_2 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    dc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tile_m in range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        offs_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        mask_m = offs_m < M
        h = load_rows(h_ptr, offs_m, mask_m, 0, half, stride_h_m, tl.float32, ALIGN, 0, BLOCK_N, 1)[0]
        n, scale = _normal(h, mask_m, mask_n, half, eps)
        m = _activated(n * w + _bias(c_ptr, offs_n, half), "relu")

        g = load_rows(g_ptr, offs_m, mask_m, 0, half, stride_g_m, tl.float32, ALIGN, 0, BLOCK_N, 1)[0]
        e = load_rows(e_ptr, offs_m, mask_m, 0, half, stride_e_m, tl.float32, ALIGN, 0, BLOCK_N, 1)[0]
        dh = g * e
        db_1 += dh
        if to_ptr is not None:
            to = g * (h + _bias(b_ptr, offs_n, half) + WITH_G)
            if ADD:
                to += load_rows(to_ptr, offs_m, mask_m, 0, half, stride_to_m, tl.float32, ALIGN, 0, BLOCK_N, 1)[0]
            store_rows(to_ptr, (to,), offs_m, mask_m, 0, half, stride_to_m, ALIGN, 0, BLOCK_N, 1)

        g = load_rows(g_ptr + second, offs_m, mask_m, 0, half, stride_g_m, tl.float32, ALIGN, 0, BLOCK_N, 1)[0]
        e = load_rows(e_ptr + second, offs_m, mask_m, 0, half, stride_e_m, tl.float32, ALIGN, 0, BLOCK_N, 1)[0]
        dz = g * e
        db_2 += dz
        dm = tl.where(m > 0, dz * h, 0.0)
        dw += n * dm
        dc += dm
        dn = w * dm
        mean, mean_product = (tl.sum(dn, 1) / half)[:, None], (tl.sum(n * dn, 1) / half)[:, None]
        dh += m * dz + scale * (dn - mean - n * mean_product)
        store_rows(dh_ptr, (dh,), offs_m, mask_m, 0, half, stride_dh_m, ALIGN, 0, BLOCK_N, 1)
        if to_ptr is not None:
            to = g * (h * m + _bias(b_ptr + half, offs_n, half) + WITH_G)
            to_ptrs = to_ptr + second
            if ADD:
                to += load_rows(to_ptrs, offs_m, mask_m, 0, half, stride_to_m, tl.float32, ALIGN, 0, BLOCK_N, 1)[0]
            store_rows(to_ptrs, (to,), offs_m, mask_m, 0, half, stride_to_m, ALIGN, 0, BLOCK_N, 1)

    sums_ptrs = sums_ptr + tl.program_id(0).to(tl.int64) * (4 * half) + offs_n
    tl.store(sums_ptrs, tl.sum(db_1, 0), mask=offs_n < half)
    tl.store(sums_ptrs + half, tl.sum(db_2, 0), mask=offs_n < half)
    tl.store(sums_ptrs + 2 * half, tl.sum(dw, 0), mask=offs_n < half)
    tl.store(sums_ptrs + 3 * half, tl.sum(dc, 0), mask=offs_n < half)


def fcn_bwd(
    g: Tensor, x0: Tensor, h: Tensor, b: Tensor, norm_w: Tensor, norm_b: Tensor, x: Tensor, exponential: bool,
    eps: float, dh: Tensor, dx0: Tensor | None, sums: Tensor, first: bool, last: bool,
) -> None:  # fmt: skip
    """dh; what e has of the gradient, to dx0, or of an exponential network to g; sums += [db, dw, dc]."""
    (M, half), e = h.shape, x if exponential else x0
    if M == 0:
        return
    to = g if exponential and not last else dx0
    constexprs = _row_tile(half, *(t for t in (g, e, h, dh, to) if t is not None))
    programs, _ = _programs(M, half, x0, constexprs)
    parts = x0.new_empty((programs, 4 * half), dtype=torch.float32)
    _fcn_bwd_kernel[(programs,)](
        g, e, h, b, norm_w, norm_b, dh, to, parts,
        M, half, float(eps),
        g.stride(0), e.stride(0), h.stride(0), dh.stride(0), 0 if to is None else to.stride(0),
        ADD=not (exponential or first), WITH_G=float(exponential or last), **constexprs,
    )  # fmt: skip
    sums += parts.sum(0)


def with_steps(kind: type) -> type:
    """Layers of ``kernels/layers_of_products.py`` with these steps in place of the CPU's."""
    return type(kind.__name__, (kind,), {"steps": sys.modules[__name__]})


def _tile(*rows: Tensor) -> dict[str, Any]:
    N, align = rows[0].shape[1], word(*rows)
    block = min(256, triton.next_power_of_2(N))
    return {"ALIGN": align, "REST": int(N % align > 0), "BLOCK_M": ELEMENTS // block, "BLOCK_N": block, "num_warps": 4}


def _row_tile(half: int, *rows: Tensor) -> dict[str, Any]:
    """Whole rows; the second half of each is as well aligned as the first."""
    align, block = word(*rows), triton.next_power_of_2(half)
    while half % align:
        align //= 2
    warps = 4 if block <= 512 else 8 if block <= 1024 else 16
    return {"ALIGN": align, "BLOCK_M": max(1, ELEMENTS // 2 // block), "BLOCK_N": block, "num_warps": warps}


def _programs(M: int, N: int, x: Tensor, constexprs: dict[str, Any]) -> tuple[int, int]:
    """Persistent programs, four to a processor, and blocks of columns."""
    blocks, tiles = -(-N // constexprs["BLOCK_N"]), -(-M // constexprs["BLOCK_M"])
    return max(1, min(tiles, 4 * launch.hardware_of(x.device).processors // blocks)), blocks


def _expert_tile(K: int, R: int) -> dict[str, Any]:
    block = min(64, triton.next_power_of_2(R))
    block_k = triton.next_power_of_2(K)
    return {
        "BLOCK_M": max(1, ELEMENTS // 2 // max(block, block_k)),
        "BLOCK_K": block_k,
        "BLOCK_R": block,
        "num_warps": 4,
    }


cross_mixture_fwd = functools.partial(layers_of_products.forward, with_steps(layers_of_products.Mixture))
cross_mixture_bwd = functools.partial(layers_of_products.backward, with_steps(layers_of_products.Mixture))
cross_fcn_fwd = functools.partial(layers_of_products.forward, with_steps(layers_of_products.Fcn))
cross_fcn_bwd = functools.partial(layers_of_products.backward, with_steps(layers_of_products.Fcn))
