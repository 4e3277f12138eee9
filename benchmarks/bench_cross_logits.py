"""The logits of the cross network, whose output is never written."""

from typing import Any

from benchmarks.contestants import PEER_CLASSES, Problem, everyone


def cases(full: bool) -> list[tuple[Any, tuple[str, ...]]]:
    rows = (512, 4096, 65536) if full else (4096,)
    problems = [Problem("cross_logits", count, 1026, 6, backward=b) for count in rows for b in (False, True)]
    peers = PEER_CLASSES if full else ("FuxiCTR",)  # the fastest; the others differ as they do on the network
    return [(problem, everyone(*peers)) for problem in problems]


def bench_cross_logits(workload, contestants, contestant, compete):
    compete(workload, contestants, contestant)
