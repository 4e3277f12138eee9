"""The paper's network: d = 1026, 6 layers, a batch of 4096; its depths against each other; the machine's roof."""

from dataclasses import replace
from typing import Any

from benchmarks.contestants import EAGER, OURS, PEER_CLASSES, Depths, Problem, everyone
from benchmarks.roof import COPY, PRODUCT, Roof

DEPTHS = tuple(f"{OURS}, L = {layers}" for layers in (1, 12, 32)) + tuple(
    f"{EAGER}, L = {layers}" for layers in (1, 12)
)

BUDGET = 5.0  # seconds of timing per workload


def cases(full: bool) -> list[tuple[Any, tuple[str, ...]]]:
    paper = Problem("cross_network", 4096, 1026, 6, budget=30.0)  # the README's figures
    problems = (paper, replace(paper, backward=False, budget=None))
    return [
        *((problem, everyone(*PEER_CLASSES)) for problem in problems),
        (Depths(4096, 1026), DEPTHS),
        (Roof(), (COPY, PRODUCT)),
    ]


def bench_cross_network(workload, contestants, contestant, compete):
    compete(workload, contestants, contestant)
