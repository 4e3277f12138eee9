"""Gradients of embedding tables on the CPU: each one's distinct ids, ascending, and Σ dx0 over the rows that share one.

One launch for all tables; a chunk is some of the tables. Every element is summed by one thread in the order of the
batch, after a stable radix sort: bit-identical from run to run.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastcross.kernels.cpu.compile import compiled
from fastcross.kernels.cpu.door import addresses
from fastcross.kernels.cpu.layout import INDEX, Layout, index, rows, whole
from fastcross.kernels.cpu.simd import at, copy, inline, least, pointer_to
from fastcross.kernels.cpu.tables import numbers, unit_columns
from fastcross.kernels.cpu.threads import run_task

RADIX_BITS = 11  # 2048 counters fit the L1 cache, and two passes sort a vocabulary of 4 million
DIGITS = 1 << RADIX_BITS

SUMS = Layout(
    "stack_bwd",
    items="K",
    work=lambda n: n.M * n.width // max(1, n.K),
    operands={
        "heights": whole("K", kind=INDEX),
        "widths": whole("K", kind=INDEX),
        "ids": rows("M", "K", kind=INDEX),
        "dx0": rows("M", "width"),
        "rows": whole("K", kind=INDEX),  # addresses, as are the gradients
        "gradients": whole("K", kind=INDEX),
        "counts": whole("K", kind=INDEX),
    },
    sizes=("M", "K", "width"),
    own={
        "keys": index(lambda n: n.M),
        "order": index(lambda n: n.M),
        "other": index(lambda n: n.M),
        "digits": index(lambda n: DIGITS + 1),
    },
)
take_sums = SUMS.take


def stack_bwd_kernel(block):
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


def stack_bwd(sizes: Sequence[int], ids: Tensor, dx0: Tensor) -> list[Tensor]:
    """For each table its distinct ids in ascending order, and dx0 summed over each; ``sizes``: heights and widths."""
    M, K = ids.shape
    heights, widths = tuple(sizes[0 : 2 * K : 2]), tuple(sizes[1 : 2 * K : 2])
    columns, counts = dx0[:, : sum(widths)], ids.new_empty(K)
    # Memory of its own for each result, as long as it can become.
    found = [ids.new_empty(min(M, height)) for height in heights]
    gradients = [dx0.new_empty((min(M, height), width)) for height, width in zip(heights, widths, strict=True)]
    plan = SUMS.plan(dx0.dtype, torch.get_num_threads(), M=M, K=K, width=columns.shape[1])
    task = plan.task(
        heights=numbers(heights), widths=numbers(widths), ids=unit_columns(ids), dx0=columns, counts=counts,
        rows=addresses("rows", found, torch.int64, [tuple(row.shape) for row in found]),
        gradients=addresses("gradients", gradients, dx0.dtype, [tuple(each.shape) for each in gradients]),
    )  # fmt: skip
    run_task(compiled(stack_bwd_kernel, dx0.dtype), task)
    results: list[Tensor] = []
    for k, count in enumerate(counts.tolist()):
        if count > len(found[k]):
            raise RuntimeError(f"feature {k} has {heights[k]} ids; got more: they were changed since the forward pass")
        results += [found[k][:count], gradients[k][:count]]
    return results
