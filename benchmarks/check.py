"""python -m benchmarks.check: a quick run's ratios against the committed baseline.

Times differ from machine to machine; how many times as fast as the eager loop fastcross is differs much less. A gain
more than BAND below its baseline is measured a second time, and fails if the better of the two is still below. The
baseline is the median of three runs. On one quiet virtual machine single runs were up to a third apart; the band is as
wide, and catches a kernel that lost its threads or its vector instructions, not a few per cent.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contestants import EAGER, OURS
from benchmarks.harness import machine
from benchmarks.harness.measure import Refused, measure
from benchmarks.suites import QUICK
from benchmarks.workloads.operators import Problem

BASELINE = Path(__file__).parent / "baseline.json"
BAND = 0.35


def gains(problems: tuple[Problem, ...] = QUICK, budget: float = 2.0) -> dict[str, float]:
    """How many times as fast as the eager loop, in a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(measure, problem, (OURS, EAGER), budget) for problem in problems]
        cases = [job.result()["contestants"] for job in jobs]
    ratios = [np.divide(case[EAGER.name]["times"], case[OURS.name]["times"]) for case in cases]
    return {str(problem): float(f"{np.median(ratio):.4g}") for problem, ratio in zip(problems, ratios, strict=True)}


def fallen(measured: dict[str, float], baseline: dict[str, float], band: float = BAND) -> list[str]:
    """The workloads whose gain is more than the band below the baseline's."""
    missing = [title for title in measured if title not in baseline]
    if missing:
        raise Refused(f"no baseline for {'; '.join(missing)}: python -m benchmarks.check --update")
    return [title for title, gain in measured.items() if gain < (1 - band) * baseline[title]]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.check", description=__doc__)
    parser.add_argument("--update", action="store_true", help="write the median of three runs as the baseline")
    parser.add_argument("--baseline", type=Path, default=BASELINE)
    parser.add_argument("--budget", type=float, default=2.0, help="seconds of timing per workload (2)")
    chosen = parser.parse_args(arguments)
    if chosen.update:
        runs = [gains(budget=chosen.budget) for _ in range(3)]
        middle = {title: statistics.median(run[title] for run in runs) for title in runs[0]}
        record: dict[str, Any] = {"machine": machine.machine(), "versions": machine.versions(), "gains": middle}
        chosen.baseline.write_text(json.dumps(record, indent=1) + "\n")
        print(f"wrote {chosen.baseline}")
        return 0
    measured = gains(budget=chosen.budget)
    record = json.loads(chosen.baseline.read_text())
    baseline = record["gains"]
    if record["machine"] != machine.machine():
        print(f"the baseline is from another machine, {record['machine']}: ratios carry over, but only roughly")
    low = fallen(measured, baseline)
    if low:
        again = gains(tuple(problem for problem in QUICK if str(problem) in low), chosen.budget)
        measured |= {title: max(gain, measured[title]) for title, gain in again.items()}
        low = fallen(measured, baseline)
    for title, gain in measured.items():
        verdict = f"FELL by more than {BAND:.0%}" if title in low else "ok"
        print(f"{title:70} {gain:6.2f}× the eager loop, baseline {baseline[title]:6.2f}×   {verdict}")
    return 1 if low else 0


if __name__ == "__main__":
    sys.exit(main())
