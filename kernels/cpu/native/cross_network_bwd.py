"""The backward pass of the cross network and its logits over a range of rows, compiled by Numba.

    backward   network: a_L = g·x0          logits: a_L = Σ_c dz_c q_c,  dq_c = α_L dz_c
               dp_l = a_{l+1} α_l;  dc_l = Σ_rows a_{l+1};  a_l = a_{l+1} (1 + p_l)
               dx0 = α_L g + Σ_k coefficient_k vector_k,  with the coefficients dp_l, dq_c
    finish     dw_l = Σ_rows dp_l x0 + dc_l β_l;  dv_c = Σ_rows dq_c x0 + (Σ_rows dz_c) β_L
               db_j = dβ_L + Σ_{l>j} dc_l w_l,  with dβ_L = Σ_rows g  or  Σ_c (Σ_rows dz_c) v_c

Bytes from memory per row: 2 reads + 1 write (logits: 1 read + 1 write). Where p was not kept it is computed again. The
sums over rows are packed like the vectors, the sum of g last.
"""

from fastcross.kernels.cpu.cross_network import BACKWARD
from fastcross.kernels.cpu.native.dots import dots_of_pairs, dots_with_all
from fastcross.kernels.cpu.native.fours import (
    add_scaled,
    four_times,
    load_four,
    only_first,
    plain_sum,
    scale_four,
    splat_four,
    store_four,
    weighted_sum,
)  # fmt: skip
from fastcross.kernels.cpu.native.numbers import column, each, numbers, of_rows, put_numbers, times
from fastcross.kernels.cpu.native.simd import (
    add,
    add_exactly,
    at,
    fma,
    fma_unless_zero,
    inline,
    is_double,
    known,
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
    zeros,
    zeros_wide,
)  # fmt: skip
from fastcross.kernels.cpu.native.sums import are_few, clear, flush, is_full, join
from fastcross.kernels.cpu.native.unpack import first, take

take_backward, first_backward = take(BACKWARD), first(BACKWARD)


def cross_network_bwd(block):
    task = take_backward(block)
    while task.chunk < task.chunks:
        dout, x0, dx0, c, alpha, dots, coefficient, sums, ends, one = (
            task.dout, task.x0, task.dx0, task.c, task.alpha, task.dots, task.coefficient, task.sums, task.ends, each(1)
        )  # fmt: skip
        M, d, L, C, K, padded, n = task.M, task.d, task.L, task.C, task.K, task.padded, lanes(task.x0)
        r, start, stop = task.start, task.start, task.stop
        vectors, step, vector_step = (task.packed, K * n, n) if task.packs else (task.w, n, d)
        full, size = d - d % n, (K + 1) * padded
        few = are_few(M, task.chunks, sums)
        clear(sums, size)
        if not few:
            clear(task.totals, size)
            if is_double(sums):
                clear(task.errors, size)
        for k in range(K):
            put_numbers(ends, k, each(0))
            put_numbers(task.end_errors, k, each(0))
        stride, yes, no, nothing = task.stride_x0, known(True), known(False), known(0)
        needs = (task.need_dx0 > 0, task.need_dw > 0 or task.need_dv > 0, task.need_db > 0 and C == 0, C == 0)
        is_usual = (
            needs[0] and needs[1] and task.packs and task.stride_dx0 == stride and (C > 0 or task.stride_dout == stride)
        )
        while r < stop:
            across, here = (1, 4) if r + 4 <= stop else (0, 1)
            x = (at(x0, r * task.stride_x0), across * task.stride_x0)
            dx = (at(dx0, r * task.stride_dx0), across * task.stride_dx0)
            g = x  # never read: logits are all that has a gradient
            if C == 0:
                g = (at(dout, r * task.stride_dout), across * task.stride_dout)
                dots_of_pairs(x, g, d, coefficient)
            if task.has_p:
                for k in range(K):
                    put_numbers(dots, k, column((at(task.p, k * M + r), across), 0))
            else:
                dots_with_all(x, vectors, step, vector_step, d, K, dots, (x[0], x[0], nothing))
            put_numbers(alpha, 0, one)
            for k in range(L):
                put_numbers(alpha, k + 1, fma(numbers(alpha, k), add(one, numbers(dots, k)), each(c[k])))
            alpha_L = numbers(alpha, L)
            a = numbers(coefficient, 0) if C == 0 else each(0)
            put_numbers(coefficient, K, alpha_L if C == 0 else each(0))
            for k in range(C):
                dz = column((at(dout, r * task.stride_dout), across * task.stride_dout), k)
                a = fma(dz, numbers(dots, L + k), a)
                put_numbers(coefficient, L + k, times(alpha_L, dz))
                add_exactly(ends, task.end_errors, 4 * (L + k), of_rows(dz, here))
            for k in range(L - 1, -1, -1):
                put_numbers(coefficient, k, times(a, numbers(alpha, k)))
                add_exactly(ends, task.end_errors, 4 * k, of_rows(a, here))
                a = times(a, add(one, numbers(dots, k)))
            rows = (x, g, dx, vectors, coefficient, sums, step, vector_step)
            if here == 1:
                for j in range(0, d, n):
                    _columns(rows, j, least(n, d - j), K, needs, yes)
            else:
                g_ahead = at(dout, (r + 4) * task.stride_dout) if C == 0 else at(x0, (r + 4) * task.stride_x0)
                ahead = (at(x0, (r + 4) * task.stride_x0), g_ahead, at(dx0, (r + 4) * task.stride_dx0))
                # What the compiler knows it writes out; with one stride for all, addresses have registers enough.
                if not is_usual:
                    _all_columns(rows, ahead, full, K, needs, task.fetches * needs[0])
                elif K == 3 and needs[2]:
                    rows = ((x[0], stride), (g[0], stride), (dx[0], stride), vectors, coefficient, sums, 3 * n, n)
                    _all_columns(rows, ahead, full, known(3), (yes, yes, yes, yes), task.fetches)
                elif K == 4 and C > 0:
                    rows = ((x[0], stride), g, (dx[0], stride), vectors, coefficient, sums, 4 * n, n)
                    _all_columns(rows, ahead, full, known(4), (yes, yes, no, no), task.fetches)
                else:
                    rows = ((x[0], stride), g, (dx[0], stride), vectors, coefficient, sums, K * n, n)
                    _all_columns(rows, ahead, full, K, (yes, yes, needs[2], needs[3]), task.fetches)
                if full < d:
                    _columns(rows, full, d - full, K, needs, no)
            if not few and is_full(r, r + here, start, stop, sums):
                flush(task.totals, task.errors, sums, size)
            r += here
        task = take_backward(block)


