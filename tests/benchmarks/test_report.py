"""From runs to README: the median of the runs, the widest spread, and no claim that the spread does not carry."""

import copy
import json

import pytest

from benchmarks.contestants import COPY, DEEPCTR, DNN, EAGER, OURS, TORCHFM, same_adam, swapped
from benchmarks.harness import measure, results
from benchmarks.harness.measure import Refused
from benchmarks.report import __main__ as report
from benchmarks.report import runs, summary, tables
from benchmarks.report.runs import Spread
from benchmarks.static import gpu_static
from benchmarks.suites import DEPTHS, NETWORK, SUITES
from benchmarks.workloads.operators import Depths, Problem
from benchmarks.workloads.roof import LARGE_COPY, PRODUCT, Roof

MACHINE = {"processor": "a processor", "cores": "2", "threads": "2", "memory": "4 GiB"}


def case(times, **workload):
    """A record with these times, in milliseconds, round by round."""
    contestants = {
        name: {"times": [t / 1e3 for t in taken], "errors": {"y": [0.0, 1.0]}, "kept_bytes": 1, "peak_bytes": 2}
        for name, taken in times.items()
    }
    described = {"title": "a workload", "kind": "training step", "latency": False} | workload
    return {"workload": described, "contestants": contestants, "missing": {}}


def suite(*cases):
    return {"command": "pytest …", "machine": MACHINE, "versions": {"torch": "1"}, "cases": [*cases]}


def merged(*measured):
    """The same case in several runs."""
    return runs.Case([case(times) for times in measured])


def test_a_figure_is_the_median_of_the_runs_and_its_spread_the_widest():
    assert runs.over_runs([range(101), range(10, 111), range(100, 201)]) == Spread(20, 60, 180)
    # The second round was disturbed, for both: a ratio within the round does not see it.
    one = merged({"a": [1.0, 10.0, 1.0], "b": [2.0, 20.0, 2.0]})
    assert one.ratio("b", "a") == Spread(2, 2, 2)
    assert one.ratio("a", "b").middle == 0.5
    three = merged(*({"a": [1.0, 1.0], "b": [ratio, ratio]} for ratio in (3.0, 1.0, 2.0)))
    assert three.ratio("b", "a") == Spread(1, 2, 3)
    assert three.seconds("b").middle == 0.002


def test_a_spread_that_covers_one_is_no_claim():
    noisy = merged(
        {OURS.name: [9.0], EAGER.name: [11.0], DNN.name: [10.0]},
        {OURS.name: [11.0], EAGER.name: [12.0], DNN.name: [10.0]},
    )
    (fact,) = summary._step(noisy)
    assert "within noise of 1× (0.9 to 1.1) the time of its DNN alone" in fact
    assert "cross layers one by one: 1.15× (1.1 to 1.2)" in fact
    # A DCN's step contains its DNN's: below 1 is noise, however narrow the spread.
    (fact,) = summary._step(merged({OURS.name: [8.0, 9.0], EAGER.name: [9.0, 9.0], DNN.name: [10.0, 10.0]}))
    assert "within noise of 1× (0.82 to 0.88)" in fact
    (fact,) = summary._step(merged({OURS.name: [10.0], TORCHFM.name: [10.5]}, {OURS.name: [10.0], TORCHFM.name: [9.9]}))
    assert "within noise of 1× (0.99 to 1.05) as fast as torchfm's" in fact


def test_a_ratio_of_two_optimisers_says_which_and_stands_beside_that_of_one():
    (fact,) = summary._step(merged({OURS.name: [1.0], DEEPCTR.name: [24.0], same_adam(DEEPCTR).name: [3.0]}))
    assert "24× (24 to 24) as fast as DeepCTR-Torch's as it comes, whose Adam updates whole tables" in fact
    assert "3× (3 to 3) as fast with the same optimiser in both" in fact


def test_the_gain_of_a_swap_is_in_its_table():
    table = tables.case_table(merged({TORCHFM.name: [6.0], swapped(TORCHFM).name: [2.0]}))
    assert "× before" in table.splitlines()[2]
    assert "3×" in table


def test_missing_contestants_stand_in_the_table():
    record = case({OURS.name: [1.0]})
    record["missing"] = {"TorchRec": "not installed"}
    table = tables.case_table(runs.Case([record]))
    assert "missing" in table
    assert "TorchRec: not installed." in table


