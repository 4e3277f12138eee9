"""Verify, then time: contestants take turns, and only what was checked against the reference is ever timed.

A workload (an operator on one shape, a training step, a request) makes the contestants, all with the same weights. Each
runs once and its results are compared with the float64 reference; one that is wrong, or was not compared, makes the
whole workload refuse. Then they take turns, so that whatever else the machine does meets all of them alike; ratios are
taken within a round, and reported as 20th, 50th and 80th percentiles.
"""

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from benchmarks import clock, memory

PERCENTILES = (20, 50, 80)
MIN_ROUNDS, MAX_ROUNDS = 5, 1000
# A latency's 99th percentile needs a hundred calls and more.
LATENCY_ROUNDS = 100
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
class Contestant:
    """One way to do a workload."""

    step: Callable[[], object]  # what is timed
    results: Callable[[], Mapping[str, Tensor]]  # what is verified
    expected: Mapping[str, Expected] | None = None  # where it differs from the workload's
    forward: Callable[[], Tensor] | None = None  # with gradients: what it keeps for the backward pass is counted
    leaves: Sequence[Tensor] = ()  # inputs and parameters, which are there anyway


@dataclass(frozen=True)
class Verified:
    """A contestant whose results were compared: name of each, error and what was allowed."""

    name: str
    contestant: Contestant
    errors: Mapping[str, tuple[float, float]] = field(default_factory=dict)


class Workload(Protocol):
    """What contestants compete in."""

    latency: bool

    def expected(self) -> Mapping[str, Expected]: ...

    def enter(self, name: str) -> Contestant:
        """Raises :class:`Missing`, with the reason, where the contestant cannot take part."""
        ...

    def describe(self) -> dict[str, Any]:
        """The workload for the record; ``floor_bytes`` among it where GB/s make sense."""
        ...


def verify(name: str, contestant: Contestant, expected: Mapping[str, Expected]) -> Verified:
    """Runs the contestant once and compares every result; raises :class:`Refused` if one is wrong."""
    expected = contestant.expected or expected
    results = contestant.results()
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
    return Verified(name, contestant, errors)


def interleave(entries: Sequence[Verified], budget: float, latency: bool = False) -> dict[str, list[float]]:
    """Seconds per call of each contestant, one sample of each per round, for about ``budget`` seconds in all."""
    for entry in entries:
        if not isinstance(entry, Verified) or not entry.errors:
            raise Refused(f"{getattr(entry, 'name', entry)} was not verified: its time does not count")
    timer = clock.clock(latency)
    calls, once = {}, {}
    for entry in entries:
        once[entry.name] = max(timer(entry.contestant.step), 1e-7)  # verifying it was the first call
        calls[entry.name] = 1 if latency else max(1, math.ceil(timer.shortest / once[entry.name]))
    repeats = {name: 1 if latency or seconds >= SHORT else FEW for name, seconds in once.items()}
    per_round = sum(once[name] * (calls[name] * repeats[name] + (once[name] < SETTLE)) for name in once)
    rounds = min(max(int(budget / per_round), LATENCY_ROUNDS if latency else MIN_ROUNDS), MAX_ROUNDS)
    times: dict[str, list[float]] = {entry.name: [] for entry in entries}
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds):
            first = turn % len(entries)  # nobody always runs after the same neighbour's use of the caches
            for entry in (*entries[first:], *entries[:first]):
                if once[entry.name] < SETTLE:
                    entry.contestant.step()
                samples = [timer(entry.contestant.step, calls[entry.name]) for _ in range(repeats[entry.name])]
                times[entry.name].append(float(np.median(samples)))
    finally:
        gc.enable()
    return times


def percentiles(values: Sequence[float], at: Sequence[float] = PERCENTILES) -> dict[str, float]:
    """``{"p20": …, "p50": …, "p80": …}``, interpolated, to four significant digits."""
    return {f"p{q:g}": float(f"{value:.4g}") for q, value in zip(at, np.percentile(values, at), strict=True)}


def ratios(times: Mapping[str, Sequence[float]], base: str) -> dict[str, dict[str, float]]:
    """Each contestant's time over the base's in the same round."""
    return {name: percentiles(np.divide(taken, times[base])) for name, taken in times.items()}  # type: ignore[arg-type]


def measure(workload: Workload, names: Sequence[str], bases: Sequence[str], budget: float) -> dict[str, Any]:
    """The record of one workload: verified, timed in turns, weighed. ``bases`` are what ratios are taken to."""
    entries, missing = [], {}
    expected = workload.expected()
    first_call = {}
    for name in names:
        start = time.perf_counter()
        try:
            entries.append(verify(name, workload.enter(name), expected))
            first_call[name] = float(f"{time.perf_counter() - start:.3g}")
        except Missing as reason:
            missing[name] = str(reason)
    times = interleave(entries, budget, workload.latency)
    to_base = {base: ratios(times, base) for base in bases if base in times}
    description = workload.describe()
    at = (*PERCENTILES, 99) if workload.latency else PERCENTILES
    contestants = {}
    for entry in entries:
        name, contestant = entry.name, entry.contestant
        record: dict[str, Any] = {
            "seconds": percentiles(times[name], at),
            "ratio_to": {base: ratio[name] for base, ratio in to_base.items()},
            "errors": {key: [float(f"{value:.3g}") for value in pair] for key, pair in entry.errors.items()},
            "first_call_seconds": first_call[name],  # import, compilation and verification
            "times": times[name],
        }
        if "floor_bytes" in description:
            record["gigabytes_per_second"] = float(f"{description['floor_bytes'] / record['seconds']['p50'] / 1e9:.4g}")
        if contestant.forward is not None:
            record["kept_bytes"] = memory.kept_bytes(contestant.forward, contestant.leaves)
        if not workload.latency:
            record["peak_bytes"] = memory.peak_bytes(contestant.step, clock.device())
        contestants[name] = record
    return {"workload": description, "contestants": contestants, "missing": missing, "bases": [*to_base]}
