"""Triton: DCN-V2's matrix layers and GDCN's gated layers, forward and backward.

    matrix     x_{l+1} = x0 ⊙ (W_l x_l + b_l) + x_l
    gated      x_{l+1} = x0 ⊙ (W_l x_l + b_l) ⊙ σ(G_l x_l) + x_l

Every x_l is x0 ⊙ y_l, and every dL/dx_l is T_l, with

    y_0 = 1,   y_{l+1} = y_l + (x0 ⊙ y_l) W_lᵀ + b_l                 gated: y_l + u ⊙ s, u = W x_l + b_l, s = σ(G x_l)
    T_L = dy,  T_l = T_{l+1} + (x0 ⊙ T_{l+1}) W_l                    gated: T_{l+1} + du W_l + dt G_l

    dx0 = T_0 + Σ_l T_{l+1} ⊙ (y_{l+1} - y_l)
    dW_l = duᵀ x_l,  db_l = Σ_rows du,  du = x0 ⊙ T_{l+1}            gated: du = x0 ⊙ T_{l+1} ⊙ s,  dG_l = dtᵀ x_l,
                                                                     dt = x0 ⊙ T_{l+1} ⊙ u ⊙ s (1 - s)

so that one GEMM kernel, whose prologue multiplies by x0, takes the matrix layers forward and, with W transposed and T
for y, backward. Kept for the backward pass: y_1 … y_L. Per row, in units of d elements, each layer: forward 2 reads +
1 write (the last one writes y beside x); backward 2 + 1 for T, 3 for dW, 2 for dx0. The gated layers' backward
pass computes u and s again: 3 + 2 for [du, dt], 3 + 1 for T, 4 for the weights, 2 for dx0. The tiles of a GEMM that
read the same rows run side by side, and find them in L2.

Half precision and, where PyTorch allows it, tf32 run on tensor cores. float32 in full precision does not (nor does
bfloat16 on sm_75): such a GEMM is bound by arithmetic from d = 100 on, and cuBLAS may well be faster.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fastcross.kernels.gpu import launch
from fastcross.kernels.gpu.launch import Hardware
from fastcross.kernels.gpu.recurrence import word
from fastcross.kernels.gpu.tiles import load_rows, row_offsets, store_rows
from fastcross.kernels.layout import empty_rows, stride_like


@triton.jit
def _gemm(
    a_ptr, x0_ptr, w_ptr, offs_m, mask_m, offs_n, mask_n, K, stride_a_m, stride_x0_m, stride_w_n, stride_w_k, stride_g,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """(a [⊙ x0]) Wᵀ, and (a [⊙ x0]) Gᵀ if there is a G, which is ``stride_g`` after W.

    Whole vectors of a row use the tensor cores; each column after the last whole vector is an outer product.
    """
    offs_k = tl.arange(0, BLOCK_K)
    aligned = K // ALIGN * ALIGN
    a_ptrs = a_ptr + row_offsets(offs_m, stride_a_m, ALIGN)
    w_ptrs = w_ptr + offs_n.to(tl.int64)[None, :] * stride_w_n
    k_ptrs = w_ptrs + offs_k.to(tl.int64)[:, None] * stride_w_k
    if x0_ptr is not None:
        x0_ptrs = x0_ptr + row_offsets(offs_m, stride_x0_m, ALIGN)
    u = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    t = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)

    for first in range(0, aligned, BLOCK_K):
        mask_k = offs_k < aligned - first
        mask_a, mask_w = mask_m[:, None] & mask_k[None, :], mask_n[None, :] & mask_k[:, None]
        a = tl.load(a_ptrs + (first + offs_k)[None, :], mask=mask_a, other=0.0)
        if x0_ptr is not None:
            x0 = tl.load(x0_ptrs + (first + offs_k)[None, :], mask=mask_a, other=0.0)
            a = a.to(tl.float32) * x0.to(tl.float32)
        w = tl.load(k_ptrs, mask=mask_w, other=0.0)
        u = tl.dot(a.to(DTYPE), w.to(DTYPE), u, input_precision=PRECISION)
        if stride_g is not None:
            g = tl.load(k_ptrs + stride_g, mask=mask_w, other=0.0)
            t = tl.dot(a.to(DTYPE), g.to(DTYPE), t, input_precision=PRECISION)
        k_ptrs += BLOCK_K * stride_w_k

    for k in range(aligned, K):
        column = tl.load(a_ptrs + k, mask=mask_m[:, None], other=0.0).to(tl.float32)
        if x0_ptr is not None:
            column *= tl.load(x0_ptrs + k, mask=mask_m[:, None], other=0.0).to(tl.float32)
        column = column.to(DTYPE).to(tl.float32)
        last_ptrs = w_ptrs + (tl.zeros((1, 1), tl.int64) + k) * stride_w_k
        u += column * tl.load(last_ptrs, mask=mask_n[None, :], other=0.0).to(tl.float32)
        if stride_g is not None:
            t += column * tl.load(last_ptrs + stride_g, mask=mask_n[None, :], other=0.0).to(tl.float32)
    return u, t


@triton.jit
def _tile(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows and columns of a program; the programs of the same rows are neighbours."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    offs_m = tl.program_id(0) // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    return offs_m, offs_m < M, tl.program_id(0) % tiles_n * BLOCK_N


@triton.jit(do_not_specialize=["M"])
def _multiply_kernel(
    # pointers
    a_ptr, x0_ptr, w_ptr, b_ptr, m_ptr, c_ptr, out_ptr, z_ptr,
    # sizes
    M, N, K, columns,
    # strides
    stride_a_m, stride_x0_m, stride_w_n, stride_w_k, stride_m_m, stride_c_m, stride_out_m, stride_z_m,
    # constexprs
    BASE: tl.constexpr, SCALED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    ALIGN: tl.constexpr, REST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out = BASE + c + m ⊙ (a Wᵀ + b), with a ⊙ x0 for a where SCALED; z = x0 ⊙ out."""
    offs_m, mask_m, first = _tile(M, N, BLOCK_M, BLOCK_N)
    offs_n = first + tl.arange(0, BLOCK_N)

    out, _ = _gemm(
        a_ptr, x0_ptr if SCALED else None, w_ptr, offs_m, mask_m, offs_n, offs_n < columns, K,
        stride_a_m, stride_x0_m, stride_w_n, stride_w_k, None, DTYPE, PRECISION, ALIGN, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip

    if b_ptr is not None:
        out += tl.load(b_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    if m_ptr is not None:
        out *= load_rows(m_ptr, offs_m, mask_m, first, N, stride_m_m, tl.float32, ALIGN, REST, BLOCK_N, 1)[0]
    if c_ptr is not None:
        out += load_rows(c_ptr, offs_m, mask_m, first, N, stride_c_m, tl.float32, ALIGN, REST, BLOCK_N, 1)[0]
    out += BASE

    if out_ptr is not None:
        store_rows(out_ptr, (out,), offs_m, mask_m, first, N, stride_out_m, ALIGN, REST, BLOCK_N, 1)
    if z_ptr is not None:
        x0 = load_rows(x0_ptr, offs_m, mask_m, first, N, stride_x0_m, tl.float32, ALIGN, REST, BLOCK_N, 1)[0]
        store_rows(z_ptr, (x0 * out,), offs_m, mask_m, first, N, stride_z_m, ALIGN, REST, BLOCK_N, 1)


@triton.jit(do_not_specialize=["M"])
def _cross_gated_fwd_kernel(
    # pointers
    y_ptr, x0_ptr, w_ptr, b_ptr, out_ptr, z_ptr,
    # sizes
    M, N,
    # strides
    stride_y_m, stride_x0_m, stride_w_n, stride_g, stride_out_m, stride_z_m,
    # constexprs
    FIRST: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    ALIGN: tl.constexpr, REST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out = y + (W x + b) ⊙ σ(G x),  x = x0 ⊙ y;  z = x0 ⊙ out. FIRST: y is 1 and not read."""
    offs_m, mask_m, first = _tile(M, N, BLOCK_M, BLOCK_N)
    offs_n = first + tl.arange(0, BLOCK_N)

    u, t = _gemm(
        x0_ptr, None if FIRST else y_ptr, w_ptr, offs_m, mask_m, offs_n, offs_n < N, N,
        stride_x0_m, stride_y_m, stride_w_n, 1, stride_g, DTYPE, PRECISION, ALIGN, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip

    if b_ptr is not None:
        u += tl.load(b_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    out = u * tl.sigmoid(t)
    if FIRST:
        out += 1.0
    else:
        out += load_rows(y_ptr, offs_m, mask_m, first, N, stride_y_m, tl.float32, ALIGN, REST, BLOCK_N, 1)[0]

    if out_ptr is not None:
        store_rows(out_ptr, (out,), offs_m, mask_m, first, N, stride_out_m, ALIGN, REST, BLOCK_N, 1)
    if z_ptr is not None:
        x0 = load_rows(x0_ptr, offs_m, mask_m, first, N, stride_x0_m, tl.float32, ALIGN, REST, BLOCK_N, 1)[0]
        store_rows(z_ptr, (x0 * out,), offs_m, mask_m, first, N, stride_z_m, ALIGN, REST, BLOCK_N, 1)


@triton.jit(do_not_specialize=["M"])
def _cross_gated_bwd_kernel(
    # pointers
    y_ptr, x0_ptr, w_ptr, b_ptr, dx_ptr, du_ptr, dt_ptr,
    # sizes
    M, N, columns,
    # strides
    stride_y_m, stride_x0_m, stride_w_n, stride_g, stride_dx_m, stride_du_m,
    # constexprs
    FIRST: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    ALIGN: tl.constexpr, REST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """du = dy ⊙ s;  dt = dy ⊙ u ⊙ s (1 - s);  dy = x0 ⊙ T_{l+1}, and u = W x + b and s = σ(G x) computed again.

    du and dt are zero from column N to the last one.
    """
    offs_m, mask_m, first = _tile(M, N, BLOCK_M, BLOCK_N)
    offs_n = first + tl.arange(0, BLOCK_N)

    u, t = _gemm(
        x0_ptr, None if FIRST else y_ptr, w_ptr, offs_m, mask_m, offs_n, offs_n < N, N,
        stride_x0_m, stride_y_m, stride_w_n, 1, stride_g, DTYPE, PRECISION, ALIGN, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip

    if b_ptr is not None:
        u += tl.load(b_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    s = tl.sigmoid(t)
    dy = load_rows(x0_ptr, offs_m, mask_m, first, N, stride_x0_m, tl.float32, ALIGN, REST, BLOCK_N, 1)[0]
    dy *= load_rows(dx_ptr, offs_m, mask_m, first, N, stride_dx_m, tl.float32, ALIGN, REST, BLOCK_N, 1)[0]

    # dy is zero beyond N.
    store_rows(du_ptr, (dy * s,), offs_m, mask_m, first, columns, stride_du_m, ALIGN, 0, BLOCK_N, 1)
    store_rows(dt_ptr, (dy * u * s * (1 - s),), offs_m, mask_m, first, columns, stride_du_m, ALIGN, 0, BLOCK_N, 1)


@triton.jit(do_not_specialize=["M"])
def _weight_sums_kernel(
    # pointers
    g_ptr, a_ptr, x0_ptr, sums_ptr,
    # sizes
    M, N, K, columns,
    # strides
    stride_g_m, stride_a_m, stride_x0_m,
    # constexprs
    SCALED_G: tl.constexpr, SCALED_A: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    ALIGN: tl.constexpr, REST_N: tl.constexpr, REST_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Σ_rows (g [⊙ x0])ᵀ [a [⊙ x0], 1] over the rows of a part: dW, and db in column K."""
    tiles_k = tl.cdiv(columns, BLOCK_K)
    first_n, first_k = tl.program_id(0) // tiles_k * BLOCK_N, tl.program_id(0) % tiles_k * BLOCK_K
    offs_n, offs_k = first_n + tl.arange(0, BLOCK_N), first_k + tl.arange(0, BLOCK_K)
    part = tl.program_id(1)

    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for tile_m in range(part, tl.cdiv(M, BLOCK_M), tl.num_programs(1)):
        offs_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        mask_m = offs_m < M
        g = load_rows(g_ptr, offs_m, mask_m, first_n, N, stride_g_m, tl.float32, ALIGN, REST_N, BLOCK_N, 1)[0]
        if SCALED_G:
            g *= load_rows(x0_ptr, offs_m, mask_m, first_n, N, stride_x0_m, tl.float32, ALIGN, REST_N, BLOCK_N, 1)[0]
        a = load_rows(a_ptr, offs_m, mask_m, first_k, K, stride_a_m, tl.float32, ALIGN, REST_K, BLOCK_K, 1)[0]
        if SCALED_A:
            a *= load_rows(x0_ptr, offs_m, mask_m, first_k, K, stride_x0_m, tl.float32, ALIGN, REST_K, BLOCK_K, 1)[0]
        a = tl.where(offs_k[None, :] == K, 1.0, a)
        sums = tl.dot(tl.trans(g.to(DTYPE)), a.to(DTYPE), sums, input_precision=PRECISION)

    sums_ptr += (part.to(tl.int64) * N + offs_n[:, None]) * columns
    tl.store(sums_ptr + offs_k[None, :], sums, mask=(offs_n < N)[:, None] & (offs_k < columns)[None, :])


@triton.jit(do_not_specialize=["M", "L"])
def _dx0_kernel(
    # pointers
    dx_ptr, dy_ptr, y_ptr, dx0_ptr,
    # sizes
    M, N, L,
    # strides
    stride_dx_l, stride_dx_m, stride_dy_m, stride_y_l, stride_y_m, stride_dx0_m,
    # constexprs
    ALIGN: tl.constexpr, REST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dx0 = T_0 + Σ_l T_{l+1} ⊙ (y_{l+1} - y_l),  y_0 = 1;  dx: T_0 … T_{L-1}, dy: T_L, y: y_1 … y_L."""
    offs_m, mask_m, first = _tile(M, N, BLOCK_M, BLOCK_N)

    dx0 = load_rows(dx_ptr, offs_m, mask_m, first, N, stride_dx_m, tl.float32, ALIGN, REST, BLOCK_N, 1)[0]
    below = tl.full((BLOCK_M, BLOCK_N), 1.0, tl.float32)
    for _ in range(L - 1):
        dx_ptr += stride_dx_l // ALIGN * ALIGN
        dx = load_rows(dx_ptr, offs_m, mask_m, first, N, stride_dx_m, tl.float32, ALIGN, REST, BLOCK_N, 1)[0]
        y = load_rows(y_ptr, offs_m, mask_m, first, N, stride_y_m, tl.float32, ALIGN, REST, BLOCK_N, 1)[0]
        dx0 += dx * (y - below)
        below = y
        y_ptr += stride_y_l // ALIGN * ALIGN
    dy = load_rows(dy_ptr, offs_m, mask_m, first, N, stride_dy_m, tl.float32, ALIGN, REST, BLOCK_N, 1)[0]
    y = load_rows(y_ptr, offs_m, mask_m, first, N, stride_y_m, tl.float32, ALIGN, REST, BLOCK_N, 1)[0]
    dx0 += dy * (y - below)

    store_rows(dx0_ptr, (dx0,), offs_m, mask_m, first, N, stride_dx0_m, ALIGN, REST, BLOCK_N, 1)


def multiply(
    a: Tensor,
    w: Tensor,
    out: Tensor | None,
    z: Tensor | None = None,
    *,
    x0: Tensor | None = None,
    scaled: bool = False,
    b: Tensor | None = None,
    m: Tensor | None = None,
    c: Tensor | None = None,
    base: float = 0.0,
) -> None:
    """out = base + c + m ⊙ (a Wᵀ + b) for W (N, K), with a ⊙ x0 for a where ``scaled``; z = x0 ⊙ out."""
    (M, K), N = a.shape, w.shape[0]
    if M:
        rows = 128 if K <= N else 64  # of [du, dt], twice as wide, 128 spill on sm_86
        grid, constexprs = _launch(M, N, rows, a, x0, m, c, out, z)
        _multiply_kernel[grid](
            a, x0, w, b, m, c, out, z,
            M, N, K, w.stride(1) if w.stride(0) == 1 else N,
            a.stride(0), _stride(x0), *w.stride(), _stride(m), _stride(c), _stride(out), _stride(z),
            BASE=base, SCALED=scaled, **constexprs,
        )  # fmt: skip


def weight_sums(g: Tensor, a: Tensor, x0: Tensor | None = None, *, scaled: tuple[bool, bool]) -> Tensor:
    """Σ_rows gᵀ [a, 1], (N, K + 1), float32, from parts that are added in order; ``scaled``: g ⊙ x0, a ⊙ x0."""
    (M, N), K = g.shape, a.shape[1]
    columns = -(-(K + 1) // 16) * 16
    tiles = -(-N // 64) * -(-columns // 64)
    parts = max(1, min(launch.hardware_of(g.device).processors // tiles, M // 128))
    sums = g.new_empty((parts, N, columns), dtype=torch.float32)
    align, chosen = word(*[t for t in (g, a, x0) if t is not None]), schedule(g, 32)
    blocks = {"BLOCK_M": chosen.pop("BLOCK_K"), "BLOCK_N": 64, "BLOCK_K": 64}
    if scaled[0]:  # rows that are fetched ahead to shared memory; without, float32 spills on sm_89
        chosen["num_stages"] = max(chosen["num_stages"], 2)
    _weight_sums_kernel[(tiles, parts)](
        g, a, x0, sums,
        M, N, K, columns,
        g.stride(0), a.stride(0), _stride(x0),
        SCALED_G=scaled[0], SCALED_A=scaled[1], ALIGN=align, REST_N=int(N % align > 0), REST_K=int(K % align > 0),
        **chosen | blocks,
    )  # fmt: skip
    return (sums.sum(0) if parts > 1 else sums[0])[:, : K + 1]


def dot_dtype(x: Tensor) -> tl.dtype:
    """The dtype of the tensor cores' operands: that of the rows. Triton's interpreter reads bfloat16 as integers."""
    dtypes = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    return tl.float32 if x.device.type == "cpu" else dtypes[x.dtype]


def precision(x: Tensor, device: Hardware) -> str:
    """The precision of float32 products: tf32 if the device has it and PyTorch's setting allows it."""
    allowed = x.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if allowed and device.tf32 else "ieee"


def padded(w: Tensor) -> Tensor:
    """(…, N, K) padded with zeros to a multiple of 16 columns, for wide loads of W and of Wᵀ."""
    return F.pad(w, (0, -w.shape[-1] % 16)).contiguous()


def on_tensor_cores(x: Tensor) -> bool:
    """Whether Triton uses tensor cores for this dtype on the device; it does not on sm_75."""
    device = launch.hardware_of(x.device)
    return precision(x, device) == "tf32" or (x.element_size() == 2 and (device.tf32 or device.amd))


def schedule(x: Tensor, rows: int) -> dict[str, Any]:
    """A GEMM's schedule over rows like x: tiles of at most ``rows`` rows by 64 bytes, in 64 KB of shared memory."""
    device, fast = launch.hardware_of(x.device), on_tensor_cores(x)
    return {
        "DTYPE": dot_dtype(x),
        "PRECISION": precision(x, device),
        "BLOCK_M": rows if fast else min(rows, 64),
        "BLOCK_K": 64 // x.element_size() if fast else 16,
        "num_warps": 8,
        "num_stages": (2 if device.amd else 3) if fast else 1,
    }


def _launch(M: int, N: int, rows: int, *operands: Tensor | None) -> tuple[tuple[int], dict[str, Any]]:
    """Grid and tile of a GEMM with N columns; ``rows``: of a tile, at most."""
    given = [t for t in operands if t is not None]
    align, chosen = word(*given), schedule(given[0], rows)
    grid = -(-M // chosen["BLOCK_M"]) * -(-N // 64)
    return (grid,), {"ALIGN": align, "REST": int(N % align > 0), "BLOCK_N": 64, **chosen}


def _stride(x: Tensor | None) -> int:
    return 0 if x is None else x.stride(0)


def _layers_like(x0: Tensor, layers: int) -> Tensor:
    """(layers, M, d), each like the rows of x0."""
    (M, d), stride = x0.shape, stride_like(x0)
    return x0.new_empty_strided((layers, M, d), (M * stride, stride, 1))


def cross_matrix_fwd(x0: Tensor, w: Tensor, b: Tensor | None, keep: bool) -> tuple[Tensor, list[Tensor]]:
    """x_L (M, d), and y_1 … y_L (L, M, d) if kept."""
    weight, b = padded(w), None if b is None else b.contiguous()

    def layer(index: int, y: Tensor | None, out: Tensor | None, z: Tensor | None) -> None:
        bias = None if b is None else b[index]
        if y is None:
            multiply(x0, weight[index], out, z, x0=x0, b=bias, base=1.0)
        else:
            multiply(y, weight[index], out, z, x0=x0, scaled=True, b=bias, c=y)

    return _forward(x0, w.shape[0], layer, keep)


def _forward(x0: Tensor, layers: int, layer: Callable[..., None], keep: bool) -> tuple[Tensor, list[Tensor]]:
    """``layer(l, y_l, y_{l+1}, x_{l+1})`` for all layers: y_0 is None, x only the last's, y_{l+1} None if of no use."""
    result, y = empty_rows(x0), None
    rows = _layers_like(x0, layers if keep else min(2, layers - 1))
    for index in range(layers):
        last = index == layers - 1
        out = rows[index % len(rows)] if keep or not last else None
        layer(index, y, out, result if last else None)
        y = out
    return result, [rows] if keep else []


def cross_matrix_bwd(
    dy: Tensor, x0: Tensor, w: Tensor, b: Tensor | None, kept: Sequence[Tensor], needs: Sequence[bool]
) -> list[Tensor]:
    """dx0, dw and db, each empty unless needed."""
    weight, (y,), (layers, N, _) = padded(w), kept, w.shape
    dx = _layers_like(x0, layers)
    dw, db = _empty(w, needs[1]), _empty(b, needs[2], x0)
    for index in reversed(range(layers)):
        above = dy if index == layers - 1 else dx[index + 1]
        if needs[1] or needs[2]:
            x = x0 if index == 0 else y[index - 1]
            _spread(weight_sums(above, x, x0, scaled=(True, index > 0)), index, dw, db)
        if index > 0 or needs[0]:
            multiply(above, weight[index].T[:N], dx[index], x0=x0, scaled=True, c=above)
    return [_dx0(dx, dy, y) if needs[0] else dy.new_empty(0), dw, db]


def cross_gated_fwd(x0: Tensor, w: Tensor, g: Tensor, b: Tensor | None, keep: bool) -> tuple[Tensor, list[Tensor]]:
    """x_L (M, d), and y_1 … y_L (L, M, d) if kept."""
    (M, N), weight, b = x0.shape, padded(torch.stack((w, g), 1)), None if b is None else b.contiguous()

    def layer(index: int, y: Tensor | None, out: Tensor | None, z: Tensor | None) -> None:
        if M:
            grid, constexprs = _launch(M, N, 64, x0, y, out, z)
            _cross_gated_fwd_kernel[grid](
                y, x0, weight[index], None if b is None else b[index], out, z,
                M, N,
                _stride(y), x0.stride(0), weight.stride(2), weight.stride(1), _stride(out), _stride(z),
                FIRST=y is None, **constexprs,
            )  # fmt: skip

    return _forward(x0, w.shape[0], layer, keep)


def cross_gated_bwd(
    dy: Tensor,
    x0: Tensor,
    w: Tensor,
    g: Tensor,
    b: Tensor | None,
    kept: Sequence[Tensor],
    needs: Sequence[bool],
) -> list[Tensor]:
    """dx0, dw, dg and db, each empty unless needed."""
    (M, N), (layers, _, _), (y,) = x0.shape, w.shape, kept
    weight, b = padded(torch.stack((w, g), 1)), None if b is None else b.contiguous()
    columns = weight.shape[-1]
    weight = F.pad(weight, (0, 0, 0, columns - N))  # (L, 2, columns, columns)
    dut = x0.new_empty((M, 2 * columns))
    dx = _layers_like(x0, layers)
    dw, dg, db = _empty(w, needs[1]), _empty(g, needs[2]), _empty(b, needs[3], x0)
    for index in reversed(range(layers)):
        above, below = dy if index == layers - 1 else dx[index + 1], y[index - 1] if index else None
        if M:
            grid, constexprs = _launch(M, N, 64, x0, below, above, dut)
            _cross_gated_bwd_kernel[grid](
                below, x0, weight[index], None if b is None else b[index], above, dut[:, :columns], dut[:, columns:],
                M, N, columns,
                _stride(below), x0.stride(0), columns, weight.stride(1), above.stride(0), dut.stride(0),
                FIRST=below is None, **constexprs,
            )  # fmt: skip
        if any(needs[1:]):
            sums = weight_sums(dut, x0 if below is None else below, x0, scaled=(False, index > 0))
            _spread(sums[:N], index, dw, db)
            _spread(sums[columns : columns + N], index, dg)
        if index > 0 or needs[0]:
            multiply(dut, weight[index].flatten(0, 1).T[:N], dx[index], c=above)
    return [_dx0(dx, dy, y) if needs[0] else dy.new_empty(0), dw, dg, db]


def _empty(parameter: Tensor | None, needed: bool, like: Tensor | None = None) -> Tensor:
    """Uninitialised memory for a parameter's gradient; empty unless needed."""
    if parameter is None:
        assert like is not None
        return like.new_empty(0)
    return torch.empty_like(parameter, memory_format=torch.contiguous_format) if needed else parameter.new_empty(0)


def _spread(sums: Tensor, index: int, *gradients: Tensor) -> None:
    """The sums (N, K + 1) of a layer to dw (L, N, K), and to db (L, N) if it is given; not to what is not needed."""
    for gradient, part in zip(gradients, (sums[:, :-1], sums[:, -1]), strict=False):
        if gradient.numel():
            gradient[index].copy_(part)


def _dx0(dx: Tensor, dy: Tensor, y: Tensor) -> Tensor:
    (layers, M, N), dx0 = y.shape, empty_rows(y[0])
    align, block = word(dy, dx0, y[0], y[-1], dx[0], dx[-1]), min(256, triton.next_power_of_2(N))
    if M:
        _dx0_kernel[(-(-M // (2048 // block)) * -(-N // block),)](
            dx, dy, y, dx0,
            M, N, layers,
            dx.stride(0), dx.stride(1), dy.stride(0), y.stride(0), y.stride(1), dx0.stride(0),
            ALIGN=align, REST=int(N % align > 0), BLOCK_M=2048 // block, BLOCK_N=block, num_warps=4,
        )  # fmt: skip
    return dx0
