"""The network in other dtypes, forward and backward."""

from typing import Any

from benchmarks.contestants import PEER_CLASSES, Problem, everyone


def cases(full: bool) -> list[tuple[Any, tuple[str, ...]]]:
    dtypes = ("float16", "bfloat16", "float32", "float64") if full else ("bfloat16", "float64")
    passes = (True, False) if full else (True,)
    problems = [Problem("cross_network", 4096 if full else 256, 1026, 3, dtype, b) for dtype in dtypes for b in passes]
    return [(problem, everyone(*PEER_CLASSES, compiled=full)) for problem in problems]


def bench_cross_network_dtype(workload, contestants, contestant, compete):
    compete(workload, contestants, contestant)