@pytest.mark.parametrize("what", ["machine", "versions", "suites", "contestants", "workload", "unknown", "none"])
def test_runs_that_were_not_made_alike_are_refused(what, tmp_path):
    run = {"swap": suite(case({OURS.name: [1.0], EAGER.name: [2.0]}))}
    other = copy.deepcopy(run)
    if what == "machine":
        other["swap"]["machine"]["threads"] = "1"
    elif what == "versions":
        other["swap"]["versions"]["torch"] = "2"
    elif what == "suites":
        other["latency"] = suite()
    elif what == "contestants":
        del other["swap"]["cases"][0]["contestants"][EAGER.name]
    elif what == "workload":
        other["swap"]["cases"][0]["workload"]["rows"] = 7
    elif what == "unknown":
        run = other = {"something old": suite()}
    if what != "none":
        results.save(tmp_path / "run-1.json", run)
        results.save(tmp_path / "run-2.json", other)
    with pytest.raises(Refused):
        runs.load(tmp_path)


def tiny_run():
    """Small measurements of each kind of figure."""

    def measured(workload, *contestants):
        return measure.measure(workload, contestants, 0.01)

    names = OURS, EAGER, COPY
    paper = [
        measured(Problem(NETWORK, 40, 24, 3), *names),
        measured(Problem(NETWORK, 40, 24, 3, backward=False), *names),
    ]
    paper += [measured(Depths(Problem(NETWORK, 8, 6)), *DEPTHS), measured(Roof(1 << 12, 32), LARGE_COPY, PRODUCT)]
    deep_cases = [measured(Problem(NETWORK, 8, 6, layers), *names) for layers in (1, 4)]
    wide_cases = [measured(Problem(NETWORK, 8, d, 2), *names) for d in (4, 16)]
    texts = dict.fromkeys(("target", "chip", "operator", "dtype", "registers", "spills", "word", "bytes/row"), "1")
    row = texts | {"occupancy": 0.5, "wrong": "", "estimated_seconds": 1e-5}
    return {
        gpu_static.SUITE: suite({"rows": [row]}),
        "cross_network_depth": suite(*deep_cases),
        "cross_network_width": suite(*wide_cases),
        "cross_network_grid": suite(*deep_cases),
        "cross_network": suite(*paper),
    }


def test_report_from_three_runs(tmp_path):
    """The page, the figures and the README's part; twice the same."""
    measured = tiny_run()
    for run in (1, 2, 3):
        for record in measured["cross_network"]["cases"][0]["contestants"].values():
            record["times"] = record["times"][::-1]
            record["times"][0] *= 2
        results.save(tmp_path / f"run-{run}.json", measured)
    readme, page = tmp_path / "README.md", tmp_path / "docs" / "benchmarks.md"
    readme.write_text(f"before\n{report.START}\nold numbers\n{report.END}\nafter\n")
    page.parent.mkdir()
    command = ["--results", str(tmp_path), "--root", str(tmp_path)]
    assert report.main(command) == 0
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old numbers" not in text
    paper = runs.load(tmp_path)["cross_network"].cases[0]
    assert tables.spread(paper.ratio(EAGER.name, OURS.name)) in text
    assert "Medians of the medians of 3 runs" in text
    written = page.read_text()
    assert f"1/{(24 * 2 + 3) / 3:.0f} of what the eager loop keeps" in written
    assert gpu_static.ESTIMATE in written
    assert "a processor" in written
    order = [f"## {entry.title}" for entry in SUITES if entry.title in written]
    assert order == [line for line in written.splitlines() if line.startswith("## ")][:-1]
    figures = {path.name for path in (tmp_path / "docs" / "figures").iterdir()}
    assert figures == {"time-against-depth.png", "memory-against-depth.png", "time-against-width.png", "roofline.png"}
    assert report.main(command) == 0
    assert (readme.read_text(), page.read_text()) == (text, written)
    page.write_text(f"{written}\n{report.PROGRAMS}\n\n## Requests\n")
    assert report.main(command) == 0
    assert page.read_text() == f"{written}\n{report.PROGRAMS}\n\n## Requests\n"
    readme.write_text("no markers")
    assert report.main(command) == 1


def test_every_sample_is_in_the_file(tmp_path):
    """In a line for each contestant, so that what changed can be read."""
    record = measure.measure(Problem(NETWORK, 8, 6, 3), (OURS, EAGER), 0.01)
    results.save(tmp_path / "run-1.json", {"cross_network": suite(record)})
    text = (tmp_path / "run-1.json").read_text()
    assert json.loads(text)["cross_network"]["cases"] == [record]
    for contestant in record["contestants"].values():
        assert len(contestant["times"]) >= measure.MIN_ROUNDS
        assert sum(json.dumps(contestant["times"], separators=(",", ":")) in line for line in text.splitlines()) == 1
