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
from fastcross.kernels.cpu.layout import Layout, real, rows, whole, wide
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

# Rows from which on packing the vectors costs less than it saves.
PACK_ROWS = 16

_DERIVED = {
    "K": lambda n: n.L + n.C,
    "width": lambda n: n.C or n.d,  # of the output
    "padded": lambda n: -(-n.d // n.lanes) * n.lanes,
    "packs": lambda n: n.M >= PACK_ROWS or n.C > 0,  # with a head, to have all vectors in one place
}
_PARAMETERS = {"w": whole("L", "d"), "v": whole("C", "d", when="C"), "b": whole("L", "d", when="has_bias")}
_PREPARED = {
    "c": wide(lambda n: n.K),  # c_l, then β_L·v_c
    "prefix": wide(lambda n: n.padded),  # β_l
    "beta": real(lambda n: n.padded),  # β_L
    "packed": real(lambda n: n.K * n.padded if n.packs else 0),
}

FORWARD = Layout(
    "cross_network_fwd",
    items="M",
    work=lambda n: (n.K + 1) * n.d,
    operands={
        "x0": rows("M", "d"),
        **_PARAMETERS,
        "out": rows("M", "width"),
        "p": whole("K", "M", when="keep_p"),
    },
    sizes=("M", "d", "L", "C", "has_bias", "keep_p"),
    derived=_DERIVED,
    shared=_PREPARED,
    own={
        "dots": real(lambda n: 4 * n.K),  # p, for the rows of a block
        "alpha_L": real(lambda n: 4),
        "alpha": wide(lambda n: 4),
        "spare_x": real(lambda n: 4 * n.padded),
        "spare_y": real(lambda n: 4 * n.padded),
    },
)
BACKWARD = Layout(
    "cross_network_bwd",
    items="M",
    work=lambda n: (2 * n.K + 3) * n.d,
    operands={
        "dout": rows("M", "width"),
        "x0": rows("M", "d"),
        **_PARAMETERS,
        "p": whole("K", "M"),
        "dx0": rows("M", "d", when="need_dx0"),
        "dw": whole("L", "d", when="need_dw"),
        "dv": whole("C", "d", when="need_dv"),
        "db": whole("L", "d", when="need_db"),
    },
    sizes=("M", "d", "L", "C", "has_bias", "need_dx0", "need_dw", "need_db", "need_dv"),
    derived=_DERIVED,
    shared=_PREPARED,
    own={
        "coefficient": real(lambda n: 4 * (n.K + 1)),  # dp_l, dq_c and α_L, for the rows of a block
        "alpha": wide(lambda n: 4 * (n.L + 1)),
        "a": wide(lambda n: 4),
        "spare_x": real(lambda n: 4 * n.padded),
        "spare_g": real(lambda n: 4 * n.padded),
        "spare_dx": real(lambda n: 4 * n.padded),
        "sums": real(lambda n: (n.K + 1) * n.padded),  # packed like the vectors, Σ g last
        "totals": wide(lambda n: (n.K + 1) * n.padded),
        "ends": wide(lambda n: n.K),  # dc_l, Σ dz_c
    },
)
take_forward, first_forward = FORWARD.take, FORWARD.first
take_backward, first_backward = BACKWARD.take, BACKWARD.first


def cross_network_fwd_prepare(block):
    _prepare(first_forward(block))


def cross_network_bwd_prepare(block):
    _prepare(first_backward(block))


@inline
def _prepare(task):
    """c_l, β_L·v_c and β_L; the packed vectors. Both betas are padded to whole vectors."""
    d, beta, prefix, n = task.d, task.beta, task.prefix, lanes(task.beta)
    for j in range(0, d, n):
        store(prefix, j, widen(zeros(beta)))
    for k in range(task.K):
        vector = at(task.w, k * d) if k < task.L else at(task.v, (k - task.L) * d)
        task.c[k] = 0
        if task.has_bias:
            dot = widen(zeros(beta))
            for j in range(0, d, n):
                count, beta_l = min(n, d - j), load_wide(prefix, j, beta)
                dot = fma(beta_l, widen(load_upto(vector, j, count)), dot)
                if k < task.L:
                    store(prefix, j, add(beta_l, widen(load_upto(task.b, k * d + j, count))))
            task.c[k] = total(dot)
        if task.packs:
            for j in range(0, d, n):
                store(task.packed, j * task.K + k * n, load_upto(vector, j, min(n, d - j)))
    for j in range(0, d, n):
        store(beta, j, narrow(load_wide(prefix, j, beta), beta))


def cross_network_fwd(block):
    """Network (C = 0): y = α_L x0 + β_L. Logits: z_c = α_L q_c + β_L·v_c."""
    task = take_forward(block)
    while task.chunk < task.chunks:
        x0, out, p, c, beta, alpha, dots, spare_x, spare_y = (
            task.x0, task.out, task.p, task.c, task.beta, task.alpha, task.dots, task.spare_x, task.spare_y
        )  # fmt: skip
        M, d, L, C, K, padded, n = task.M, task.d, task.L, task.C, task.K, task.padded, lanes(task.x0)
        start, stop = task.start, task.stop
        vectors, step, vector_step = (task.packed, K * n, n) if task.packs else (task.w, n, d)
        full = d - d % n
        share = 4 * n // (-(-K // 2) + 1)  # of the next block, for each register's width of each of the passes below
        for r in range(start, stop, 4):
            x = block_of(x0, r, stop, task.stride_x0, spare_x, padded, d)
            x_ahead = at(x0, (r + 4) * task.stride_x0)
            y_ahead = x_ahead if C else at(out, (r + 4) * task.stride_out)
            for k in range(0, K, 2):
                ahead = (x_ahead, y_ahead, share)
                vector, p_block = at(vectors, k * vector_step), at(dots, 4 * k)
                if k + 1 < K:
                    dots_with_two(x, vector, step, vector_step, d, p_block, ahead)
                else:
                    dots_with_one(x, vector, step, d, p_block, ahead)
                x_ahead, y_ahead = at(x_ahead, full // n * share), at(y_ahead, full // n * share)
            for i in range(4):
                alpha[i] = 1
            for k in range(L):
                for i in range(4):
                    alpha[i] = alpha[i] * (1 + dots[4 * k + i]) + c[k]
            for i in range(4):
                task.alpha_L[i] = alpha[i]
            here = min(4, stop - r)
            if task.keep_p:
                for k in range(K):
                    for i in range(here):
                        p[k * M + r + i] = dots[4 * k + i]
            if C == 0:
                y, t = block_for(out, r, stop, task.stride_out, spare_y, padded), splat_four(task.alpha_L)
                for j in range(0, full, n):
                    fetch((x_ahead, y_ahead, share), j)
                    store_four(y, j, add_scaled(t, load_four(x, j, n), four_times(load(beta, j))), n)
                if full < d:
                    values = add_scaled(t, load_four(x, full, d - full), four_times(load(beta, full)))
                    store_four(y, full, values, d - full)
                if here < 4:
                    copy_rows(at(out, r * task.stride_out), task.stride_out, spare_y, padded, here, d)
            for k in range(C):
                for i in range(here):
                    out[(r + i) * task.stride_out + k] = alpha[i] * dots[4 * (L + k) + i] + c[L + k]
        task = take_forward(block)


def cross_network_bwd(block):
    task = take_backward(block)
    while task.chunk < task.chunks:
        dout, x0, dx0, p, c, alpha, a, coefficient, sums, ends = (
            task.dout, task.x0, task.dx0, task.p, task.c, task.alpha, task.a, task.coefficient, task.sums, task.ends
        )  # fmt: skip
        M, d, L, C, K, padded, n = task.M, task.d, task.L, task.C, task.K, task.padded, lanes(task.x0)
        start, stop = task.start, task.stop
        vectors, step, vector_step = (task.packed, K * n, n) if task.packs else (task.w, n, d)
        full, size = d - d % n, (K + 1) * padded
        for j in range(0, padded, n):
            store(task.spare_g, j, zeros(x0))
        for j in range(0, size, n):
            store(sums, j, zeros(x0))
        if start == stop:
            flush(task.totals, sums, size, True)
        for k in range(K):
            ends[k] = 0
        needs = (task.need_dx0, task.need_dw or task.need_dv, task.need_db and C == 0)
        for r in range(start, stop, 4):
            here = min(4, stop - r)
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
                    alpha[4 * (k + 1) + i] = alpha[4 * k + i] * (1 + p[k * M + r + i]) + c[k]
            for k in range(K + 1):
                for i in range(here, 4):
                    coefficient[4 * k + i] = 0
            for i in range(here):
                coefficient[4 * K + i] = alpha[4 * L + i] if C == 0 else 0
                for k in range(C):
                    dz = dout[(r + i) * task.stride_dout + k]
                    a[i] += dz * p[(L + k) * M + r + i]
                    ends[L + k] += dz
                    coefficient[4 * (L + k) + i] = alpha[4 * L + i] * dz
            for k in range(L - 1, -1, -1):
                for i in range(here):
                    coefficient[4 * k + i] = a[i] * alpha[4 * k + i]
                    ends[k] += a[i]
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
            if (r - start) % BLOCK_ROWS == BLOCK_ROWS - 4 or r + 4 >= stop:
                flush(task.totals, sums, size, r - start < BLOCK_ROWS)
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
    join(totals, task.chunks, (K + 1) * task.padded, task.own_bytes)
    join(ends, task.chunks, K, task.own_bytes)
    for j in range(0, d, n):
        row, count = at(totals, j * (K + 1)), min(n, d - j)
        if task.need_dw or task.need_dv:
            beta = widen(zeros(like))
            for k in range(K):
                gradient = narrow(fma(splat_wide(ends[k], like), beta, load_wide(row, k * n, like)), like)
                if k >= L:
                    if task.need_dv:
                        store_upto(task.dv, (k - L) * d + j, gradient, count)
                else:
                    if task.need_dw:
                        store_upto(task.dw, k * d + j, gradient, count)
                    if task.has_bias:
                        beta = add(beta, widen(load_upto(task.b, k * d + j, count)))
        if task.need_db:
            dbeta = load_wide(row, K * n, like)
            for k in range(task.C):
                dbeta = fma(splat_wide(ends[L + k], like), widen(load_upto(task.v, k * d + j, count)), dbeta)
            for k in range(L - 1, -1, -1):
                store_upto(task.db, k * d + j, narrow(dbeta, like), count)
                dbeta = fma(splat_wide(ends[k], like), widen(load_upto(task.w, k * d + j, count)), dbeta)
