"""The network against its width, forward and backward."""

from typing import Any

from benchmarks.contestants import PEER_CLASSES, Problem, everyone


def cases(full: bool) -> list[tuple[Any, tuple[str, ...]]]:
    rows, widths = (
        (4096, (16, 32, 54, 128, 390, 624, 1026, 2048, 4096, 8192)) if full else (512, (16, 64, 256, 1026, 8192))
    )
    passes = (True, False) if full else (True,)
    problems = [Problem("cross_network", rows, d, 3, backward=b) for d in widths for b in passes]
    return [(problem, everyone(*PEER_CLASSES, compiled=full)) for problem in problems]


def bench_cross_network_width(workload, contestants, contestant, compete):
    compete(workload, contestants, contestant)
