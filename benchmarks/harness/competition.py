"""A run over the suites, one after the other: each in a process of its own, written down when its last case is done."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import machine, measure, results

if TYPE_CHECKING:
    from benchmarks.suites import Case, Suite


class Competition:
    """Measures a case when its first contestant asks, and remembers it for the others.

    A suite with a refused case, or one that was interrupted, is left out whole.
    """

    def __init__(self, file: Path, full: bool = False, budget: float | None = None) -> None:
        self.file, self.full, self.budget = file, full, budget
        self.saved: dict[str, Any] = {}
        self._suite: str | None = None
        self._expected = 0  # cases of the suite
        self._process: ProcessPoolExecutor | None = None
        self._cases: dict[str, Any] = {}

    def record(self, suite: "Suite", case: "Case") -> dict[str, Any]:
        """The record of one case; raises :class:`~benchmarks.harness.measure.Refused` for each of its contestants."""
        self._begin(suite.name, len(suite.cases(self.full)))
        title = case.workload.describe()["title"]
        if title not in self._cases:
            if self._process is None:  # whatever an earlier suite compiled, allocated or left in a pool is not there
                self._process = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
            job = self._process.submit(measure.measure, case.workload, case.contestants, self.budget or case.seconds)
            self._cases[title] = job.exception() or job.result()
        found = self._cases[title]
        if isinstance(found, BaseException):
            raise found
        return found

    def add(self, suite: str, record: dict[str, Any]) -> None:
        """A record that was made elsewhere, as a suite."""
        self._begin(suite, 1)
        self._cases[suite] = record

    def close(self) -> None:
        """Writes the suite down, if all of its cases were measured, and ends its process."""
        if self._process is not None:
            self._process.shutdown()
        measured = [case for case in self._cases.values() if not isinstance(case, BaseException)]
        if self._suite is not None and len(measured) == self._expected:
            full = " --full" if self.full else ""
            record = {
                "command": f"pytest benchmarks/ --benchmark-only --suite {self._suite}{full}",
                "machine": machine.machine(),
                "versions": machine.versions(),
                "cases": measured,
            }
            results.save(self.file, {self._suite: record})
            self.saved[self._suite] = record
        self._suite, self._process, self._cases = None, None, {}

    def _begin(self, suite: str, expected: int) -> None:
        if suite != self._suite:
            self.close()
            self._suite, self._expected = suite, expected
