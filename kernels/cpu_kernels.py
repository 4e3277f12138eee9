"""The cross operators over a range of rows, compiled by Numba: the closed form in one pass over memory.

Network and logits share their kernels. The K = L + C vectors are the layers' w_l, followed by the head's v_c:

    forward    p_k = x0·vector_k;  α_{l+1} = α_l (1 + p_l) + c_l;  y = α_L x0 + β_L  or  z_c = α_L q_c + β_L·v_c
    backward   network: a_L = g·x0          logits: a_L = Σ_c dz_c q_c,  dq_c = α_L dz_c
               dp_l = a_{l+1} α_l;  dc_l = Σ_rows a_{l+1};  a_l = a_{l+1} (1 + p_l)
               dx0 = α_L g + Σ_k coefficient_k vector_k,  with the coefficients dp_l, dq_c
               dvector_k = Σ_rows coefficient_k x0,  completed by the terms in β in ``cross_network_finish``

Four rows are taken at a time, so that a vector is loaded once for four rows and a row once from memory: what follows
the first touch finds it in cache. Bytes from memory per row: forward 1 read + 1 write, backward 2 reads + 1 write
(logits: 1 read, then 1 read + 1 write). Dots run in the storage dtype, the recurrence in float64, sums over rows in the
storage dtype within a block and in float64 across blocks.

Every inner loop has one store, at most five streams and no branch, which is what LLVM turns into full-width
multiply-adds. It stops being good where a row is shorter than a few vectors (d < 32) or four rows outgrow the second
cache (d > 16,000 in float32).
"""

from typing import Any

import numpy as np
from numba import carray, njit

# Sums may be reordered and contracted; NaN and infinity keep their meaning.
OPTIONS: dict[str, Any] = {"fastmath": {"reassoc", "contract", "nsz"}, "error_model": "numpy"}
BLOCK_ROWS = 512  # rows summed in the storage dtype before they join the float64 totals


@njit(**OPTIONS)
def _rows(pointer, M, stride, d):
    return carray(pointer, (max(M - 1, 0) * stride + d,))


@njit(**OPTIONS)
def _row(rows, index, stride, d):
    return rows[index * stride : index * stride + d]


@njit(**OPTIONS)
def _dot(x, w):
    total = x.dtype.type(0)
    for j in range(x.size):
        total += x[j] * w[j]
    return total


@njit(**OPTIONS)
def _dots(xa, xb, xc, xd, w, v):
    """The dots of four rows with two vectors."""
    aw = bw = cw = dw = av = bv = cv = dv = w.dtype.type(0)
    for j in range(w.size):
        aw += xa[j] * w[j]
        bw += xb[j] * w[j]
        cw += xc[j] * w[j]
        dw += xd[j] * w[j]
        av += xa[j] * v[j]
        bv += xb[j] * v[j]
        cv += xc[j] * v[j]
        dv += xd[j] * v[j]
    return (aw, bw, cw, dw), (av, bv, cv, dv)


@njit(**OPTIONS)
def _affine(y, s, x, b):
    for j in range(y.size):
        y[j] = s * x[j] + b[j]


@njit(**OPTIONS)
def _combine(y, s, g, t, w, u, v):
    for j in range(y.size):
        y[j] = s * g[j] + t * w[j] + u * v[j]


@njit(**OPTIONS)
def _combine_three(y, s, g, t, va, vb, vc):
    ta, tb, tc = t
    for j in range(y.size):
        y[j] = s * g[j] + ta * va[j] + tb * vb[j] + tc * vc[j]


@njit(**OPTIONS)
def _add_three(y, t, va, vb, vc):
    ta, tb, tc = t
    for j in range(y.size):
        y[j] += ta * va[j] + tb * vb[j] + tc * vc[j]


@njit(**OPTIONS)
def _add(y, x):
    for j in range(y.size):
        y[j] += x[j]


@njit(**OPTIONS)
def _accumulate(total, t, xa, xb, xc, xd):
    ta, tb, tc, td = t
    for j in range(total.size):
        total[j] += (ta * xa[j] + tb * xb[j]) + (tc * xc[j] + td * xd[j])


@njit(**OPTIONS)
def _flush(totals, sums):
    for j in range(sums.size):
        totals[j] += sums[j]
        sums[j] = 0


