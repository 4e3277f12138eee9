"""pytest benchmarks/ --benchmark-only: every suite of :mod:`benchmarks.suites`, each in a process of its own.

All contestants of a case are verified and timed in turns in the suite's process; then each is a test of its own, which
hands its times to pytest-benchmark: that keeps its tables, its JSON and its comparisons, and what it shows was measured
interleaved.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import suites
from benchmarks.contestants import Contestant
from benchmarks.harness import results
from benchmarks.harness.competition import Competition
from benchmarks.report import tables
from benchmarks.report.runs import Suite


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fastcross")
    group.addoption("--full", action="store_true", help="the wide grid: every depth, width, batch and dtype; hours")
    group.addoption("--suite", action="append", help="only this suite, by its name; may be repeated")
    group.addoption("--budget", type=float, default=None, help="seconds of timing per workload (each suite's own)")
    group.addoption("--run", type=int, default=None, help="which of the committed runs this is: results/DEVICE/run-N")
    group.addoption("--results", type=Path, default=None, help="where the JSON goes (results/DEVICE/last.json)")


COMPETITION = pytest.StashKey[Competition]()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("benchmark_columns", ()) is None:
        config.option.benchmark_columns = ["median", "iqr", "rounds"]


class Tape:
    """Plays measured times back to pytest-benchmark: its clock is ours, and each call moves it by one of them."""

    def __init__(self) -> None:
        self.now = 0.0

    def read(self) -> float:
        return self.now

    def advance(self, seconds: Iterator[float]) -> None:
        self.now += next(seconds)


tape = Tape()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "contestant" in metafunc.fixturenames:
        full, wanted = metafunc.config.getoption("full"), metafunc.config.getoption("suite")
        names = [suite.name for suite in suites.SUITES]
        if unknown := [name for name in wanted or () if name not in (*names, "gpu_kernels")]:
            raise pytest.UsageError(f"--suite must be one of {', '.join(names)}, gpu_kernels; got {unknown[0]}")
        entries = [
            pytest.param(suite, case, contestant, id=f"{suite.name}/{case.workload}-{contestant.name}")
            for suite in suites.SUITES
            if not wanted or suite.name in wanted
            for case in suite.cases(full)
            for contestant in case.contestants
        ]
        metafunc.parametrize(("suite", "case", "contestant"), entries)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = config.getoption("suite")
    if wanted and "gpu_kernels" not in wanted:
        items[:] = [item for item in items if item.name != "bench_gpu_kernels"]
    for item in items:
        if "contestant" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.benchmark(timer=tape.read))


@pytest.fixture(scope="session")
def competition(request: pytest.FixtureRequest) -> Iterator[Competition]:
    config = request.config
    file = config.getoption("results") or results.path(config.getoption("run"))
    made = Competition(file, config.getoption("full"), config.getoption("budget"))
    config.stash[COMPETITION] = made
    yield made
    made.close()


@pytest.fixture
def play(benchmark: Any) -> Callable:
    """Hands a contestant's times to pytest-benchmark."""

    def hand_over(case: dict[str, Any], contestant: Contestant) -> None:
        if contestant.name in case["missing"]:
            pytest.skip(f"{contestant.name}: {case['missing'][contestant.name]}")
        record = case["contestants"][contestant.name]
        benchmark.group, benchmark.name = case["workload"]["title"], contestant.name
        benchmark.extra_info.update({key: value for key, value in record.items() if key != "times"})
        benchmark.pedantic(tape.advance, args=(iter(record["times"]),), rounds=len(record["times"]))

    return hand_over


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    competition = config.stash.get(COMPETITION, None)
    if competition is None or not competition.saved:
        return
    for name, record in competition.saved.items():
        suite = Suite(name, [record])
        terminalreporter.write_sep("-", suite.title)
        terminalreporter.write_line(tables.suite_tables(suite))
    terminalreporter.write_line(f"{', '.join(competition.saved)} in {competition.file}")
