"""The network against its depth, forward and backward."""

from typing import Any

from benchmarks.contestants import PEER_CLASSES, Problem, everyone


def cases(full: bool) -> list[tuple[Any, tuple[str, ...]]]:
    rows, depths = (4096, (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)) if full else (512, (1, 2, 4, 8, 16, 32))
    passes = (True, False) if full else (True,)
    problems = [Problem("cross_network", rows, 1026, layers, backward=b) for layers in depths for b in passes]
    return [(problem, everyone(*PEER_CLASSES)) for problem in problems]


def bench_cross_network_depth(workload, contestants, contestant, compete):
    compete(workload, contestants, contestant)
