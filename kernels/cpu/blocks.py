"""What the CPU kernels share: blocks of four rows, their dots with vectors, sums over rows.

A block is a pointer to its first row and the stride to the next; its four rows are read from memory once, and meet each
vector in registers, which is loaded once for all four. The last rows of a range, fewer than four, are copied into a
block of their own. Sums over rows run in the storage dtype for ``BLOCK_ROWS`` rows and in float64 across them.
"""

from fastcross.kernels.cpu.simd import (
    add,
    at,
    fma,
    inline,
    lanes,
    load_upto,
    mul,
    prefetch,
    prefetch_write,
    splat,
    store,
    store_upto,
    total,
    zeros,
)  # fmt: skip

BLOCK_ROWS = 128


@inline
def block_of(x, r, stop, stride, spare, padded, d):
    """The block of rows r … r + 3: in place, or copied to ``spare`` where there are fewer, the missing ones zero."""
    if r + 4 <= stop:
        return at(x, r * stride), stride
    for j in range(0, 4 * padded, lanes(x)):
        store(spare, j, zeros(x))
    copy_rows(spare, padded, at(x, r * stride), stride, stop - r, d)
    return spare, padded


@inline
def block_for(y, r, stop, stride, spare, padded):
    """Where to write the block of rows r … r + 3; what is written to ``spare`` is to be copied."""
    if r + 4 <= stop:
        return at(y, r * stride), stride
    return spare, padded


@inline
def copy_rows(y, stride_y, x, stride_x, rows, d):
    for i in range(rows):
        for j in range(0, d, lanes(x)):
            count = min(lanes(x), d - j)
            store_upto(y, i * stride_y + j, load_upto(x, i * stride_x + j, count), count)


@inline
def load_four(block, j, count):
    x, stride = block
    return (
        load_upto(x, j, count),
        load_upto(x, stride + j, count),
        load_upto(x, 2 * stride + j, count),
        load_upto(x, 3 * stride + j, count),
    )


@inline
def store_four(block, j, values, count):
    y, stride = block
    store_upto(y, j, values[0], count)
    store_upto(y, stride + j, values[1], count)
    store_upto(y, 2 * stride + j, values[2], count)
    store_upto(y, 3 * stride + j, values[3], count)


@inline
def splat_four(values):
    """Four scalars, each in every lane of a vector."""
    return splat(values, 0), splat(values, 1), splat(values, 2), splat(values, 3)


@inline
def scale_four(t, x):
    """t_i x_i."""
    return mul(t[0], x[0]), mul(t[1], x[1]), mul(t[2], x[2]), mul(t[3], x[3])


@inline
def add_scaled(t, x, y):
    """t_i x_i + y_i."""
    return fma(t[0], x[0], y[0]), fma(t[1], x[1], y[1]), fma(t[2], x[2], y[2]), fma(t[3], x[3], y[3])


@inline
def four_times(x):
    return x, x, x, x


@inline
def weighted_sum(t, x, start):
    """start + Σ_i t_i x_i."""
    return add(fma(t[0], x[0], mul(t[1], x[1])), fma(t[2], x[2], fma(t[3], x[3], start)))


@inline
def plain_sum(x, start):
    """start + Σ_i x_i."""
    return add(add(x[0], x[1]), add(add(x[2], x[3]), start))


@inline
def dots_with_one(block, vector, step, d, out, ahead):
    """out_i = row_i·vector; ``step`` elements lie between the vector's pieces of ``lanes`` columns."""
    n = lanes(vector)
    full, k = d - d % n, 0
    s = four_times(zeros(vector))
    for j in range(0, full, n):
        fetch(ahead, j)
        s = add_scaled(four_times(load_upto(vector, k, n)), load_four(block, j, n), s)
        k += step
    if full < d:
        s = add_scaled(four_times(load_upto(vector, k, d - full)), load_four(block, full, d - full), s)
    put_totals(out, s)


@inline
def dots_with_two(block, vectors, step, vector_step, d, out, ahead):
    """The dots with two vectors, ``vector_step`` elements apart; ``out`` is (2, 4)."""
    n = lanes(vectors)
    full, k = d - d % n, 0
    s, t = four_times(zeros(vectors)), four_times(zeros(vectors))
    for j in range(0, full, n):
        fetch(ahead, j)
        x = load_four(block, j, n)
        s = add_scaled(four_times(load_upto(vectors, k, n)), x, s)
        t = add_scaled(four_times(load_upto(vectors, k + vector_step, n)), x, t)
        k += step
    if full < d:
        x = load_four(block, full, d - full)
        s = add_scaled(four_times(load_upto(vectors, k, d - full)), x, s)
        t = add_scaled(four_times(load_upto(vectors, k + vector_step, d - full)), x, t)
    put_totals(out, s)
    put_totals(at(out, 4), t)


@inline
def dots_of_pairs(block, other, d, out):
    """out_i = row_i·other_i."""
    n = lanes(out)
    full = d - d % n
    s = four_times(zeros(out))
    for j in range(0, full, n):
        s = add_scaled(load_four(block, j, n), load_four(other, j, n), s)
    if full < d:
        s = add_scaled(load_four(block, full, d - full), load_four(other, full, d - full), s)
    put_totals(out, s)


@inline
def put_totals(out, sums):
    out[0], out[1], out[2], out[3] = total(sums[0]), total(sums[1]), total(sums[2]), total(sums[3])


@inline
def fetch(ahead, j):
    """Asks memory for a piece of the next block, to read and to write, while this one is worked on.

    A core can wait for few cache lines at a time, so each of a block's passes over its columns asks for its share:
    ``ahead`` is where this pass's begins, and how many elements go with a register's width of columns.
    """
    x, y, share = ahead
    prefetch(x, j // lanes(x) * share)
    prefetch_write(y, j // lanes(x) * share)


@inline
def flush(totals, sums, size, first):
    """The sums join the float64 totals and begin again at zero."""
    for i in range(size):
        totals[i] = sums[i] if first else totals[i] + sums[i]
        sums[i] = 0


@inline
def join(totals, chunks, size, own_bytes):
    """The chunks' totals, added in the order of their rows into the first."""
    for chunk in range(1, chunks):
        other = at(totals, chunk * own_bytes // 8)
        for i in range(size):
            totals[i] += other[i]
