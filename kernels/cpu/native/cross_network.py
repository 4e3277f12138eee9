"""The cross network and its logits over a range of rows, compiled by Numba: the closed form in one pass over memory.

The K = L + C vectors are the layers' w_l, followed by the head's v_c:

    prepare    c_l = β_l·w_l;  β_{l+1} = β_l + b_l;  for the head β_L·v_c
    forward    p_k = x0·vector_k;  α_{l+1} = α_l (1 + p_l) + c_l;  y = α_L x0 + β_L  or  z_c = α_L q_c + β_L·v_c

A block of four rows is read from memory once: what follows the first touch finds it in cache. Bytes from memory per
row: 1 read + 1 write (logits: 1 read). ``cross_network_bwd.py`` has the way back.

For many rows the vectors are packed: column by column of one register's width, the K vectors' pieces side by side, in
the order in which the loops want them, and zero past d. Left as they are, rows of 4 KiB would fall on the same few
lines of the first cache and push each other out.
"""

from fastcross.kernels.cpu.cross_network import FORWARD, PREPARE
from fastcross.kernels.cpu.native.dots import dots_with_all, fetch, passes
from fastcross.kernels.cpu.native.fours import add_scaled, four_times, load_four, splat_four, store_four
from fastcross.kernels.cpu.native.numbers import each, numbers, put_column, put_numbers
from fastcross.kernels.cpu.native.simd import (
    add,
    at,
    fma,
    lanes,
    least,
    load,
    load_upto,
    load_wide,
    narrow,
    store,
    total,
    widen,
    zeros_wide,
)  # fmt: skip
from fastcross.kernels.cpu.native.unpack import first, take

first_prepare, take_forward = first(PREPARE), take(FORWARD)


def cross_network_prepare(block):
    """c_l, β_L·v_c and β_L; the packed vectors. Both betas are padded to whole vectors."""
    task = first_prepare(block)
    d, L, K, beta, prefix, n = task.d, task.L, task.K, task.beta, task.prefix, lanes(task.beta)
    for j in range(0, d, n):
        store(prefix, j, zeros_wide(beta))
    for k in range(K):
        vector = at(task.w, k * d) if k < L else at(task.v, (k - L) * d)
        dot = zeros_wide(beta)
        for j in range(0, d, n):
            count = least(n, d - j)
            piece = load_upto(vector, j, count)
            if task.packs:
                store(task.packed, j * K + k * n, piece)
            if task.has_b:
                beta_l = load_wide(prefix, j, beta)
                dot = fma(beta_l, widen(piece), dot)
                if k < L:
                    store(prefix, j, add(beta_l, widen(load_upto(task.b, k * d + j, count))))
        task.c[k] = total(dot)
    for j in range(0, d, n):
        store(beta, j, narrow(load_wide(prefix, j, beta), beta))


def cross_network_fwd(block):
    """Network (C = 0): y = α_L x0 + β_L. Logits: z_c = α_L q_c + β_L·v_c."""
    task = take_forward(block)
    while task.chunk < task.chunks:
        x0, y, p, c, beta, dots, one = task.x0, task.y, task.p, task.c, task.beta, task.dots, each(1)
        M, d, L, C, K, n = task.M, task.d, task.L, task.C, task.K, lanes(task.x0)
        r, stop = task.start, task.stop
        vectors, step, vector_step = (task.packed, K * n, n) if task.packs else (task.w, n, d)
        full = d - d % n
        # Of the next block, for each register's width of each of the passes below.
        share = 4 * n // (passes(K) + 1) if task.fetches else 0
        while r < stop:
            across, here = (1, 4) if r + 4 <= stop else (0, 1)
            x = (at(x0, r * task.stride_x0), across * task.stride_x0)
            x_ahead = at(x0, (r + 4) * task.stride_x0)
            y_ahead = x_ahead if C else at(y, (r + 4) * task.stride_y)
            ahead = dots_with_all(x, vectors, step, vector_step, d, K, dots, (x_ahead, y_ahead, share))
            alpha = one
            for k in range(L):
                alpha = fma(alpha, add(one, numbers(dots, k)), each(c[k]))
            put_numbers(task.alpha_L, 0, alpha)
            if task.keep_p:
                for k in range(K):
                    put_column((at(p, k * M + r), across), 0, numbers(dots, k))
            if C == 0:
                y_block, t = (at(y, r * task.stride_y), across * task.stride_y), splat_four(task.alpha_L)
                for j in range(0, full, n):
                    fetch(ahead, j)
                    store_four(y_block, j, add_scaled(t, load_four(x, j, n), four_times(load(beta, j))), n)
                if full < d:
                    values = add_scaled(t, load_four(x, full, d - full), four_times(load(beta, full)))
                    store_four(y_block, full, values, d - full)
            for k in range(C):
                z_k = fma(alpha, numbers(dots, L + k), each(c[L + k]))
                put_column((at(task.z, r * C), across * C), k, z_k)
            r += here
        task = take_forward(block)
