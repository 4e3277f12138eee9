"""Gradients of embedding tables: each one's distinct ids, ascending, and Σ dx0 over the rows that share one.

A chunk is some of the tables. Every element is summed by one thread in the order of the batch, after a stable radix
sort: bit-identical from run to run.
"""

from fastcross.kernels.cpu.embedding import DIGITS, RADIX_BITS, SUMS
from fastcross.kernels.cpu.native.simd import at, copy, inline, least, pointer_to
from fastcross.kernels.cpu.native.unpack import take

take_sums = take(SUMS)


def stack_bwd(block):
    task = take_sums(block)
    while task.chunk < task.chunks:
        M, keys, column = task.M, task.keys, 0
        for k in range(task.start):
            column += task.widths[k]
        for k in range(task.start, task.stop):
            width, most = task.widths[k], least(M, task.heights[k])
            found, gradients = pointer_to(task.rows[k], keys), pointer_to(task.gradients[k], task.dx0)
            for m in range(M):
                keys[m] = task.ids[m * task.stride_ids + k]
            order = argsort(keys, M, task.heights[k], task.order, task.other, task.digits)
            last = -1
            for n in range(M):
                m = order[n]
                g = at(task.dx0, m * task.stride_dx0 + column)
                if last < 0 or found[last] != keys[m]:
                    last += 1
                    if last == most:  # more distinct ids than rows: they were changed since the forward pass
                        break
                    found[last] = keys[m]
                    copy(at(gradients, last * width), g, width)
                else:
                    total = at(gradients, last * width)
                    for i in range(width):
                        total[i] += g[i]
            task.counts[k] = last + 1
            column += width
        task = take_sums(block)


@inline
def argsort(keys, M, height, order, other, digits):
    """The stable ascending order of ids in [0, height): a radix sort from the lowest digit up."""
    for n in range(M):
        order[n] = n
    shift = 0
    while shift == 0 or (height - 1) >> shift > 0:
        for digit in range(DIGITS + 1):
            digits[digit] = 0
        for n in range(M):
            digits[((keys[n] >> shift) & (DIGITS - 1)) + 1] += 1
        for digit in range(DIGITS - 1):
            digits[digit + 1] += digits[digit]
        for i in range(M):
            digit = (keys[order[i]] >> shift) & (DIGITS - 1)
            other[digits[digit]] = order[i]
            digits[digit] += 1
        order, other = other, order
        shift += RADIX_BITS
    return order
