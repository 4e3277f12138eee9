"""Native tasks over threads; they never take the interpreter lock.

They run on the threads of PyTorch's own OpenMP runtime: those are awake after any of PyTorch's operators, and would
compete for the cores with threads of ours. Where there is no such runtime, and in a forked process, whose OpenMP
threads stayed behind in the process it was forked from, a pool of plain Python threads does the work. Both serve any
number of calling threads at once.
"""

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastcross.kernels import HOME
from fastcross.kernels.cpu.native.in_turn import in_turn


class Task(NamedTuple):
    """A call of a native kernel: the block of words that it gets, and what the addresses in it belong to."""

    block: Any
    memory: Tensor
    operands: tuple[Any, ...]
    results: list[Any]  # None for those that are not needed
    dtype: torch.dtype  # of storage
    threads: int


def run_task(kernel: Callable[[Any], object], task: Task) -> None:
    """``kernel(task.block)`` on the task's threads at once; they take its chunks by turns."""
    run(kernel, task.block, task.threads)


def run_in_turn(steps: Sequence[tuple[Callable[[Any], object], int]]) -> Callable[[Any], None]:
    """A function of a task's block that runs each (kernel, threads) after the other, entering native code once."""

    def one_by_one(block: Any) -> None:
        for kernel, threads in steps:
            run(kernel, block, threads)

    parallel = None if all(threads == 1 for _, threads in steps) else _openmp()
    if parallel is None and any(threads > 1 for _, threads in steps):
        return one_by_one
    native = in_turn(steps, parallel)
    if parallel is None:
        return native
    return lambda block: native(block) if os.getpid() == HOME else one_by_one(block)


def run(kernel: Callable[[Any], object], block: Any, threads: int) -> None:
    if threads == 1:
        kernel(block)
    elif os.getpid() == HOME and (parallel := _openmp()) is not None:
        parallel(kernel, block, threads, 0)
    else:
        _run_on_pool(kernel, block, threads)


def _run_on_pool(kernel: Callable[[Any], object], block: Any, threads: int) -> None:
    """On the calling thread, and on as many others as begin before it is done: the chunks are taken by whoever is."""
    pool, futures = _pool(os.getpid(), threads - 1), []
    try:
        for _ in range(threads - 1):
            futures.append(pool.submit(kernel, block))
        kernel(block)
    finally:  # whatever happens, nobody works on memory that the caller is about to free
        wait([future for future in futures if not future.cancel()])
    for future in futures:
        if not future.cancelled():
            future.result()


@functools.cache
def thread_number() -> int:
    """The address of ``int omp_get_thread_num()``: 0 on the calling thread, and outside of OpenMP; 0 without OpenMP."""
    function = _found("omp_get_thread_num")
    return (ctypes.cast(function, ctypes.c_void_p).value or 0) if function is not None else 0


@functools.cache
def _openmp() -> Any:
    """GOMP_parallel(function, data, threads, flags), which GNU's and Intel's runtimes have; None elsewhere."""
    parallel = _found("GOMP_parallel")
    if parallel is None:
        return None
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return parallel


def _found(name: str) -> Any:
    """A function of PyTorch's own OpenMP runtime."""
    try:
        return getattr(ctypes.CDLL(torch._C.__file__), name)
    except (AttributeError, OSError):
        return None


@functools.cache
def _pool(pid: int, workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, thread_name_prefix="fastcross")
