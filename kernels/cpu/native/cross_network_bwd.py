"""The backward pass of the cross network and its logits over a range of rows, compiled by Numba.

    backward   network: a_L = g·x0          logits: a_L = Σ_c dz_c q_c,  dq_c = α_L dz_c
               dp_l = a_{l+1} α_l;  dc_l = Σ_rows a_{l+1};  a_l = a_{l+1} (1 + p_l)
               dx0 = α_L g + Σ_k coefficient_k vector_k,  with the coefficients dp_l, dq_c
    finish     dw_l = Σ_rows dp_l x0 + dc_l β_l;  dv_c = Σ_rows dq_c x0 + (Σ_rows dz_c) β_L
               db_j = dβ_L + Σ_{l>j} dc_l w_l,  with dβ_L = Σ_rows g  or  Σ_c (Σ_rows dz_c) v_c

Bytes from memory per row: 2 reads + 1 write (logits: 1 read + 1 write). The sums over rows are packed like the vectors,
the sum of g last.
"""

from fastcross.kernels.cpu.cross_network import BACKWARD
from fastcross.kernels.cpu.native.blocks import (
    block_for,
    block_of,
    clear,
    copy_rows,
    dots_of_pairs,
    flush,
    is_full,
    join,
)
from fastcross.kernels.cpu.native.fours import (
    add_scaled,
    four_times,
    load_four,
    plain_sum,
    scale_four,
    splat_four,
    store_four,
    weighted_sum,
)  # fmt: skip
from fastcross.kernels.cpu.native.simd import (
    add,
    add_exactly,
    at,
    fma,
    inline,
    is_double,
    lanes,
    least,
    load,
    load_upto,
    load_wide,
    narrow,
    prefetch,
    prefetch_write,
    splat_wide,
    store,
    store_upto,
    widen,
    zeros_wide,
)  # fmt: skip
from fastcross.kernels.cpu.native.unpack import first, take

take_backward, first_backward = take(BACKWARD), first(BACKWARD)


def cross_network_bwd(block):
    task = take_backward(block)
    while task.chunk < task.chunks:
        dout, x0, dx0, p, c, alpha, a, coefficient, sums, ends = (
            task.dout, task.x0, task.dx0, task.p, task.c, task.alpha, task.a, task.coefficient, task.sums, task.ends
        )  # fmt: skip
        end_errors = task.end_errors
        M, d, L, C, K, padded, n = task.M, task.d, task.L, task.C, task.K, task.padded, lanes(task.x0)
        start, stop = task.start, task.stop
        vectors, step, vector_step = (task.packed, K * n, n) if task.packs else (task.w, n, d)
        full, size = d - d % n, (K + 1) * padded
        clear(task.spare_g, padded)
        clear(sums, size)
        clear(task.totals, size)
        if is_double(sums):
            clear(task.errors, size)
        for k in range(K):
            ends[k], end_errors[k] = 0, 0
        needs = (task.need_dx0, task.need_dw or task.need_dv, task.need_db and C == 0)
        for r in range(start, stop, 4):
            here = least(4, stop - r)
            x = block_of(x0, r, stop, task.stride_x0, task.spare_x, padded, d)
            g = (task.spare_g, 0)  # logits: the output has no gradient of its own
            if C == 0:
                g = block_of(dout, r, stop, task.stride_dout, task.spare_g, padded, d)
                dots_of_pairs(x, g, d, coefficient)
            for i in range(4):
                a[i] = coefficient[i] if C == 0 else 0
                alpha[i] = 1
            for k in range(L):
                for i in range(here):
                    alpha[4 * (k + 1) + i] = fma(alpha[4 * k + i], 1 + p[k * M + r + i], c[k])
            for k in range(K + 1):
                for i in range(here, 4):
                    coefficient[4 * k + i] = 0
            for i in range(here):
                coefficient[4 * K + i] = alpha[4 * L + i] if C == 0 else 0
                for k in range(C):
                    dz = dout[(r + i) * task.stride_dout + k]
                    a[i] = fma(dz, p[(L + k) * M + r + i], a[i])
                    add_exactly(ends, end_errors, L + k, dz)
                    coefficient[4 * (L + k) + i] = alpha[4 * L + i] * dz
            for k in range(L - 1, -1, -1):
                for i in range(here):
                    coefficient[4 * k + i] = a[i] * alpha[4 * k + i]
                    add_exactly(ends, end_errors, k, a[i])
                    a[i] *= 1 + p[k * M + r + i]
            dx = block_for(dx0, r, stop, task.stride_dx0, task.spare_dx, padded)
            x_ahead, dx_ahead = at(x0, (r + 4) * task.stride_x0), at(dx0, (r + 4) * task.stride_dx0)
            g_ahead = x_ahead if C else at(dout, (r + 4) * task.stride_dout)
            for j in range(0, full, n):
                for line in range(4 * j, 4 * (j + n), 2 * n):
                    prefetch(x_ahead, line)
                    prefetch(g_ahead, line)
                    prefetch_write(dx_ahead, line)
                _columns(x, g, dx, vectors, coefficient, sums, j, n, K, step, vector_step, needs)
            if full < d:
                _columns(x, g, dx, vectors, coefficient, sums, full, d - full, K, step, vector_step, needs)
            if here < 4 and task.need_dx0:
                copy_rows(at(dx0, r * task.stride_dx0), task.stride_dx0, task.spare_dx, padded, here, d)
            if is_full(r, start, stop, sums):
                flush(task.totals, task.errors, sums, size)
        task = take_backward(block)


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


def cross_network_finish(block):
    """The weights' gradients from the chunks' totals, completed by the terms in β."""
    task = first_backward(block)
    d, L, K, totals, ends, like, n = task.d, task.L, task.K, task.totals, task.ends, task.beta, lanes(task.beta)
    step = task.own_bytes // 8
    join(totals, task.errors, task.chunks, (K + 1) * task.padded, task.own_bytes, like)
    for k in range(K):
        for chunk in range(1, task.chunks):
            add_exactly(ends, task.end_errors, k, ends[chunk * step + k])
            task.end_errors[k] += task.end_errors[chunk * step + k]
        ends[k] += task.end_errors[k]
    for j in range(0, d, n):
        row, count = at(totals, j * (K + 1)), least(n, d - j)
        if task.need_dw or task.need_dv:
            beta = zeros_wide(like)
            for k in range(K):
                gradient = narrow(fma(splat_wide(ends[k], like), beta, load_wide(row, k * n, like)), like)
                if k >= L:
                    if task.need_dv:
                        store_upto(task.dv, (k - L) * d + j, gradient, count)
                else:
                    if task.need_dw:
                        store_upto(task.dw, k * d + j, gradient, count)
                    if task.has_b:
                        beta = add(beta, widen(load_upto(task.b, k * d + j, count)))
        if task.need_db:
            dbeta = load_wide(row, K * n, like)
            for k in range(task.C):
                dbeta = fma(splat_wide(ends[L + k], like), widen(load_upto(task.v, k * d + j, count)), dbeta)
            for k in range(L - 1, -1, -1):
                store_upto(task.db, k * d + j, narrow(dbeta, like), count)
                dbeta = fma(splat_wide(ends[k], like), widen(load_upto(task.w, k * d + j, count)), dbeta)
