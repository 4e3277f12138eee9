"""What fastcross.swap gains: the peers' own modules and DeepCTR-Torch's own DCN, before and after."""

from dataclasses import replace
from typing import Any

from benchmarks.bench_model_step import PAPER
from benchmarks.contestants import PEER_CLASSES, SWAPPED, Problem
from benchmarks.models import DEEPCTR, TrainingStep

PAIRS = tuple(name + suffix for name in PEER_CLASSES for suffix in ("", SWAPPED))


def cases(full: bool) -> list[tuple[Any, tuple[str, ...]]]:
    step = TrainingStep(replace(PAPER, deep_layers=(256, 128)), DEEPCTR), (DEEPCTR, DEEPCTR + SWAPPED)
    return [(Problem("cross_network", 4096 if full else 1024, 1026, 6), PAIRS), step]


def bench_swap(workload, contestants, contestant, compete):
    compete(workload, contestants, contestant)
