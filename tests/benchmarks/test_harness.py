"""Verify first, then take turns; and what a time, a peak and an occupancy are."""

import itertools
import json
import math

import pytest
import torch

from benchmarks import check
from benchmarks.contestants import OURS
from benchmarks.harness import clock, measure, memory, results
from benchmarks.harness.measure import Entry, Expected, Refused, Verified
from benchmarks.static import gpu_static
from benchmarks.static.machine_code import Code, Launch
from benchmarks.static.offline import Case
from benchmarks.suites import NETWORK, QUICK
from benchmarks.workloads.operators import Problem

PROBLEM = Problem(NETWORK, 40, 24, 3)


def test_without_verification_there_is_no_time(tmp_path):
    with pytest.raises(Refused, match="fastcross was not verified"):
        measure.interleave([Verified(OURS.name, PROBLEM.enter(OURS))], 0.01)
    case = measure.measure(PROBLEM, (OURS,), 0.01)
    file = tmp_path / "run-1.json"
    results.save(file, {"a": {"cases": [case]}})
    assert results.load(file)["a"]["cases"] == [case]
    case["contestants"][OURS.name]["errors"] = {}
    results.save(file, {"a": {"cases": [case]}})
    with pytest.raises(Refused, match=r"fastcross on cross_network.* was not verified"):
        results.load(file)


def test_a_run_keeps_the_suites_that_were_not_measured_again(tmp_path):
    file = tmp_path / "run-1.json"
    results.save(file, {"a": {"cases": []}, "b": {"cases": []}})
    results.save(file, {"b": {"cases": [{"workload": {}, "missing": {}, "contestants": {}}]}})
    assert [len(suite["cases"]) for suite in json.loads(file.read_text()).values()] == [0, 1]


def entry(name, calls):
    step = Entry(lambda: calls.append(name), lambda: {"y": torch.ones(1)}, {"y": Expected(torch.ones(1), 0.0)})
    return measure.verify(name, step, {})


def test_contestants_take_turns():
    calls = []
    times = measure.interleave([entry("a", calls), entry("b", calls)], budget=0.0, latency=True)
    warm, rounds = calls[:2], calls[2:]
    assert warm == ["a", "b"]
    # The first of each pair is not timed; everybody begins as often.
    assert ["".join(rounds[i : i + 4]) for i in range(0, 16, 4)] == ["aabb", "bbaa", "bbaa", "aabb"]
    assert len(times["a"]) == len(times["b"]) == 20


def test_nobody_always_follows_the_same_neighbour():
    orders = [measure.order("abcd", turn) for turn in range(8)]
    follows = {name: set() for name in "abcd"}
    for order in orders:
        for first, second in itertools.pairwise(order):
            follows[second].add(first)
    assert all(len(before) > 1 for before in follows.values())
    assert sorted(order[0] for order in orders) == sorted("abcd" * 2)


def test_the_device_clock_flushes_and_reads_events(monkeypatch):
    """The same order of calls as on a GPU: flush, event, step, event, wait."""
    calls = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            calls.append("event")

        def elapsed_time(self, end):
            return 2.0  # milliseconds

    flush = type("Flush", (), {"zero_": lambda self: calls.append("flush")})()
    monkeypatch.setattr(torch, "empty", lambda *size, **options: flush)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    assert clock.DeviceClock()(lambda: calls.append("step")) == 0.002
    assert calls == ["flush", "event", "step", "event", "wait"]


def test_peak_counts_what_a_call_allocates():
    x = torch.ones(1 << 22)
    assert memory.peak_bytes(lambda: x + 1 + 1, clock.device()) == pytest.approx(2 * x.nbytes, rel=0.1)


def test_occupancy_by_published_limits():
    h100, mi300 = gpu_static.TARGETS["sm_90"], gpu_static.TARGETS["gfx942"]
    assert gpu_static.occupancy(h100, registers=32, num_warps=4) == 1.0
    assert gpu_static.occupancy(h100, registers=255, num_warps=4) == 8 / 64
    assert gpu_static.occupancy(h100, registers=255, num_warps=16) == 0
    assert gpu_static.occupancy(mi300, registers=128, num_warps=4) == 0.5


def test_an_estimate_is_bytes_over_published_bandwidth():
    launch = Launch("sm_90", "module", "kernel", (), (), (), 4, (("x0_ptr", 4),))
    code = Code(registers=128, spills=0, words=frozenset({128}), reads=1, writes=1)
    row = gpu_static.row(Case("sm_90", "cross_network_fwd", 1026, 6, "fp32", "aligned"), [(launch, code)])
    assert row["occupancy"] == 0.25
    assert math.isclose(row["estimated_seconds"], 4096 * 8208 / 3350e9, rel_tol=0.01)


def test_baseline_covers_the_quick_run_and_a_fall_is_seen():
    baseline = json.loads(check.BASELINE.read_text())["gains"]
    assert set(baseline) == {str(problem) for problem in QUICK}
    assert check.fallen(baseline, baseline) == []
    slower = {title: gain / 2 for title, gain in baseline.items()}
    assert check.fallen(slower, baseline) == list(baseline)
    with pytest.raises(Refused, match="no baseline"):
        check.fallen({"something new": 1.0}, baseline)


def test_a_quick_run_measures_gains():
    (gain,) = check.gains((PROBLEM,), budget=0.01).items()
    assert gain[0] == str(PROBLEM)
    assert 0.01 < gain[1] < 100
