"""Memory for large outputs, which is kept when they die and given to the next ones.

Fresh memory comes from the system as pages of zeros, and fetching them takes longer than the kernels take to fill them;
the C library hands blocks of many megabytes back to the system as soon as they are free, so that every training step
would fetch them again. Here they wait for the next output of their size instead, up to ``KEEP`` bytes, in huge pages
where Linux leaves that choice to the program. :func:`release` gives what waits back. Such an output cannot be resized
in place (``resize_``), like any tensor that PyTorch did not allocate.

There is no lock: a queue's own operations are atomic, and a forked process inherits private copies.
"""

import contextlib
import mmap
import weakref
from collections import defaultdict, deque
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastcross.kernels.rows import empty_rows, stride_like

HUGE_PAGE = 2 << 20
SMALLEST = 2 * HUGE_PAGE  # bytes: what is smaller, the C library keeps by itself
KEEP = 1 << 30  # bytes that may wait
_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}

_waiting: defaultdict[int, deque["_Memory"]] = defaultdict(deque)
_lent: dict[int, "_Lease"] = {}


class _Memory(NamedTuple):
    size: int
    pages: mmap.mmap
    offset: int  # to the first whole huge page


class _Lease(weakref.ref):
    """Memory and the array that has it; ``weakref.finalize`` would do, but takes longer."""

    memory: _Memory


def empty_output(x: Tensor) -> Tensor:
    """An uninitialised tensor like the rows ``x``, with the same padding between rows."""
    if x.nbytes < SMALLEST or x.dtype not in _NUMPY or not hasattr(mmap, "MAP_PRIVATE"):
        return empty_rows(x)
    (rows, d), itemsize, stride = x.shape, x.element_size(), stride_like(x)
    size = -(-rows * stride * itemsize // HUGE_PAGE) * HUGE_PAGE
    try:
        memory = _waiting[size].pop()
    except IndexError:
        memory = _fresh(size)
    array = np.ndarray((rows, d), _NUMPY[x.dtype], memory.pages, memory.offset, (stride * itemsize, itemsize))
    lease = _Lease(array, _keep)
    lease.memory = memory
    _lent[id(lease)] = lease
    if torch.are_deterministic_algorithms_enabled() and _fills_uninitialised():
        array.fill(np.nan)  # as torch.empty does
    return torch.from_numpy(array)


def release() -> None:
    """Gives the memory that waits for outputs back to the system."""
    _waiting.clear()


def _keep(lease: _Lease) -> None:
    del _lent[id(lease)]
    size = lease.memory.size
    _waiting[size].append(lease.memory)
    # Memory of other sizes goes first; that of the size which was used just now goes last.
    for other in [*(each for each in list(_waiting) if each != size), size]:
        while _waiting[other] and sum(each * len(queue) for each, queue in list(_waiting.items())) > KEEP:
            with contextlib.suppress(IndexError):  # another thread was faster
                _waiting[other].popleft()


def _fresh(size: int) -> _Memory:
    try:
        pages = _map(size + HUGE_PAGE)
    except OSError:  # no memory, unless what waits is given back
        release()
        pages = _map(size + HUGE_PAGE)
    with contextlib.suppress(AttributeError, OSError):  # not everywhere are there huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return _Memory(size, pages, -np.frombuffer(pages, np.uint8).ctypes.data % HUGE_PAGE)


def _map(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _fills_uninitialised() -> bool:
    return getattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
