"""Large outputs in huge pages: fresh memory costs a page fault per page, which takes longer than filling it.

Where Linux leaves the choice to the program (transparent_hugepage = madvise, the usual setting) this is what asks for
them; where it does not, nothing changes.
"""

import ctypes
import functools
import mmap
from collections.abc import Callable

from torch import Tensor

HUGE_PAGE = 2 << 20
SMALLEST = 2 * HUGE_PAGE


def in_huge_pages(t: Tensor) -> Tensor:
    """``t`` itself, before it is first written; the part of its memory that fills huge pages will be in them."""
    size = t.untyped_storage().nbytes()
    if size >= SMALLEST:
        start = -(-t.data_ptr() // HUGE_PAGE) * HUGE_PAGE
        stop = (t.data_ptr() + size) // HUGE_PAGE * HUGE_PAGE
        _madvise()(start, stop - start, getattr(mmap, "MADV_HUGEPAGE", 14))
    return t


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    try:
        advise = ctypes.CDLL(None).madvise
    except (AttributeError, OSError):  # not a system with madvise
        return lambda start, length, advice: 0
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return advise