@inline
def _all_columns(rows, ahead, full, K, needs, fetches):
    """Of four rows; as they are read and written, the next four are asked for."""
    n = lanes(ahead[0])
    for j in range(0, full, n):
        if fetches:
            for line in range(4 * j, 4 * (j + n), 2 * n):
                prefetch(ahead[0], line)
                prefetch(ahead[1], line)
                prefetch_write(ahead[2], line)
        _columns(rows, j, n, K, needs, known(False))


@inline
def _columns(rows, j, count, K, needs, alone):
    """One register's width of four rows of dx0, or of one, and what they add to every sum."""
    x, g, dx, vectors, coefficient, sums, step, vector_step = rows
    n = lanes(vectors)
    need_dx0, need_dvectors, need_sum_of_g, has_g = needs
    x_j, g_j = load_four(x, j, count), four_times(zeros(vectors))
    if has_g:
        g_j = load_four(g, j, count)
    vector, row = at(vectors, j // n * step), at(sums, j * (K + 1))
    if need_sum_of_g:  # at once: the registers are few
        store(row, K * n, plain_sum(only_first(g_j, alone), load(row, K * n)))
    dx_j = scale_four(splat_four(at(coefficient, 4 * K)), g_j)
    for k in range(K):
        t = splat_four(at(coefficient, 4 * k))
        if need_dx0:
            dx_j = add_scaled(t, four_times(load_upto(vector, k * vector_step, count)), dx_j)
        if need_dvectors:
            t = only_first(t, alone)
            store(row, k * n, weighted_sum(t, only_first(x_j, alone), load(row, k * n)))
    if need_dx0:
        store_four(dx, j, dx_j, count)


def cross_network_finish(block):
    """The weights' gradients from the chunks' totals, completed by the terms in β."""
    task = first_backward(block)
    d, L, K, ends, like, n = task.d, task.L, task.K, task.ends, task.beta, lanes(task.beta)
    step = task.own_bytes // 8
    few = are_few(task.M, task.chunks, task.sums)
    if not few:
        join(task.totals, task.errors, task.chunks, (K + 1) * task.padded, task.own_bytes, like)
    for k in range(K):
        for i in range(1, 4 * task.chunks):  # a chunk has four sums, one for each place in a block
            place = i // 4 * step + 4 * k + i % 4
            add_exactly(ends, task.end_errors, 4 * k, ends[place])
            task.end_errors[4 * k] += task.end_errors[place]
        ends[4 * k] += task.end_errors[4 * k]
    for j in range(0, d, n):
        row, count = j * (K + 1), least(n, d - j)
        if task.need_dw or task.need_dv:
            beta = zeros_wide(like)
            for k in range(K):
                total = _total(task.totals, task.sums, row + k * n, few)
                gradient = narrow(fma_unless_zero(splat_wide(ends[4 * k], like), beta, total), like)
                if k >= L:
                    if task.need_dv:
                        store_upto(task.dv, (k - L) * d + j, gradient, count)
                else:
                    if task.need_dw:
                        store_upto(task.dw, k * d + j, gradient, count)
                    if task.has_b:
                        beta = add(beta, widen(load_upto(task.b, k * d + j, count)))
        if task.need_db:
            dbeta = _total(task.totals, task.sums, row + K * n, few)
            for k in range(task.C):
                dbeta = fma(splat_wide(ends[4 * (L + k)], like), widen(load_upto(task.v, k * d + j, count)), dbeta)
            for k in range(L - 1, -1, -1):
                store_upto(task.db, k * d + j, narrow(dbeta, like), count)
                dbeta = fma(splat_wide(ends[4 * k], like), widen(load_upto(task.w, k * d + j, count)), dbeta)


@inline
def _total(totals, sums, place, few):
    if few:
        return widen(load(sums, place))
    return load_wide(totals, place, sums)
