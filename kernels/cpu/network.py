"""The cross network and its logits over a range of rows, compiled by Numba: the closed form in one pass over memory.

The K = L + C vectors are the layers' w_l, followed by the head's v_c:

    prepare    c_l = β_l·w_l;  β_{l+1} = β_l + b_l;  for the head β_L·v_c
    forward    p_k = x0·vector_k;  α_{l+1} = α_l (1 + p_l) + c_l;  y = α_L x0 + β_L  or  z_c = α_L q_c + β_L·v_c
    backward   network: a_L = g·x0          logits: a_L = Σ_c dz_c q_c,  dq_c = α_L dz_c
               dp_l = a_{l+1} α_l;  dc_l = Σ_rows a_{l+1};  a_l = a_{l+1} (1 + p_l)
               dx0 = α_L g + Σ_k coefficient_k vector_k,  with the coefficients dp_l, dq_c
    finish     dw_l = Σ_rows dp_l x0 + dc_l β_l;  dv_c = Σ_rows dq_c x0 + (Σ_rows dz_c) β_L
               db_j = dβ_L + Σ_{l>j} dc_l w_l,  with dβ_L = Σ_rows g  or  Σ_c (Σ_rows dz_c) v_c

A block of four rows is read from memory once: what follows the first touch finds it in cache. Bytes from memory per
row: forward 1 read + 1 write, backward 2 reads + 1 write (logits: 1 read, then 1 read + 1 write).

For many rows the vectors are packed: column by column of one register's width, the K vectors' pieces side by side, in
the order in which the loops want them, and zero past d. Left as they are, rows of 4 KiB would fall on the same few
lines of the first cache and push each other out. The sums over rows are packed likewise, the sum of g last.
"""

import numpy as np
from numba import carray

from fastcross.kernels.cpu.blocks import (
    BLOCK_ROWS,
    add_scaled,
    block_for,
    block_of,
    copy_rows,
    dots_of_pairs,
    dots_with_one,
    dots_with_two,
    fetch,
    flush,
    four_times,
    join,
    load_four,
    plain_sum,
    scale_four,
    splat_four,
    store_four,
    weighted_sum,
)  # fmt: skip
from fastcross.kernels.cpu.simd import (
    add,
    at,
    fma,
    inline,
    lanes,
    load,
    load_upto,
    load_wide,
    narrow,
    prefetch,
    prefetch_write,
    splat_wide,
    store,
    store_upto,
    total,
    widen,
    zeros,
)  # fmt: skip
from fastcross.kernels.cpu.tasks import arguments, next_chunk


def cross_network_prepare(task):
    """``wide``, in float64: c_l (L), β_L·v_c (C), the prefix β; ``beta``: β_L in the storage dtype.

    Both betas are padded to whole vectors.
    """
    vectors, b, packed, beta, wide, d, L, C, has_bias, pack = arguments(task, 4, 1, 5)
    K, n = L + C, lanes(beta)
    c, prefix = carray(wide, (K,)), at(wide, K)
    for j in range(0, d, n):
        store(prefix, j, widen(zeros(beta)))
    for k in range(K):
        c[k] = 0
        if has_bias:
            dot = widen(zeros(beta))
            for j in range(0, d, n):
                count, beta_l = min(n, d - j), load_wide(prefix, j, beta)
                dot = fma(beta_l, widen(load_upto(vectors, k * d + j, count)), dot)
                if k < L:
                    store(prefix, j, add(beta_l, widen(load_upto(b, k * d + j, count))))
            c[k] = total(dot)
    for j in range(0, d, n):
        store(beta, j, narrow(load_wide(prefix, j, beta), beta))
        if pack:
            for k in range(K):
                store(packed, j * K + k * n, load_upto(vectors, k * d + j, min(n, d - j)))


def cross_network_fwd(task):
    (
        x0, vectors, beta, out, p, scratch, wide,
        chunks, rows, own, M, d, L, C, step, vector_step, stride_x0, stride_out, keep_p,
    ) = arguments(task, 6, 1, 12)  # fmt: skip
    chunk = next_chunk(task)
    while chunk < chunks:
        start, stop = chunk * rows, min(chunk * rows + rows, M)
        _forward(
            x0, vectors, beta, out, p, at(scratch, chunk * own), wide,
            M, start, stop, d, L, C, step, vector_step, stride_x0, stride_out, keep_p,
        )  # fmt: skip
        chunk = next_chunk(task)


