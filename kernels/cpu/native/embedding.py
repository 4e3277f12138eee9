"""Embedding rows gathered into x0, compiled by Numba.

    stack   x0[m, columns of table k] = table_k[ids[m, k]]
    pool    x0[m, columns of a bag]   = Σ_n coefficient_n table[values_n]    over the values n of row m

Ids are checked as they are read; the first that is outside its table is reported.
"""

from fastcross.kernels.cpu.embedding import POOL, STACK
from fastcross.kernels.cpu.native.simd import at, copy, inline, lanes, least, pointer_to, prefetch
from fastcross.kernels.cpu.native.unpack import report, take

take_stack, take_pool = take(STACK), take(POOL)


def stack_fwd(block):
    task = take_stack(block)
    while task.chunk < task.chunks:
        K, heights, widths = task.K, task.heights, task.widths
        for m in range(task.start, task.stop):
            ids, out = at(task.ids, m * task.stride_ids), at(task.x0, m * task.stride_x0)
            for k in range(K):
                table, width = pointer_to(task.tables[k], out), widths[k]
                if m + 1 < task.stop:
                    prefetch_row(at(table, ids[task.stride_ids + k] * width), width)
                if 0 <= ids[k] < heights[k]:
                    copy(out, at(table, ids[k] * width), width)
                else:
                    report(block, m * K + k)
                out = at(out, width)
        task = take_stack(block)


@inline
def prefetch_row(row, width):
    for i in range(0, width, 2 * lanes(row)):  # a cache line is two registers
        prefetch(row, i)


def pool_fwd(block):
    task = take_pool(block)
    while task.chunk < task.chunks:
        M, N, width, values, offsets = task.M, task.N, task.width, task.values, task.offsets
        for m in range(task.start, task.stop):
            pooled = at(task.x0, m * task.stride_x0)
            for i in range(width):
                pooled[i] = 0
            first, last = offsets[m], N
            if m + 1 < M:
                last = least(offsets[m + 1], N)
            for n in range(first if first > 0 else 0, last):
                if 0 <= values[n] < task.height:
                    row, coefficient = at(task.table, values[n] * width), task.coefficients[n]
                    for i in range(width):
                        pooled[i] += coefficient * row[i]
                else:
                    report(block, n)
        task = take_pool(block)
