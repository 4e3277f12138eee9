"""The committed runs as one: a figure is the median of the runs' medians, its spread the widest of their spreads."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import suites
from benchmarks.contestants import Contestant
from benchmarks.harness import results
from benchmarks.harness.measure import Refused
from benchmarks.static import gpu_static


class Spread(NamedTuple):
    """The median over the runs of each run's median; the lowest 20th and the highest 80th percentile of any run."""

    low: float
    middle: float
    high: float

    @property
    def covers_one(self) -> bool:
        return self.low <= 1 <= self.high


def over_runs(samples: Sequence[Sequence[float]]) -> Spread:
    low, middle, high = np.transpose([np.percentile(run, (20, 50, 80)) for run in samples])
    return Spread(float(low.min()), float(np.median(middle)), float(high.max()))


class Case:
    """One workload, in every run."""

    def __init__(self, records: Sequence[dict[str, Any]]) -> None:
        first, *others = records
        self.workload: dict[str, Any] = first["workload"]
        self.missing: dict[str, str] = first["missing"]
        self.names: list[str] = [*first["contestants"]]
        self._runs = [record["contestants"] for record in records]
        for other in others:
            if other["workload"] != self.workload or [*other["contestants"]] != self.names:
                raise Refused(f"{self.workload['title']}: the runs differ in the workload or in who took part")

    @property
    def title(self) -> str:
        return self.workload["title"]

    def has(self, *contestants: Contestant) -> bool:
        return all(contestant.name in self.names for contestant in contestants)

    def seconds(self, name: str) -> Spread:
        return over_runs([run[name]["times"] for run in self._runs])

    def percentile(self, name: str, at: float) -> float:
        return float(np.median([np.percentile(run[name]["times"], at) for run in self._runs]))

    def ratio(self, name: str, base: str) -> Spread:
        """How many times as long as the base's the contestant's time is, both in the same round."""
        return over_runs([np.divide(run[name]["times"], run[base]["times"]) for run in self._runs])

    def weight(self, name: str, what: str) -> float | None:
        """``kept_bytes`` or ``peak_bytes``; None where they were not weighed."""
        values = [run[name].get(what) for run in self._runs]
        return None if None in values else float(np.median(values))


class Suite:
    """One suite, in every run."""

    def __init__(self, name: str, records: Sequence[dict[str, Any]]) -> None:
        self.name, self.runs = name, len(records)
        first, *others = records
        self.machine: dict[str, str] = first["machine"]
        self.versions: dict[str, str] = first["versions"]
        self.command: str = first["command"]
        for other in others:
            for key in ("machine", "versions", "command"):
                if other[key] != first[key]:
                    raise Refused(f"{name}: the runs differ in their {key}: {first[key]} and {other[key]}")
            if len(other["cases"]) != len(first["cases"]):
                raise Refused(f"{name}: the runs have {len(first['cases'])} and {len(other['cases'])} cases")
        self.registered = REGISTERED.get(name, suites.Suite(name, name, ()))
        if name == gpu_static.SUITE:
            if any(other["cases"] != first["cases"] for other in others):
                raise Refused(f"{name}: the runs compiled different machine code")
            self.rows: list[dict[str, Any]] = first["cases"][0]["rows"]
            self.cases: list[Case] = []
        else:
            self.rows = []
            self.cases = [Case(records) for records in zip(*(record["cases"] for record in records), strict=True)]

    @property
    def title(self) -> str:
        return self.registered.title

    def of_kind(self, kind: str) -> list[Case]:
        return [case for case in self.cases if case.workload["kind"] == kind]


REGISTERED = {suite.name: suite for suite in suites.SUITES} | {
    gpu_static.SUITE: suites.Suite(gpu_static.SUITE, gpu_static.TITLE, ())
}


def load(folder: Path) -> dict[str, Suite]:
    """The suites of all runs in a folder, in the order of the registry."""
    files = results.runs(folder)
    if not files:
        raise Refused(f"{folder} has no run-1.json; first: python -m benchmarks.run")
    runs = [results.load(file) for file in files]
    for file, run in zip(files, runs, strict=True):
        if run.keys() != runs[0].keys():
            raise Refused(f"{file} has the suites {', '.join(run)}; {files[0]} has {', '.join(runs[0])}")
        if unknown := [name for name in run if name not in REGISTERED]:
            raise Refused(f"{file} has {', '.join(unknown)}, of which benchmarks.suites knows nothing: measure again")
    return {name: Suite(name, [run[name] for run in runs]) for name in REGISTERED if name in runs[0]}
