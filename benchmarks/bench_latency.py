"""Inference latency: the cross network, and whole models, at batches of 1, 32 and 512."""

from dataclasses import replace
from typing import Any

from benchmarks.bench_model_step import PAPER
from benchmarks.contestants import COMPILED, EAGER, OURS, PEER_CLASSES, SWAPPED, Problem, everyone
from benchmarks.models import DEEPCTR, EXPORTED, Request

BUDGET = 4.0  # seconds of timing per workload: for a 99th percentile


def cases(full: bool) -> list[tuple[Any, tuple[str, ...]]]:
    networks = [
        (Problem("cross_network", rows, 1026, 6, backward=False, latency=True), everyone(*PEER_CLASSES))
        for rows in (1, 32, 512)
    ]
    models = (OURS, EAGER, DEEPCTR, DEEPCTR + SWAPPED, *((COMPILED, EXPORTED) if full else ()))
    return [*networks, *((Request(replace(PAPER, rows=rows)), models) for rows in (1, 32, 512))]


def bench_latency(workload, contestants, contestant, compete):
    compete(workload, contestants, contestant)
