"""One cross layer over a range of rows, compiled by Numba.

    forward    s = x·w;  y = x0 s + b + x
    backward   s = x·w,  ds = g·x0;  dx0 = s g;  dx = g + ds w;  dw = Σ_rows ds x;  db = Σ_rows g

A block of four rows is read from memory once. Bytes from memory per row: forward 2 reads + 1 write, backward 3 reads +
2 writes.
"""

from fastcross.kernels.cpu.cross_layer import BACKWARD, FORWARD
from fastcross.kernels.cpu.native.dots import dots_of_pairs, dots_with_one
from fastcross.kernels.cpu.native.fours import (
    add_four,
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
from fastcross.kernels.cpu.native.simd import at, inline, is_double, known, lanes, least, load, load_upto, store, zeros
from fastcross.kernels.cpu.native.sums import clear, flush, is_full, join
from fastcross.kernels.cpu.native.unpack import first, take

take_forward, take_backward, first_backward = take(FORWARD), take(BACKWARD), first(BACKWARD)


def cross_layer_fwd(block):
    task = take_forward(block)
    while task.chunk < task.chunks:
        x0, x, w, b, y, s, d, n = task.x0, task.x, task.w, task.b, task.y, task.s, task.d, lanes(task.x0)
        r, stop, full = task.start, task.stop, d - d % n
        while r < stop:
            across, here = (1, 4) if r + 4 <= stop else (0, 1)
            x_block = (at(x, r * task.stride_x), across * task.stride_x)
            x0_block = (at(x0, r * task.stride_x0), across * task.stride_x0)
            y_block = (at(y, r * task.stride_y), across * task.stride_y)
            # The rows of x0 come while x is multiplied, the next rows of x by themselves.
            dots_with_one(x_block, w, n, 0, d, s, (x0_block[0], y_block[0], here * n))
            for j in range(0, full, n):
                _forward_columns(x0_block, x_block, b, y_block, s, j, n, task.has_b)
            if full < d:
                _forward_columns(x0_block, x_block, b, y_block, s, full, d - full, task.has_b)
            r += here
        task = take_forward(block)


@inline
def _forward_columns(x0, x, b, y, s, j, count, has_bias):
    bias = load_upto(b, j, count) if has_bias else zeros(s)
    x_j = add_four(load_four(x, j, count), four_times(bias))
    store_four(y, j, add_scaled(splat_four(s), load_four(x0, j, count), x_j), count)


def cross_layer_bwd(block):
    task = take_backward(block)
    while task.chunk < task.chunks:
        start, stop, d, padded, sums = task.start, task.stop, task.d, task.padded, task.sums
        n = lanes(sums)
        r, full = start, d - d % n
        clear(sums, 2 * padded)
        clear(task.totals, 2 * padded)
        if is_double(sums):
            clear(task.errors, 2 * padded)
        needs, yes, no = (task.need_dx0, task.need_dx, task.need_dw, task.need_db), known(True), known(False)
        while r < stop:
            across, here = (1, 4) if r + 4 <= stop else (0, 1)
            g = (at(task.dy, r * task.stride_dy), across * task.stride_dy)
            x = (at(task.x, r * task.stride_x), across * task.stride_x)
            dx0 = (at(task.dx0, r * task.stride_dx0), across * task.stride_dx0)
            dx = (at(task.dx, r * task.stride_dx), across * task.stride_dx)
            if task.need_dx or task.need_dw:
                x0 = (at(task.x0, r * task.stride_x0), across * task.stride_x0)
                dots_of_pairs(g, x0, d, task.ds)
            if task.need_dx0:
                ahead = (at(task.x, (r + 4) * task.stride_x), dx0[0], here * n)
                dots_with_one(x, task.w, n, 0, d, task.s, ahead)
            if here == 4:
                for j in range(0, full, n):
                    _backward_columns(g, x, task.w, dx0, dx, task.s, task.ds, sums, j, n, needs, no)
                if full < d:
                    _backward_columns(g, x, task.w, dx0, dx, task.s, task.ds, sums, full, d - full, needs, no)
            else:
                for j in range(0, d, n):
                    count = least(n, d - j)
                    _backward_columns(g, x, task.w, dx0, dx, task.s, task.ds, sums, j, count, needs, yes)
            if is_full(r, r + here, start, stop, sums):
                flush(task.totals, task.errors, sums, 2 * padded)
            r += here
        task = take_backward(block)


@inline
def _backward_columns(g_block, x_block, w, dx0, dx, s, ds, sums, j, count, needs, alone):
    """One register's width of four rows of dx0 and dx, or of one, and what they add to dw and db."""
    need_dx0, need_dx, need_dw, need_db = needs
    n, g, ds = lanes(w), load_four(g_block, j, count), splat_four(ds)
    if need_dx0:
        store_four(dx0, j, scale_four(splat_four(s), g), count)
    if need_dx:
        store_four(dx, j, add_scaled(ds, four_times(load_upto(w, j, count)), g), count)
    if need_dw:
        x = only_first(load_four(x_block, j, count), alone)
        store(sums, 2 * j, weighted_sum(only_first(ds, alone), x, load(sums, 2 * j)))
    if need_db:
        store(sums, 2 * j + n, plain_sum(only_first(g, alone), load(sums, 2 * j + n)))


def cross_layer_finish(block):
    """dw and db from the chunks' totals."""
    task = first_backward(block)
    n, totals, dw, db = lanes(task.sums), task.totals, task.dw, task.db
    join(totals, task.errors, task.chunks, 2 * task.padded, task.own_bytes, task.sums)
    for j in range(task.d):
        place = 2 * (j - j % n) + j % n
        if task.need_dw:
            dw[j] = totals[place]
        if task.need_db:
            db[j] = totals[place + n]
