"""One cross layer, its input x other than x0."""

from typing import Any

from benchmarks.contestants import Problem, everyone


def cases(full: bool) -> list[tuple[Any, tuple[str, ...]]]:
    shapes = [(4096, 1026), *([(512, 390), (64, 54), (65536, 390)] if full else [])]
    return [(Problem("cross_layer", *shape, backward=b), everyone()) for shape in shapes for b in (False, True)]


def bench_cross_layer(workload, contestants, contestant, compete):
    compete(workload, contestants, contestant)
