"""The network against the batch size, forward and backward; d = 390 and 3 layers, the usual ones for Criteo."""

from typing import Any

from benchmarks.contestants import PEER_CLASSES, Problem, everyone


def cases(full: bool) -> list[tuple[Any, tuple[str, ...]]]:
    batches = (1, 8, 64, 512, 4096, 32768, 65536) if full else (1, 64, 512, 4096, 16384)
    passes = (True, False) if full else (True,)
    problems = [Problem("cross_network", rows, 390, 3, backward=b) for rows in batches for b in passes]
    return [(problem, everyone(*PEER_CLASSES, compiled=full)) for problem in problems]


def bench_cross_network_batch(workload, contestants, contestant, compete):
    compete(workload, contestants, contestant)