@inline
def _forward(
    x0, vectors, beta, out, p, scratch, wide,
    M, start, stop, d, L, C, step, vector_step, stride_x0, stride_out, keep_p,
):  # fmt: skip
    """Network (C = 0): y = α_L x0 + β_L. Logits: z_c = α_L q_c + β_L·v_c.

    ``scratch``: p (K, 4), α_L (4), two blocks of rows.
    """
    K, n = L + C, lanes(x0)
    full, padded = d - d % n, -(-d // n) * n
    c, p_all, z = carray(wide, (K,)), carray(p, (K, M)), carray(out, (M * stride_out,))
    dots, alpha_at = carray(scratch, (K + 1, 4)), at(scratch, 4 * K)
    spare_x, spare_y = at(scratch, 4 * (K + 1)), at(scratch, 4 * (K + 1) + 4 * padded)
    alpha = np.empty(4, np.float64)
    share = 4 * n // (-(-K // 2) + 1)  # of the next block, for each register's width of each of the passes below
    for r in range(start, stop, 4):
        x = block_of(x0, r, stop, stride_x0, spare_x, padded, d)
        x_ahead = at(x0, (r + 4) * stride_x0)
        y_ahead = x_ahead if C else at(out, (r + 4) * stride_out)
        for k in range(0, K, 2):
            ahead = (x_ahead, y_ahead, share)
            vector, p_block = at(vectors, k * vector_step), at(scratch, 4 * k)
            if k + 1 < K:
                dots_with_two(x, vector, step, vector_step, d, p_block, ahead)
            else:
                dots_with_one(x, vector, step, d, p_block, ahead)
            x_ahead, y_ahead = at(x_ahead, full // n * share), at(y_ahead, full // n * share)
        for i in range(4):
            alpha[i] = 1
        for k in range(L):
            for i in range(4):
                alpha[i] = alpha[i] * (1 + dots[k, i]) + c[k]
        for i in range(4):
            dots[K, i] = alpha[i]
        here = min(4, stop - r)
        if keep_p:
            for k in range(K):
                for i in range(here):
                    p_all[k, r + i] = dots[k, i]
        if C == 0:
            y, t = block_for(out, r, stop, stride_out, spare_y, padded), splat_four(alpha_at)
            for j in range(0, full, n):
                fetch((x_ahead, y_ahead, share), j)
                store_four(y, j, add_scaled(t, load_four(x, j, n), four_times(load(beta, j))), n)
            if full < d:
                values = add_scaled(t, load_four(x, full, d - full), four_times(load(beta, full)))
                store_four(y, full, values, d - full)
            if here < 4:
                copy_rows(at(out, r * stride_out), stride_out, spare_y, padded, here, d)
        for k in range(C):
            for i in range(here):
                z[(r + i) * stride_out + k] = alpha[i] * dots[L + k, i] + c[L + k]


def cross_network_bwd(task):
    (
        dout, x0, vectors, p, dx0, scratch, wide, totals,
        chunks, rows, own, own_totals, M, d, L, C, step, vector_step, stride_dout, stride_x0, stride_dx0,
        need_dx0, need_dvectors, need_db,
    ) = arguments(task, 6, 2, 16)  # fmt: skip
    chunk = next_chunk(task)
    while chunk < chunks:
        start, stop = chunk * rows, min(chunk * rows + rows, M)
        _backward(
            dout, x0, vectors, p, dx0, at(scratch, chunk * own), wide, at(totals, chunk * own_totals),
            M, start, stop, d, L, C, step, vector_step, stride_dout, stride_x0, stride_dx0,
            need_dx0, need_dvectors, need_db,
        )  # fmt: skip
        chunk = next_chunk(task)


@inline
def _backward(
    dout, x0, vectors, p, dx0, scratch, wide, totals,
    M, start, stop, d, L, C, step, vector_step, stride_dout, stride_x0, stride_dx0, need_dx0, need_dvectors, need_db,
):  # fmt: skip
    """``totals``, in float64: the packed sums (K + 1, d), dc (L), Σ dz (C).

    ``scratch``: coefficients (K, 4), α_L (4), three blocks of rows, the packed sums.
    """
    K, n = L + C, lanes(x0)
    full, padded = d - d % n, -(-d // n) * n
    size = (K + 1) * padded
    c, p_all, dz_all = carray(wide, (K,)), carray(p, (K, M)), carray(dout, (M * stride_dout,))
    coefficient, spare_x = carray(scratch, (K + 1, 4)), at(scratch, 4 * (K + 1))
    spare_g, spare_dx, sums = at(spare_x, 4 * padded), at(spare_x, 8 * padded), at(spare_x, 12 * padded)
    for j in range(0, padded, n):
        store(spare_g, j, zeros(x0))
    for j in range(0, size, n):
        store(sums, j, zeros(x0))
    if start == stop:
        flush(totals, sums, size, True)
    ends = carray(at(totals, size), (K,))
    ends[:] = 0
    alpha, a = np.empty((L + 1, 4), np.float64), np.empty(4, np.float64)
    needs = (need_dx0, need_dvectors, need_db and C == 0)
    for r in range(start, stop, 4):
        here = min(4, stop - r)
        x = block_of(x0, r, stop, stride_x0, spare_x, padded, d)
        g = (spare_g, 0)  # logits: the output has no gradient of its own
        if C == 0:
            g = block_of(dout, r, stop, stride_dout, spare_g, padded, d)
            dots_of_pairs(x, g, d, scratch)
        for i in range(4):
            a[i] = coefficient[0, i] if C == 0 else 0
            alpha[0, i] = 1
        for k in range(L):
            for i in range(here):
                alpha[k + 1, i] = alpha[k, i] * (1 + p_all[k, r + i]) + c[k]
        coefficient[:, here:] = 0
        for i in range(here):
            coefficient[K, i] = alpha[L, i] if C == 0 else 0
            for k in range(C):
                dz = dz_all[(r + i) * stride_dout + k]
                a[i] += dz * p_all[L + k, r + i]
                ends[L + k] += dz
                coefficient[L + k, i] = alpha[L, i] * dz
        for k in range(L - 1, -1, -1):
            for i in range(here):
                coefficient[k, i] = a[i] * alpha[k, i]
                ends[k] += a[i]
                a[i] *= 1 + p_all[k, r + i]
        dx = block_for(dx0, r, stop, stride_dx0, spare_dx, padded)
        x_ahead, dx_ahead = at(x0, (r + 4) * stride_x0), at(dx0, (r + 4) * stride_dx0)
        g_ahead = x_ahead if C else at(dout, (r + 4) * stride_dout)
        for j in range(0, full, n):
            for line in range(4 * j, 4 * (j + n), 2 * n):
                prefetch(x_ahead, line)
                prefetch(g_ahead, line)
                prefetch_write(dx_ahead, line)
            _columns(x, g, dx, vectors, scratch, sums, j, n, K, step, vector_step, needs)
        if full < d:
            _columns(x, g, dx, vectors, scratch, sums, full, d - full, K, step, vector_step, needs)
        if here < 4 and need_dx0:
            copy_rows(at(dx0, r * stride_dx0), stride_dx0, spare_dx, padded, here, d)
        if (r - start) % BLOCK_ROWS == BLOCK_ROWS - 4 or r + 4 >= stop:
            flush(totals, sums, size, r - start < BLOCK_ROWS)


@inline
def _columns(x, g, dx, vectors, coefficient, sums, j, count, K, step, vector_step, needs):
    """One register's width of four rows of dx0, and what they add to every sum."""
    n = lanes(vectors)
    need_dx0, need_dvectors, need_sum_of_g = needs
    x_j, g_j = load_four(x, j, count), load_four(g, j, count)
    vector, row = at(vectors, j // n * step), at(sums, j * (K + 1))
    dx_j = scale_four(splat_four(at(coefficient, 4 * K)), g_j)
    for k in range(K):
        t = splat_four(at(coefficient, 4 * k))
        if need_dx0:
            dx_j = add_scaled(t, four_times(load_upto(vector, k * vector_step, count)), dx_j)
        if need_dvectors:
            store(row, k * n, weighted_sum(t, x_j, load(row, k * n)))
    if need_dx0:
        store_four(dx, j, dx_j, count)
    if need_sum_of_g:
        store(row, K * n, plain_sum(g_j, load(row, K * n)))


def cross_network_finish(task):
    """The weights' gradients from the chunks' totals, completed by the terms in β."""
    vectors, b, dvectors, db, totals, chunks, d, L, C, has_bias, need_dvectors, need_db = arguments(task, 4, 1, 7)
    K, n = L + C, lanes(vectors)
    size = (K + 1) * (-(-d // n) * n)
    join(totals, chunks, size + K)
    ends = carray(at(totals, size), (K,))
    for j in range(0, d, n):
        row, count = at(totals, j * (K + 1)), min(n, d - j)
        if need_dvectors:
            beta = widen(zeros(vectors))
            for k in range(K):
                dvector = fma(splat_wide(ends[k], vectors), beta, load_wide(row, k * n, vectors))
                store_upto(dvectors, k * d + j, narrow(dvector, vectors), count)
                if has_bias and k < L:
                    beta = add(beta, widen(load_upto(b, k * d + j, count)))
        if need_db:
            dbeta = load_wide(row, K * n, vectors)
            for k in range(L, K):
                dbeta = fma(splat_wide(ends[k], vectors), widen(load_upto(vectors, k * d + j, count)), dbeta)
            for k in range(L - 1, -1, -1):
                store_upto(db, k * d + j, narrow(dbeta, vectors), count)
                dbeta = fma(splat_wide(ends[k], vectors), widen(load_upto(vectors, k * d + j, count)), dbeta)
