"""The paper's network: d = 1026, 6 layers, a batch of 4096; its depths against each other; the machine's roof."""

from typing import Any

from benchmarks.contestants import EAGER, OURS, PEER_CLASSES, Depths, Problem, everyone
from benchmarks.roof import COPY, PRODUCT, Roof

DEPTHS = tuple(f"{OURS}, L = {layers}" for layers in (1, 12, 32)) + tuple(
    f"{EAGER}, L = {layers}" for layers in (1, 12)
)

BUDGET = 12.0  # seconds of timing per workload: the README's figures


def cases(full: bool) -> list[tuple[Any, tuple[str, ...]]]:
    passes = [(Problem("cross_network", 4096, 1026, 6, backward=b), everyone(*PEER_CLASSES)) for b in (True, False)]
    return [*passes, (Depths(4096, 1026), DEPTHS), (Roof(), (COPY, PRODUCT))]


def bench_cross_network(workload, contestants, contestant, compete):
    compete(workload, contestants, contestant)
