"""pytest benchmarks/ --benchmark-only: every file is a group, measured in a process of its own.

A benchmark file has a function ``cases(full)``, which lists workloads and their contestants. All contestants of a
workload are verified and timed in turns in the group's process; then each is a test of its own, which hands its times
to pytest-benchmark: that keeps its tables, its JSON and its comparisons, and what it shows was measured interleaved.
"""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harness, machine, results, tables


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fastcross")
    group.addoption("--full", action="store_true", help="the wide grid: every depth, width, batch and dtype; hours")
    group.addoption("--budget", type=float, default=None, help="seconds of timing per workload (1)")
    group.addoption("--results", type=Path, default=None, help="where the JSON goes (benchmarks/results/DEVICE.json)")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("benchmark_columns", ()) is None:
        config.option.benchmark_columns = ["median", "iqr", "rounds"]
    config.stash[GROUPS] = {}


GROUPS = pytest.StashKey[dict[str, Any]]()


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
    if "workload" in metafunc.fixturenames:
        pairs = [
            pytest.param(workload, contestants, name, id=f"{workload}-{name}")
            for workload, contestants in metafunc.module.cases(metafunc.config.getoption("full"))
            for name in contestants
        ]
        metafunc.parametrize(("workload", "contestants", "contestant"), pairs)


def pytest_itemcollected(item: pytest.Item) -> None:
    if "workload" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.benchmark(timer=tape.read))


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    """The group's own: whatever an earlier group compiled, allocated or left in a thread pool is not there."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.fixture(scope="module")
def group(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """The record that this file's workloads are added to; written when the last of them is done.

    A group with a refused workload is left out whole.
    """
    config = request.config
    name = request.module.__name__.rpartition(".")[2].removeprefix("bench_")
    full = " --full" if config.getoption("full") else ""
    record = {
        "title": request.module.__doc__.strip(),
        "command": f"pytest benchmarks/bench_{name}.py --benchmark-only{full}",
        "machine": machine.machine(),
        "versions": machine.versions(),
        "cases": [],
    }
    failed = request.session.testsfailed
    yield record
    if record["cases"] and request.session.testsfailed == failed:
        results.save(config.getoption("results") or results.path(), {name: record})
        config.stash[GROUPS][name] = record


@pytest.fixture(scope="module")
def futures() -> dict[str, Future]:
    """The workloads that were sent to the group's process, by title."""
    return {}


@pytest.fixture
def compete(
    request: pytest.FixtureRequest,
    benchmark: Any,
    process: ProcessPoolExecutor,
    group: dict,
    futures: dict[str, Future],
) -> Callable:
    """Measures a workload when its first contestant asks, and hands each contestant its times."""

    def play(workload: Any, contestants: tuple[str, ...], contestant: str) -> None:
        title = workload.describe()["title"]
        if title not in futures:
            usual = getattr(workload, "budget", None) or getattr(request.module, "BUDGET", 1.0)
            budget = request.config.getoption("budget") or usual
            futures[title] = process.submit(harness.measure, workload, contestants, tables.BASES, budget)
        case = futures[title].result()  # a refused workload refuses every contestant of it
        if case not in group["cases"]:
            group["cases"].append(case)
        if contestant in case["missing"]:
            pytest.skip(f"{contestant}: {case['missing'][contestant]}")
        record = case["contestants"][contestant]
        benchmark.group, benchmark.name = title, contestant
        benchmark.extra_info.update({key: value for key, value in record.items() if key != "times"})
        benchmark.pedantic(tape.advance, args=(iter(record["times"]),), rounds=len(record["times"]))

    return play


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    groups = config.stash[GROUPS]
    for group in groups.values():
        terminalreporter.write_sep("-", group["title"].splitlines()[0])
        terminalreporter.write_line(tables.group_tables(group))
    if groups:
        file = config.getoption("results") or results.path()
        terminalreporter.write_line(f"{', '.join(groups)} in {file}; tables and figures: python -m benchmarks.report")
