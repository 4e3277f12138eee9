"""One cross layer over a range of rows, compiled by Numba.

    forward    s = x·w;  y = x0 s + b + x
    backward   s = x·w,  ds = g·x0;  dx0 = s g;  dx = g + ds w;  dw = Σ_rows ds x;  db = Σ_rows g

A block of four rows is read from memory once. Bytes from memory per row: forward 2 reads + 1 write, backward 3 reads +
2 writes.
"""

from fastcross.kernels.cpu.cross_layer import BACKWARD, FORWARD
from fastcross.kernels.cpu.native.blocks import (
    block_for,
    block_of,
    clear,
    copy_rows,
    dots_of_pairs,
    dots_with_one,
    flush,
    is_full,
    join,
)  # fmt: skip
from fastcross.kernels.cpu.native.fours import (
    add_four,
    add_scaled,
    four_times,
    load_four,
    plain_sum,
    scale_four,
    splat_four,
    store_four,
    weighted_sum,
)  # fmt: skip
from fastcross.kernels.cpu.native.simd import at, inline, is_double, lanes, load, load_upto, store, zeros
from fastcross.kernels.cpu.native.unpack import first, take

take_forward, take_backward, first_backward = take(FORWARD), take(BACKWARD), first(BACKWARD)


def cross_layer_fwd(block):
    task = take_forward(block)
    while task.chunk < task.chunks:
        x0, x, w, b, y, s, d, padded = task.x0, task.x, task.w, task.b, task.y, task.s, task.d, task.padded
        n = lanes(x0)
        full = d - d % n
        for r in range(task.start, task.stop, 4):
            x_block = block_of(x, r, task.stop, task.stride_x, task.spare_x, padded, d)
            x0_block = block_of(x0, r, task.stop, task.stride_x0, task.spare_x0, padded, d)
            y_block = block_for(y, r, task.stop, task.stride_y, task.spare_y, padded)
            # The rows of x0 come while x is multiplied, the next rows of x by themselves.
            dots_with_one(x_block, w, n, d, s, (at(x0, r * task.stride_x0), at(y, r * task.stride_y), 4 * n))
            for j in range(0, full, n):
                _forward_columns(x0_block, x_block, b, y_block, s, j, n, task.has_b)
            if full < d:
                _forward_columns(x0_block, x_block, b, y_block, s, full, d - full, task.has_b)
            if r + 4 > task.stop:
                copy_rows(at(y, r * task.stride_y), task.stride_y, task.spare_y, padded, task.stop - r, d)
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
        full = d - d % n
        clear(sums, 2 * padded)
        clear(task.totals, 2 * padded)
        if is_double(sums):
            clear(task.errors, 2 * padded)
        needs = (task.need_dx0, task.need_dx, task.need_dw, task.need_db)
        for r in range(start, stop, 4):
            g = block_of(task.dy, r, stop, task.stride_dy, task.spare_g, padded, d)
            x = block_of(task.x, r, stop, task.stride_x, task.spare_x, padded, d)
            dx0 = block_for(task.dx0, r, stop, task.stride_dx0, task.spare_dx0, padded)
            dx = block_for(task.dx, r, stop, task.stride_dx, task.spare_dx, padded)
            if task.need_dx or task.need_dw:
                dots_of_pairs(g, block_of(task.x0, r, stop, task.stride_x0, task.spare_x0, padded, d), d, task.ds)
            if task.need_dx0:
                ahead = (at(task.x, (r + 4) * task.stride_x), at(task.dx0, r * task.stride_dx0), 4 * n)
                dots_with_one(x, task.w, n, d, task.s, ahead)
            for j in range(0, full, n):
                _backward_columns(g, x, task.w, dx0, dx, task.s, task.ds, sums, j, n, needs)
            if full < d:
                _backward_columns(g, x, task.w, dx0, dx, task.s, task.ds, sums, full, d - full, needs)
            if r + 4 > stop:
                if task.need_dx0:
                    copy_rows(at(task.dx0, r * task.stride_dx0), task.stride_dx0, task.spare_dx0, padded, stop - r, d)
                if task.need_dx:
                    copy_rows(at(task.dx, r * task.stride_dx), task.stride_dx, task.spare_dx, padded, stop - r, d)
            if is_full(r, start, stop, sums):
                flush(task.totals, task.errors, sums, 2 * padded)
        task = take_backward(block)


@inline
def _backward_columns(g_block, x_block, w, dx0, dx, s, ds, sums, j, count, needs):
    need_dx0, need_dx, need_dw, need_db = needs
    n, g, ds = lanes(w), load_four(g_block, j, count), splat_four(ds)
    if need_dx0:
        store_four(dx0, j, scale_four(splat_four(s), g), count)
    if need_dx:
        store_four(dx, j, add_scaled(ds, four_times(load_upto(w, j, count)), g), count)
    if need_dw:
        store(sums, 2 * j, weighted_sum(ds, load_four(x_block, j, count), load(sums, 2 * j)))
    if need_db:
        store(sums, 2 * j + n, plain_sum(g, load(sums, 2 * j + n)))


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
