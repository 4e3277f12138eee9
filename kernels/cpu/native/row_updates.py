"""Updates of the rows of tables that gradients name, compiled by Numba.

Adam: m += (1-β₁)(g-m), v += (1-β₂)(g²-v), w -= rate m / (√v scale + ε), with the corrections of m̂ and v̂ in the rate and
in the scale. The next row is prefetched while one is updated, because nearly every row is a cache miss.
"""

from fastcross.kernels.cpu.native.embedding import prefetch_row
from fastcross.kernels.cpu.native.simd import at, pointer_to, square_root
from fastcross.kernels.cpu.native.unpack import take
from fastcross.kernels.cpu.row_updates import ADAM, SGD

take_sgd, take_adam = take(SGD), take(ADAM)


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
                        w_n[i] -= rate * m[i] / (square_root(v[i]) * scale + eps)
        task = take_adam(block)


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
