"""Verify, then time: contestants take turns, and only what was checked against the reference is ever timed.

A workload (an operator on one shape, a training step, a request) makes the contestants, all with the same weights. Each
runs once and its results are compared with the float64 reference; one that is wrong, or was not compared, makes the
whole workload refuse. Then they take turns, so that whatever else the machine does meets all of them alike; ratios are
taken within a round. What is written down are the samples themselves; :mod:`benchmarks.report` does the rest.
"""

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from benchmarks.contestants import Contestant
from benchmarks.harness import clock, memory

# Every sample is committed: a few hundred tell what thousands would. A 99th percentile needs a hundred and more.
MIN_ROUNDS, MAX_ROUNDS, LATENCY_ROUNDS = 5, 200, 100
# A sample of a call shorter than this (seconds) is the median of a few: a core that the system takes away for some
# milliseconds is a percent of a long call and many times a short one.
SHORT, FEW = 0.03, 5
# Calls shorter than this (seconds) are preceded by one that is not timed: a sample then meets the contestant's own
# caches and threads, not those that its neighbour left, as in a loop.
SETTLE = 0.1


class Refused(Exception):
    """A result is wrong, or was not verified: no time is reported."""


class Missing(Exception):
    """A contestant's package is not installed, or it cannot run this workload."""


@dataclass(frozen=True)
class Expected:
    """A result in float64, and how far from it a contestant's may be."""

    value: Tensor
    allowed: float


@dataclass(frozen=True)
class Entry:
    """A contestant in a workload, ready to run."""

    step: Callable[[], object]  # what is timed
    results: Callable[[], Mapping[str, Tensor]]  # what is verified
    expected: Mapping[str, Expected] | None = None  # where it differs from the workload's
    forward: Callable[[], Tensor] | None = None  # with gradients: what it keeps for the backward pass is counted
    leaves: Sequence[Tensor] = ()  # inputs and parameters, which are there anyway


@dataclass(frozen=True)
class Verified:
    """An entry whose results were compared: name of each, error and what was allowed."""

    name: str
    entry: Entry
    errors: Mapping[str, tuple[float, float]] = field(default_factory=dict)


class Workload(Protocol):
    """What contestants compete in."""

    @property
    def latency(self) -> bool:
        """Whether it is the time that a caller waits, call by call."""
        ...

    def expected(self) -> Mapping[str, Expected]: ...

    def enter(self, contestant: Contestant) -> Entry:
        """Raises :class:`Missing`, with the reason, where the contestant cannot take part."""
        ...

    def describe(self) -> dict[str, Any]:
        """The workload for the record; ``floor_bytes`` among it where GB/s make sense."""
        ...


def verify(name: str, entry: Entry, expected: Mapping[str, Expected]) -> Verified:
    """Runs the entry once and compares every result; raises :class:`Refused` if one is wrong."""
    expected = entry.expected or expected
    results = entry.results()
    if results.keys() != expected.keys():
        raise Refused(f"{name} gave {', '.join(results)}; expected {', '.join(expected)}")
    errors = {}
    for key, target in expected.items():
        result = results[key]
        if result.shape != target.value.shape:
            raise Refused(f"{name}: {key} is {tuple(result.shape)}; expected {tuple(target.value.shape)}")
        error = float((result.to(target.value) - target.value).abs().max()) if result.numel() else 0.0
        if not error <= target.allowed:  # so that NaN is refused, too
            raise Refused(
                f"{name} is wrong, its time does not count: {key} is off by {error:.3g}, {target.allowed:.3g} allowed"
            )
        errors[key] = (error, target.allowed)
    return Verified(name, entry, errors)


def interleave(entries: Sequence[Verified], budget: float, latency: bool = False) -> dict[str, list[float]]:
    """Seconds per call of each contestant, one sample of each per round, for about ``budget`` seconds in all."""
    for entry in entries:
        if not isinstance(entry, Verified) or not entry.errors:
            raise Refused(f"{getattr(entry, 'name', entry)} was not verified: its time does not count")
    steps = {verified.name: verified.entry.step for verified in entries}
    timer = clock.clock(latency)
    once = {name: max(timer(step), 1e-7) for name, step in steps.items()}  # verifying it was the first call
    calls = {name: 1 if latency else max(1, math.ceil(timer.shortest / once[name])) for name in steps}
    repeats = {name: 1 if latency or seconds >= SHORT else FEW for name, seconds in once.items()}
    per_round = sum(once[name] * (calls[name] * repeats[name] + (once[name] < SETTLE)) for name in once)
    rounds = min(max(int(budget / per_round), LATENCY_ROUNDS if latency else MIN_ROUNDS), MAX_ROUNDS)
    times: dict[str, list[float]] = {name: [] for name in steps}
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds):
            for name in order([*steps], turn):
                if once[name] < SETTLE:
                    steps[name]()
                times[name].append(float(np.median([timer(steps[name], calls[name]) for _ in range(repeats[name])])))
    finally:
        gc.enable()
    return times


def order(names: Sequence[str], turn: int) -> list[str]:
    """Everybody begins as often as the others, and forwards and backwards have other neighbours' caches to run in."""
    first = turn // 2 % len(names)
    rotated = [*names[first:], *names[:first]]
    return rotated[::-1] if turn % 2 else rotated


def measure(workload: Workload, contestants: Sequence[Contestant], budget: float) -> dict[str, Any]:
    """The record of one workload: verified, timed in turns, weighed."""
    entries, missing, first_call = [], {}, {}
    expected = workload.expected()
    for contestant in contestants:
        start = time.perf_counter()
        try:
            entries.append(verify(contestant.name, workload.enter(contestant), expected))
            first_call[contestant.name] = time.perf_counter() - start
        except Missing as reason:
            missing[contestant.name] = str(reason)
    times = interleave(entries, budget, workload.latency)
    records = {}
    for verified in entries:
        name, entry = verified.name, verified.entry
        record: dict[str, Any] = {
            "times": [digits(seconds, 4) for seconds in times[name]],
            "errors": {key: [digits(value) for value in pair] for key, pair in verified.errors.items()},
            "first_call_seconds": digits(first_call[name]),  # import, compilation and verification
        }
        if entry.forward is not None:
            record["kept_bytes"] = memory.kept_bytes(entry.forward, entry.leaves)
        if not workload.latency:
            record["peak_bytes"] = memory.peak_bytes(entry.step, clock.device())
        records[name] = record
    described = workload.describe() | {"latency": workload.latency}
    return {"workload": described, "contestants": records, "missing": missing}


def digits(value: float, count: int = 3) -> float:
    return float(f"{value:.{count}g}")
