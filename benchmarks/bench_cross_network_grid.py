"""Grid of batches, widths and depths: how many times as fast as the eager loop, forward and backward."""

from typing import Any

from benchmarks.contestants import EAGER, OURS, Problem

BUDGET = 0.2  # seconds of timing per workload: there are many


def cases(full: bool) -> list[tuple[Any, tuple[str, ...]]]:
    batches = (1, 64, 512, 4096, 65536) if full else (1, 64)
    shapes = [(rows, d, layers) for rows in batches for d in (16, 54, 390, 1026, 4096) for layers in (1, 3, 6, 16)]
    return [(Problem("cross_network", *shape), (OURS, EAGER)) for shape in shapes]


def bench_cross_network_grid(workload, contestants, contestant, compete):
    compete(workload, contestants, contestant)
