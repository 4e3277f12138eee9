"""Chunks of work over a pool of plain Python threads, for kernels that release the interpreter lock.

The pool serves any number of calling threads at once, and a forked process makes its own: the threads of the process it
was forked from did not come along.
"""

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def run(chunks: list[tuple[int, int]], kernel: Callable[[int, int, int], None]) -> None:
    """The kernel on every chunk: the first on the calling thread, and any other that the pool has not begun by then."""
    if len(chunks) == 1:
        return kernel(0, *chunks[0])
    pool = _pool(os.getpid(), len(chunks) - 1)
    futures = [pool.submit(kernel, i, *chunk) for i, chunk in enumerate(chunks) if i]
    kernel(0, *chunks[0])
    for i, future in enumerate(futures, start=1):
        if future.cancel():
            kernel(i, *chunks[i])
        else:
            future.result()


@functools.cache
def _pool(pid: int, workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, thread_name_prefix="fastcross")
