"""One cross layer over a range of rows, compiled by Numba.

    forward    s = x·w;  y = x0 s + b + x
    backward   s = x·w,  ds = g·x0;  dx0 = s g;  dx = g + ds w;  dw = Σ_rows ds x;  db = Σ_rows g

A block of four rows is read from memory once. Bytes from memory per row: forward 2 reads + 1 write, backward 3 reads +
2 writes.
"""

from numba import carray

from fastcross.kernels.cpu.blocks import (
    BLOCK_ROWS,
    add_scaled,
    block_for,
    block_of,
    copy_rows,
    dots_of_pairs,
    dots_with_one,
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
from fastcross.kernels.cpu.simd import add, at, inline, lanes, load, load_upto, store, zeros
from fastcross.kernels.cpu.tasks import arguments, next_chunk


def cross_layer_fwd(task):
    (
        x0, x, w, b, y, scratch,
        chunks, rows, own, M, d, stride_x0, stride_x, stride_y, has_bias,
    ) = arguments(task, 6, 0, 9)  # fmt: skip
    chunk = next_chunk(task)
    while chunk < chunks:
        start, stop = chunk * rows, min(chunk * rows + rows, M)
        _forward(x0, x, w, b, y, at(scratch, chunk * own), start, stop, d, stride_x0, stride_x, stride_y, has_bias)
        chunk = next_chunk(task)


@inline
def _forward(x0, x, w, b, y, scratch, start, stop, d, stride_x0, stride_x, stride_y, has_bias):
    """``scratch``: s (4), three blocks of rows."""
    n = lanes(x0)
    full, padded = d - d % n, -(-d // n) * n
    spare_x0, spare_x, spare_y = at(scratch, 4), at(scratch, 4 + 4 * padded), at(scratch, 4 + 8 * padded)
    for r in range(start, stop, 4):
        x_block = block_of(x, r, stop, stride_x, spare_x, padded, d)
        x0_block = block_of(x0, r, stop, stride_x0, spare_x0, padded, d)
        y_block = block_for(y, r, stop, stride_y, spare_y, padded)
        # The rows of x0 come while x is multiplied, the next rows of x by themselves.
        dots_with_one(x_block, w, n, d, scratch, (at(x0, r * stride_x0), at(y, r * stride_y), 4 * n))
        for j in range(0, full, n):
            _forward_columns(x0_block, x_block, b, y_block, scratch, j, n, has_bias)
        if full < d:
            _forward_columns(x0_block, x_block, b, y_block, scratch, full, d - full, has_bias)
        if r + 4 > stop:
            copy_rows(at(y, r * stride_y), stride_y, spare_y, padded, stop - r, d)


@inline
def _forward_columns(x0, x, b, y, s, j, count, has_bias):
    bias = load_upto(b, j, count) if has_bias else zeros(s)
    x_j = load_four(x, j, count)
    x_j = add(x_j[0], bias), add(x_j[1], bias), add(x_j[2], bias), add(x_j[3], bias)
    store_four(y, j, add_scaled(splat_four(s), load_four(x0, j, count), x_j), count)


def cross_layer_bwd(task):
    (
        dy, x0, x, w, dx0, dx, scratch, totals,
        chunks, rows, own, own_totals, M, d, stride_dy, stride_x0, stride_x, stride_dx0, stride_dx,
        need_dx0, need_dx, need_dw, need_db,
    ) = arguments(task, 7, 1, 15)  # fmt: skip
    chunk = next_chunk(task)
    while chunk < chunks:
        start, stop = chunk * rows, min(chunk * rows + rows, M)
        _backward(
            dy, x0, x, w, dx0, dx, at(scratch, chunk * own), at(totals, chunk * own_totals),
            start, stop, d, stride_dy, stride_x0, stride_x, stride_dx0, stride_dx, need_dx0, need_dx, need_dw, need_db,
        )  # fmt: skip
        chunk = next_chunk(task)


@inline
def _backward(
    dy, x0, x, w, dx0, dx, scratch, totals,
    start, stop, d, stride_dy, stride_x0, stride_x, stride_dx0, stride_dx, need_dx0, need_dx, need_dw, need_db,
):  # fmt: skip
    """``totals``, in float64, and the sums in ``scratch`` before them: dw and db, packed (2, lanes) by columns.

    ``scratch``: s (4), ds (4), five blocks of rows, the sums.
    """
    n = lanes(x0)
    full, padded = d - d % n, -(-d // n) * n
    s, ds, spare_g, size = scratch, at(scratch, 4), at(scratch, 8), 4 * padded
    spare_x0, spare_x = at(spare_g, size), at(spare_g, 2 * size)
    spare_dx0, spare_dx, sums = at(spare_g, 3 * size), at(spare_g, 4 * size), at(spare_g, 5 * size)
    for j in range(0, 2 * padded, n):
        store(sums, j, zeros(x0))
    if start == stop:
        flush(totals, sums, 2 * padded, True)
    needs = (need_dx0, need_dx, need_dw, need_db)
    for r in range(start, stop, 4):
        g_block = block_of(dy, r, stop, stride_dy, spare_g, padded, d)
        x_block = block_of(x, r, stop, stride_x, spare_x, padded, d)
        dx0_block = block_for(dx0, r, stop, stride_dx0, spare_dx0, padded)
        dx_block = block_for(dx, r, stop, stride_dx, spare_dx, padded)
        if need_dx or need_dw:
            dots_of_pairs(g_block, block_of(x0, r, stop, stride_x0, spare_x0, padded, d), d, ds)
        if need_dx0:
            dots_with_one(x_block, w, n, d, s, (at(x, (r + 4) * stride_x), at(dx0, r * stride_dx0), 4 * n))
        for j in range(0, full, n):
            _backward_columns(g_block, x_block, w, dx0_block, dx_block, scratch, sums, j, n, needs)
        if full < d:
            _backward_columns(g_block, x_block, w, dx0_block, dx_block, scratch, sums, full, d - full, needs)
        if r + 4 > stop:
            if need_dx0:
                copy_rows(at(dx0, r * stride_dx0), stride_dx0, spare_dx0, padded, stop - r, d)
            if need_dx:
                copy_rows(at(dx, r * stride_dx), stride_dx, spare_dx, padded, stop - r, d)
        if (r - start) % BLOCK_ROWS == BLOCK_ROWS - 4 or r + 4 >= stop:
            flush(totals, sums, 2 * padded, r - start < BLOCK_ROWS)


@inline
def _backward_columns(g_block, x_block, w, dx0, dx, scratch, sums, j, count, needs):
    need_dx0, need_dx, need_dw, need_db = needs
    n, g, ds = lanes(w), load_four(g_block, j, count), splat_four(at(scratch, 4))
    if need_dx0:
        store_four(dx0, j, scale_four(splat_four(scratch), g), count)
    if need_dx:
        store_four(dx, j, add_scaled(ds, four_times(load_upto(w, j, count)), g), count)
    if need_dw:
        store(sums, 2 * j, weighted_sum(ds, load_four(x_block, j, count), load(sums, 2 * j)))
    if need_db:
        store(sums, 2 * j + n, plain_sum(g, load(sums, 2 * j + n)))


def cross_layer_finish(task):
    """dw and db from the chunks' totals."""
    dw, db, totals, chunks, d, need_dw, need_db = arguments(task, 2, 1, 4)
    n = lanes(dw)
    size = 2 * (-(-d // n) * n)
    join(totals, chunks, size)
    values, dw_all, db_all = carray(totals, (size,)), carray(dw, (d,)), carray(db, (d,))
    for j in range(d):
        at_dw = 2 * (j - j % n) + j % n
        if need_dw:
            dw_all[j] = values[at_dw]
        if need_db:
            db_all[j] = values[at_dw + n]
