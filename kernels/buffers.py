"""Memory for large outputs, which is kept when they die and given to the next ones.

Fresh memory comes from the system as pages of zeros, and fetching them takes longer than the kernels take to fill them;
the C library hands blocks of many megabytes back to the system as soon as they are free, so that every training step
would fetch them again. Here they wait for the next output of their size instead, up to ``KEEP`` bytes, in huge pages
where Linux leaves that choice to the program. :func:`release` gives what waits back.

There is no lock: a queue's own operations are atomic, and a forked process inherits private copies.
"""

import mmap
import weakref
from collections import defaultdict, deque

import numpy as np
import torch
from torch import Tensor

from fastcross.kernels.rows import MAX_PADDING, empty_rows

HUGE_PAGE = 2 << 20
SMALLEST = 2 * HUGE_PAGE  # bytes: what is smaller, the C library keeps by itself
KEEP = 1 << 30  # bytes that may wait
_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}

_waiting: defaultdict[int, deque[mmap.mmap]] = defaultdict(deque)


def empty_output(x: Tensor) -> Tensor:
    """An uninitialised tensor like the rows ``x``, with the same padding between rows."""
    if x.nbytes < SMALLEST or x.dtype not in _NUMPY or not hasattr(mmap, "MAP_PRIVATE"):
        return empty_rows(x)
    rows, d = x.shape
    stride = x.stride(0) if d < x.stride(0) <= d + MAX_PADDING else d
    needed = rows * stride * x.element_size()
    size = -(-needed // HUGE_PAGE) * HUGE_PAGE
    try:
        memory = _waiting[size].pop()
    except IndexError:
        memory = _fresh(size)
    strides = (stride * x.element_size(), x.element_size())
    array = np.ndarray((rows, d), _NUMPY[x.dtype], memory, _offset(memory), strides)
    weakref.finalize(array, _keep, size, memory).atexit = False
    fills = getattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    if fills and torch.are_deterministic_algorithms_enabled():
        array.fill(np.nan)  # as torch.empty does
    return torch.from_numpy(array)


def release() -> None:
    """Gives the memory that waits for outputs back to the system."""
    _waiting.clear()


def _keep(size: int, memory: mmap.mmap) -> None:
    if sum(each * len(queue) for each, queue in list(_waiting.items())) + size <= KEEP:
        _waiting[size].append(memory)


def _fresh(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _offset(memory: mmap.mmap) -> int:
    """To the first whole huge page."""
    return -np.frombuffer(memory, np.uint8).ctypes.data % HUGE_PAGE
