"""Work over threads: kernels that release the interpreter lock, and native tasks, which never take it.

A native task runs on the threads of PyTorch's own OpenMP runtime: those are awake after any of PyTorch's operators, and
would compete for the cores with threads of ours. Where there is no such runtime, and in a forked process, whose OpenMP
threads stayed behind in the process it was forked from, a pool of plain Python threads does the work, as it does for
kernels called from Python. Both serve any number of calling threads at once.
"""

import ctypes
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastcross.kernels import HOME


def run(chunks: list[tuple[int, int]], kernel: Callable[[int, int, int], object]) -> None:
    """The kernel on every chunk: the first on the calling thread, and any other that the pool has not begun by then."""
    if len(chunks) == 1:
        kernel(0, *chunks[0])
        return
    pool, futures = _pool(os.getpid(), len(chunks) - 1), []
    try:
        for i, chunk in enumerate(chunks[1:], start=1):
            futures.append(pool.submit(kernel, i, *chunk))
        kernel(0, *chunks[0])
        for i, future in enumerate(futures, start=1):
            if future.cancel():
                kernel(i, *chunks[i])
    finally:  # whatever happens, nobody works on memory that the caller is about to free
        wait([future for future in futures if not future.cancel()])
    for future in futures:
        if not future.cancelled():
            future.result()


class Task(NamedTuple):
    """A call of a native kernel: the block of words that it gets, and what must live as long as it runs."""

    block: Any
    memory: Tensor
    threads: int


def run_task(kernel: Callable[[Any], object], task: Task) -> None:
    """``kernel(task.block)`` on the task's threads at once; they take its chunks by turns."""
    block, threads = task.block, task.threads
    if threads == 1:
        kernel(block)
    elif os.getpid() == HOME and (parallel := _openmp()) is not None:
        parallel(kernel, block, threads, 0)
    else:
        run([(i, i) for i in range(threads)], lambda i, start, stop: kernel(block))


@functools.cache
def _openmp() -> Any:
    """GOMP_parallel(function, data, threads, flags), which GNU's and Intel's runtimes have; None elsewhere."""
    try:
        parallel = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (AttributeError, OSError):
        return None
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return parallel


@functools.cache
def _pool(pid: int, workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, thread_name_prefix="fastcross")