@njit(**OPTIONS)
def _padded(vectors_ptr, K, d, multiple):
    """The vectors and as many zero vectors as make their number a multiple."""
    vectors = carray(vectors_ptr, (K, d))
    padded = np.zeros((-(-K // multiple) * multiple, d), vectors.dtype)
    padded[:K] = vectors
    return padded


@njit(**OPTIONS)
def _prefix(w, b, has_bias):
    """c_l = β_l·w_l for every layer, and β_L, in float64; zeros without biases."""
    layers, d = w.shape
    c, beta = np.zeros(layers), np.zeros(d)
    if has_bias:
        for layer in range(layers):
            c[layer] = _dot(beta, w[layer])
            _add(beta, b[layer])
    return c, beta


def cross_layer_fwd(
    x0_ptr, x_ptr, w_ptr, b_ptr, y_ptr,
    M, start, stop, d, stride_x0, stride_x, stride_y, has_bias,
):  # fmt: skip
    """y = x0 (x·w) + b + x."""
    x0, x, y = _rows(x0_ptr, M, stride_x0, d), _rows(x_ptr, M, stride_x, d), _rows(y_ptr, M, stride_y, d)
    w = carray(w_ptr, (d,))
    b = carray(b_ptr, (d,)) if has_bias else np.zeros(d, w.dtype)
    one = w.dtype.type(1)
    for r in range(start, stop):
        x_r = _row(x, r, stride_x, d)
        s = _dot(x_r, w)
        _combine(_row(y, r, stride_y, d), s, _row(x0, r, stride_x0, d), one, x_r, one, b)


def cross_layer_bwd(
    dy_ptr, x0_ptr, x_ptr, w_ptr, dx0_ptr, dx_ptr, totals_ptr,
    M, start, stop, d, stride_dy, stride_x0, stride_x, stride_dx0, stride_dx, need_dx0, need_dx, need_dw, need_db,
):  # fmt: skip
    """s = x·w, ds = g·x0;  dx0 = s g;  dx = g + ds w;  dw = Σ ds x;  db = Σ g: totals are dw, then db."""
    dy, x0, x = _rows(dy_ptr, M, stride_dy, d), _rows(x0_ptr, M, stride_x0, d), _rows(x_ptr, M, stride_x, d)
    dx0, dx = _rows(dx0_ptr, M, stride_dx0, d), _rows(dx_ptr, M, stride_dx, d)
    w, totals = carray(w_ptr, (d,)), carray(totals_ptr, (2 * d,))
    totals[:] = 0
    zero, one = w.dtype.type(0), w.dtype.type(1)
    nothing, sums = np.zeros(d, w.dtype), np.zeros(d, w.dtype)
    for r in range(start, stop, 4):
        n = min(4, stop - r)
        ga, xa = _row(dy, r, stride_dy, d), _row(x, r, stride_x, d)
        gb, xb = (_row(dy, r + 1, stride_dy, d), _row(x, r + 1, stride_x, d)) if n > 1 else (nothing, nothing)
        gc, xc = (_row(dy, r + 2, stride_dy, d), _row(x, r + 2, stride_x, d)) if n > 2 else (nothing, nothing)
        gd, xd = (_row(dy, r + 3, stride_dy, d), _row(x, r + 3, stride_x, d)) if n > 3 else (nothing, nothing)
        ds = np.zeros(4, w.dtype)
        for i in range(n):
            g_i = _row(dy, r + i, stride_dy, d)
            if need_dx or need_dw:
                ds[i] = _dot(g_i, _row(x0, r + i, stride_x0, d))
            if need_dx0:
                s = _dot(_row(x, r + i, stride_x, d), w)
                _affine(_row(dx0, r + i, stride_dx0, d), s, g_i, nothing)
            if need_dx:
                _combine(_row(dx, r + i, stride_dx, d), one, g_i, ds[i], w, zero, nothing)
        if need_dw:
            _accumulate(sums, (ds[0], ds[1], ds[2], ds[3]), xa, xb, xc, xd)
        if need_db:
            _accumulate(totals[d:], (one, one, one, one), ga, gb, gc, gd)
        if (r - start) % BLOCK_ROWS == BLOCK_ROWS - 4 or r + 4 >= stop:
            _flush(totals[:d], sums)


def cross_layer_finish(dw_ptr, db_ptr, totals_ptr, chunks, d, need_dw, need_db):
    """dw and db from the chunks' totals."""
    totals, dw, db = carray(totals_ptr, (chunks, 2 * d)), carray(dw_ptr, (d,)), carray(db_ptr, (d,))
    for j in range(d):
        if need_dw:
            dw[j] = totals[:, j].sum()
        if need_db:
            db[j] = totals[:, d + j].sum()


def cross_network_fwd(
    x0_ptr, vectors_ptr, b_ptr, out_ptr, p_ptr,
    M, start, stop, d, L, C, stride_x0, stride_out, has_bias, keep_p,
):  # fmt: skip
    """Network (C = 0): y = α_L x0 + β_L. Logits: z_c = α_L q_c + β_L·v_c."""
    K = L + C
    x0, out = _rows(x0_ptr, M, stride_x0, d), _rows(out_ptr, M, stride_out, C if C else d)
    vectors, b, p = _padded(vectors_ptr, K, d, 2), carray(b_ptr, (L, d)), carray(p_ptr, (K, M))
    c, beta_sum = _prefix(vectors[:L], b, has_bias)
    beta, z_beta = beta_sum.astype(x0.dtype), np.zeros(C)
    for k in range(C):
        z_beta[k] = _dot(beta_sum, vectors[L + k])
    dots, alpha = np.empty((K + 1, 4), x0.dtype), np.empty(4, np.float64)
    real = x0.dtype.type
    for r in range(start, stop, 4):
        # Past the last row the last one is taken again: the same results are written once more.
        rb, rc, rd = min(r + 1, stop - 1), min(r + 2, stop - 1), min(r + 3, stop - 1)
        xa, xb = _row(x0, r, stride_x0, d), _row(x0, rb, stride_x0, d)
        xc, xd = _row(x0, rc, stride_x0, d), _row(x0, rd, stride_x0, d)
        for k in range(0, K, 2):
            with_w, with_v = _dots(xa, xb, xc, xd, vectors[k], vectors[k + 1])
            for i in range(4):
                dots[k, i], dots[k + 1, i] = with_w[i], with_v[i]
        for i in range(4):
            alpha[i] = 1
        for k in range(L):
            for i in range(4):
                alpha[i] = alpha[i] * (1 + dots[k, i]) + c[k]
        if keep_p:
            for k in range(K):
                p[k, r], p[k, rb], p[k, rc], p[k, rd] = dots[k, 0], dots[k, 1], dots[k, 2], dots[k, 3]
        if C == 0:
            _affine(_row(out, r, stride_out, d), real(alpha[0]), xa, beta)
            _affine(_row(out, rb, stride_out, d), real(alpha[1]), xb, beta)
            _affine(_row(out, rc, stride_out, d), real(alpha[2]), xc, beta)
            _affine(_row(out, rd, stride_out, d), real(alpha[3]), xd, beta)
        for k in range(C):
            for i in range(min(4, stop - r)):
                out[(r + i) * stride_out + k] = alpha[i] * dots[L + k, i] + z_beta[k]


def cross_network_bwd(
    dout_ptr, x0_ptr, vectors_ptr, b_ptr, p_ptr, dx0_ptr, totals_ptr,
    M, start, stop, d, L, C, stride_dout, stride_x0, stride_dx0, has_bias, need_dx0, need_dvectors, need_db,
):  # fmt: skip
    """``totals``, in float64: Σ coefficient_k x0 (K, d), Σ g (d), dc (L), Σ dz (C)."""
    K = L + C
    x0, dout = _rows(x0_ptr, M, stride_x0, d), _rows(dout_ptr, M, stride_dout, C if C else d)
    dx0 = _rows(dx0_ptr, M, stride_dx0, d)
    vectors, b, p = _padded(vectors_ptr, K, d, 3), carray(b_ptr, (L, d)), carray(p_ptr, (K, M))
    totals = carray(totals_ptr, (K * d + d + K,))
    totals[:] = 0
    dc, dz = totals[K * d + d : K * d + d + L], totals[K * d + d + L :]
    c, _ = _prefix(vectors[:L], b, has_bias)
    real, nothing = x0.dtype.type, np.zeros(d, x0.dtype)
    one = real(1)
    sums, coefficient = np.zeros(K * d, x0.dtype), np.zeros((K + 2, 4), x0.dtype)
    alpha = np.empty((L + 1, 4), np.float64)
    for r in range(start, stop, 4):
        n = min(4, stop - r)
        xa, ga = _row(x0, r, stride_x0, d), nothing if C else _row(dout, r, stride_dout, d)
        xb, gb = nothing, nothing
        xc, gc = nothing, nothing
        xd, gd = nothing, nothing
        if n > 1:
            xb, gb = _row(x0, r + 1, stride_x0, d), nothing if C else _row(dout, r + 1, stride_dout, d)
        if n > 2:
            xc, gc = _row(x0, r + 2, stride_x0, d), nothing if C else _row(dout, r + 2, stride_dout, d)
        if n > 3:
            xd, gd = _row(x0, r + 3, stride_x0, d), nothing if C else _row(dout, r + 3, stride_dout, d)
        coefficient[:, n:] = 0
        for i in range(n):
            alpha[0, i] = 1
            for k in range(L):
                alpha[k + 1, i] = alpha[k, i] * (1 + p[k, r + i]) + c[k]
            a = 0.0
            if C == 0:
                a += _dot(_row(dout, r + i, stride_dout, d), _row(x0, r + i, stride_x0, d))
            for k in range(C):
                dz_k = dout[(r + i) * stride_dout + k]
                a += dz_k * p[L + k, r + i]
                dz[k] += dz_k
                coefficient[L + k, i] = alpha[L, i] * dz_k
            for k in range(L - 1, -1, -1):
                coefficient[k, i] = a * alpha[k, i]
                dc[k] += a
                a *= 1 + p[k, r + i]
        if need_dx0:
            for i in range(n):
                dx0_i = _row(dx0, r + i, stride_dx0, d)
                g_i, s = (nothing, real(0)) if C else (_row(dout, r + i, stride_dout, d), real(alpha[L, i]))
                t = (coefficient[0, i], coefficient[1, i], coefficient[2, i])
                _combine_three(dx0_i, s, g_i, t, vectors[0], vectors[1], vectors[2])
                for k in range(3, K, 3):
                    t = (coefficient[k, i], coefficient[k + 1, i], coefficient[k + 2, i])
                    _add_three(dx0_i, t, vectors[k], vectors[k + 1], vectors[k + 2])
        if need_dvectors:
            for k in range(K):
                t = (coefficient[k, 0], coefficient[k, 1], coefficient[k, 2], coefficient[k, 3])
                _accumulate(_row(sums, k, d, d), t, xa, xb, xc, xd)
        if need_db and C == 0:
            _accumulate(_row(totals, K, d, d), (one, one, one, one), ga, gb, gc, gd)
        if (r - start) % BLOCK_ROWS == BLOCK_ROWS - 4 or r + 4 >= stop:
            _flush(totals[: K * d], sums)


def cross_network_finish(
    vectors_ptr, b_ptr, dvectors_ptr, db_ptr, totals_ptr, chunks, d, L, C, has_bias, need_dvectors, need_db
):
    """dw_l = Σ dp_l x0 + dc_l β_l;  dv_c = Σ dq_c x0 + (Σ dz_c) β_L;  db_j = dβ_L + Σ_{l>j} dc_l w_l."""
    K = L + C
    size = K * d + d + K
    totals, vectors, b = carray(totals_ptr, (chunks, size)), carray(vectors_ptr, (K, d)), carray(b_ptr, (L, d))
    dvectors, db = carray(dvectors_ptr, (K, d)), carray(db_ptr, (L, d))
    total = totals[0]
    for chunk in range(1, chunks):
        for j in range(size):
            total[j] += totals[chunk, j]
    dc_dz = total[K * d + d :]
    if need_dvectors:
        beta = np.zeros(d, np.float64)
        for k in range(K):
            for j in range(d):
                dvectors[k, j] = total[k * d + j] + dc_dz[k] * beta[j]
            if has_bias and k < L:
                for j in range(d):
                    beta[j] += b[k, j]
    if need_db:
        dbeta = total[K * d : K * d + d]
        for k in range(L, K):
            for j in range(d):
                dbeta[j] += dc_dz[k] * vectors[k, j]
        for k in range(L - 1, -1, -1):
            for j in range(d):
                db[k, j] = dbeta[j]
                dbeta[j] += dc_dz[k] * vectors[k, j]
