"""What the CPU kernels share: blocks of four rows, their dots with vectors, sums over rows.

A block is a pointer to its first row and the stride to the next; its four rows are read from memory once, and meet each
vector in registers, which is loaded once for all four. The last rows of a range, fewer than four, come one by one, each
alone in a block that is the same row four times (its stride is 0): what is written is written four times, and a sum
takes the first. Sums over rows run in the storage dtype for some rows and in float64 across them.
"""

from fastcross.kernels.cpu.native.fours import add_products, add_scaled, four_times, load_four, put_totals
from fastcross.kernels.cpu.native.simd import (
    add,
    add_exactly,
    at,
    inline,
    is_double,
    lanes,
    load,
    load_upto,
    load_wide,
    prefetch,
    prefetch_write,
    store,
    widen,
    zeros,
)  # fmt: skip

# Rows, a multiple of 4, that are summed in the storage dtype: few enough for the sum to round as often as PyTorch's.
FLOAT_ROWS, DOUBLE_ROWS = 128, 64


@inline
def dots_with_one(block, vector, step, d, out, ahead):
    """out_i = row_i·vector; ``step`` elements lie between the vector's pieces of ``lanes`` columns."""
    n = lanes(vector)
    full, k = d - d % n, 0
    s = four_times(zeros(vector))
    for j in range(0, full, n):
        fetch(ahead, j)
        s = add_scaled(four_times(load(vector, k)), load_four(block, j, n), s)
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
        s = add_scaled(four_times(load(vectors, k)), x, s)
        t = add_scaled(four_times(load(vectors, k + vector_step)), x, t)
        k += step
    if full < d:
        x = load_four(block, full, d - full)
        s = add_scaled(four_times(load_upto(vectors, k, d - full)), x, s)
        t = add_scaled(four_times(load_upto(vectors, k + vector_step, d - full)), x, t)
    put_totals(out, s)
    put_totals(at(out, 4), t)


@inline
def dots_with_three(block, vectors, step, vector_step, d, out, ahead):
    """The dots with three vectors, as many as the registers hold the sums of; ``out`` is (3, 4)."""
    n = lanes(vectors)
    full, k = d - d % n, 0
    sums = (four_times(zeros(vectors)), four_times(zeros(vectors)), four_times(zeros(vectors)))
    for j in range(0, full, n):
        fetch(ahead, j)
        three = (load(vectors, k), load(vectors, k + vector_step), load(vectors, k + 2 * vector_step))
        sums = add_products(three, block, j, sums)
        k += step
    s, t, u = sums
    if full < d:
        x = load_four(block, full, d - full)
        s = add_scaled(four_times(load_upto(vectors, k, d - full)), x, s)
        t = add_scaled(four_times(load_upto(vectors, k + vector_step, d - full)), x, t)
        u = add_scaled(four_times(load_upto(vectors, k + 2 * vector_step, d - full)), x, u)
    put_totals(out, s)
    put_totals(at(out, 4), t)
    put_totals(at(out, 8), u)


@inline
def passes(K):
    """How many passes over a block take its dots with K vectors: by threes, and twos for what they leave."""
    return (K + 2) // 3


@inline
def dots_with_all(block, vectors, step, vector_step, d, K, out, ahead):
    """The dots with K vectors, ``vector_step`` elements apart; ``out`` is (K, 4). Returns what is then ahead."""
    n, k = lanes(vectors), 0
    x_ahead, y_ahead, share = ahead
    while k < K:
        vector, dots, more = at(vectors, k * vector_step), at(out, 4 * k), (x_ahead, y_ahead, share)
        if k + 3 <= K and k + 4 != K:
            dots_with_three(block, vector, step, vector_step, d, dots, more)
            k += 3
        elif k + 2 <= K:
            dots_with_two(block, vector, step, vector_step, d, dots, more)
            k += 2
        else:
            dots_with_one(block, vector, step, d, dots, more)
            k += 1
        x_ahead, y_ahead = at(x_ahead, d // n * share), at(y_ahead, d // n * share)
    return x_ahead, y_ahead, share


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
def fetch(ahead, j):
    """Asks memory for a piece of the next block, to read and to write, while this one is worked on.

    A core can wait for few cache lines at a time, so each of a block's passes over its columns asks for its share:
    ``ahead`` is where this pass's begins, and how many elements go with a register's width of columns; 0 for nothing.
    """
    x, y, share = ahead
    if share > 0:
        prefetch(x, j // lanes(x) * share)
        prefetch_write(y, j // lanes(x) * share)


@inline
def clear(values, size):
    for i in range(0, size, lanes(values)):
        store(values, i, zeros(values))


@inline
def are_few(rows, chunks, sums):
    """Whether a task's rows are in one chunk, and all may be in its sums: these are then the totals."""
    return chunks == 1 and rows <= (DOUBLE_ROWS if is_double(sums) else FLOAT_ROWS)


@inline
def is_full(r, next_r, start, stop, sums):
    """Whether with the block of row r the sums since the last flush have all the rows that they may have."""
    rows = DOUBLE_ROWS if is_double(sums) else FLOAT_ROWS
    return (r - start) % rows == rows - 4 or next_r >= stop


@inline
def flush(totals, errors, sums, size):
    """The sums join the float64 totals and begin again at zero.

    Sums of float32 lose nothing in float64; those of float64 lose their last bits, which are added up in ``errors``.
    """
    for i in range(0, size, lanes(sums)):
        part = widen(load(sums, i))
        if is_double(sums):
            add_exactly(totals, errors, i, part)
        else:
            store(totals, i, add(load_wide(totals, i, sums), part))
        store(sums, i, zeros(sums))


@inline
def join(totals, errors, chunks, size, own_bytes, like):
    """The chunks' totals, added in the order of their rows into the first; with float64, the errors into those."""
    step = own_bytes // 8
    for chunk in range(1, chunks):
        other, other_errors = at(totals, chunk * step), at(errors, chunk * step)
        for i in range(0, size, lanes(like)):
            part = load_wide(other, i, like)
            if is_double(like):
                add_exactly(totals, errors, i, part)
                store(errors, i, add(load_wide(errors, i, like), load_wide(other_errors, i, like)))
            else:
                store(totals, i, add(load_wide(totals, i, like), part))
    if is_double(like):
        for i in range(0, size, lanes(like)):
            store(totals, i, add(load_wide(totals, i, like), load_wide(errors, i, like)))
