"""Updates of the rows of tables that gradients name, compiled by Numba.

Adam: m += (1-β₁)(g-m), v += (1-β₂)(g²-v), w -= rate m / (√v scale + ε), with the corrections of m̂ and v̂ in the rate
and in the scale; AdamW first w *= shrink, which is 1 for Adam. Adagrad: s += g², w -= rate g / (√s + ε); row-wise, s is
one number for each row, and the mean of its g² is added. The next row is prefetched while one is updated, because
nearly every row is a cache miss.
"""

from fastcross.kernels.cpu.native.embedding import prefetch_row
from fastcross.kernels.cpu.native.simd import at, pointer_to, square_root
from fastcross.kernels.cpu.native.unpack import take
from fastcross.kernels.cpu.row_updates import ADAGRAD, ADAM, SGD

take_sgd, take_adam, take_adagrad = take(SGD), take(ADAM), take(ADAGRAD)


def adam_rows(block):
    task = take_adam(block)
    while task.chunk < task.chunks:
        rate, decay1, decay2, scale, eps = task.rate, task.decay1, task.decay2, task.scale, task.eps
        for k in range(task.K):
            N, width, height = task.counts[k], task.widths[k], task.heights[k]
            rows, g = pointer_to(task.rows[k], task.rows), pointer_to(task.g[k], block)
            w, first, second = (
                pointer_to(task.w[k], block), pointer_to(task.first[k], block), pointer_to(task.second[k], block)
            )  # fmt: skip
            start, stop = task.start * N // task.shares, task.stop * N // task.shares
            for n in range(start, stop):
                if n + 1 < stop:
                    ahead = rows[n + 1] * width
                    prefetch_row(at(w, ahead), width)
                    prefetch_row(at(first, ahead), width)
                    prefetch_row(at(second, ahead), width)
                if 0 <= rows[n] < height:
                    here = rows[n] * width
                    w_n, m, v, g_n = at(w, here), at(first, here), at(second, here), at(g, n * width)
                    for i in range(width):
                        m[i] += decay1 * (g_n[i] - m[i])
                        v[i] += decay2 * (g_n[i] * g_n[i] - v[i])
                        w_n[i] = task.shrink * w_n[i] - rate * m[i] / (square_root(v[i]) * scale + eps)
        task = take_adam(block)


def adagrad_rows(block):
    task = take_adagrad(block)
    while task.chunk < task.chunks:
        rate, eps = task.rate, task.eps
        for k in range(task.K):
            N, width, height = task.counts[k], task.widths[k], task.heights[k]
            rows, w, g = pointer_to(task.rows[k], task.rows), pointer_to(task.w[k], block), pointer_to(task.g[k], block)
            sums, columns = pointer_to(task.sums[k], block), 1 if task.row_wise else width
            start, stop = task.start * N // task.shares, task.stop * N // task.shares
            for n in range(start, stop):
                if n + 1 < stop:
                    prefetch_row(at(w, rows[n + 1] * width), width)
                    prefetch_row(at(sums, rows[n + 1] * columns), columns)
                if 0 <= rows[n] < height:
                    w_n, g_n, s = at(w, rows[n] * width), at(g, n * width), at(sums, rows[n] * columns)
                    if task.row_wise:
                        total = 0 * eps
                        for i in range(width):
                            total += g_n[i] * g_n[i]
                        s[0] += total / width
                        for i in range(width):
                            w_n[i] -= rate * g_n[i] / (square_root(s[0]) + eps)
                    else:
                        for i in range(width):
                            s[i] += g_n[i] * g_n[i]
                            w_n[i] -= rate * g_n[i] / (square_root(s[i]) + eps)
        task = take_adagrad(block)


def sgd_rows(block):
    task = take_sgd(block)
    while task.chunk < task.chunks:
        rate = task.rate
        for k in range(task.K):
            N, width, height = task.counts[k], task.widths[k], task.heights[k]
            rows, w, g = pointer_to(task.rows[k], task.rows), pointer_to(task.w[k], block), pointer_to(task.g[k], block)
            for n in range(task.start * N // task.shares, task.stop * N // task.shares):
                if 0 <= rows[n] < height:
                    w_n, g_n = at(w, rows[n] * width), at(g, n * width)
                    for i in range(width):
                        w_n[i] -= rate * g_n[i]
        task = take_sgd(block)
