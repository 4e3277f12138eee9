"""The registry, and `pytest benchmarks/` from end to end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fastcross
from benchmarks import run
from benchmarks.contestants import EAGER, OURS
from benchmarks.harness import results
from benchmarks.report import plots
from benchmarks.suites import LAYER, OPERATORS, SUITES, operator_suite

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_worker(monkeypatch):
    """pytest-benchmark measures nothing in a worker of pytest-xdist, nor in what a worker starts."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)


def test_every_operator_has_a_suite_and_a_reference():
    names = [suite.name for suite in SUITES]
    assert len(names) == len(set(names))
    for operator in OPERATORS:
        assert operator.name in names
        assert hasattr(fastcross, operator.name)
        assert hasattr(fastcross.reference, operator.name)


def test_a_new_operator_is_one_entry():
    """An operator that the registry did not know, its operands in another order of sizes, has a suite at once."""
    suite = operator_suite(LAYER)
    assert [case.workload.backward for case in suite.cases()] == [False, True]
    assert {OURS.name, EAGER.name} < {contestant.name for contestant in suite.cases()[0].contestants}


@pytest.mark.parametrize("full", [False, True])
def test_titles_and_names_tell_everything_apart(full):
    """Results are kept by them."""
    for suite in SUITES:
        titles = [str(case.workload) for case in suite.cases(full)]
        assert len(titles) == len(set(titles)), suite.name
        for case in suite.cases(full):
            names = [contestant.name for contestant in case.contestants]
            assert len(names) == len(set(names)), case.workload
        assert set(suite.figures) <= plots.FIGURES.keys()


PLUGIN = """
from benchmarks import suites
from benchmarks.contestants import COPY, EAGER, OURS, TORCHFM
from benchmarks.workloads.operators import Problem

def layer(rows, *contestants):
    return suites.Case(suites.Problem(suites.LAYER, rows, 8), contestants)

wide = layer(16, OURS, EAGER, COPY, TORCHFM), layer(8, OURS)
suites.SUITES = (
    suites.Suite("tiny", "A tiny suite", (layer(16, OURS, EAGER),), wide),
    suites.Suite("other", "Another", (layer(4, OURS), layer(2, OURS))),
)
"""


def pytest_benchmarks(folder, *options):
    (folder / "tiny_suites.py").write_text(PLUGIN)
    command = [sys.executable, "-m", "pytest", "benchmarks/", "--benchmark-only", "-p", "tiny_suites", "--budget=0.01"]
    path = os.pathsep.join([str(folder), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_the_suites_from_end_to_end(tmp_path):
    """Each suite in its own process, through pytest-benchmark, to JSON; who cannot take part is named.

    Of the second suite only a part is asked for: it is not written down.
    """
    pytest.importorskip("torchfm")
    out, theirs = tmp_path / "out.json", tmp_path / "theirs.json"
    part = ["-k", "tiny or (other and 4)", "--suite=tiny", "--suite=other"]
    ran = pytest_benchmarks(tmp_path, "--full", *part, f"--results={out}", f"--benchmark-json={theirs}")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "5 passed, 1 skipped, 1 deselected" in ran.stdout
    assert "torchfm: its module is a whole network" in ran.stdout
    measured = results.load(out)
    assert [*measured] == ["tiny"]
    first, second = measured["tiny"]["cases"]
    assert [*second["contestants"]] == [OURS.name]
    assert measured["tiny"]["command"] == "pytest benchmarks/ --benchmark-only --suite tiny --full"
    shown = {b["name"]: b["stats"] for b in json.loads(theirs.read_text())["benchmarks"] if "B = 16" in b["group"]}
    assert shown[EAGER.name]["median"] == pytest.approx(np.median(first["contestants"][EAGER.name]["times"]), rel=1e-3)


def test_runs_are_numbered(monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    assert run.main(["--runs=2", "--first=7", "--", "--collect-only", "--suite=swap"]) == 0
    assert "run-8.json" in capfd.readouterr().out
    assert run.main(["--runs=2", "--", "--suite=nothing"]) != 0
    said = "".join(capfd.readouterr())
    assert "--suite must be one of cross_network, " in said
    assert "got nothing" in said
    assert "run 1 failed" in said
