"""The benchmarks' own rules: nothing wrong or unverified is timed, nobody is dropped in silence, numbers add up."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastcross
from benchmarks import (
    check,
    clock,
    contestants,
    counts,
    harness,
    memory,
    models,
    report,
    results,
    tables,
)
from benchmarks.contestants import COPY, EAGER, OURS, PEER_CLASSES, Depths, Problem
from benchmarks.harness import Contestant, Expected, Missing, Refused, Verified
from benchmarks.static import gpu_static

ROOT = Path(__file__).parents[2]
PROBLEM = Problem("cross_network", 40, 24, 3)


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    monkeypatch.setattr(harness, "LATENCY_ROUNDS", 20)
    monkeypatch.setattr(harness, "MAX_ROUNDS", 20)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def measure(workload, names, budget=0.01):
    return harness.measure(workload, names, tables.BASES, budget)


@pytest.mark.parametrize("operator", ["cross_layer", "cross_network", "cross_logits"])
@pytest.mark.parametrize("backward", [True, False])
def test_every_backend_competes(operator, backward):
    case = measure(Problem(operator, 40, 24, 3, backward=backward), (OURS, contestants.CLOSED_FORM, EAGER, COPY))
    assert set(case["contestants"]) == {OURS, contestants.CLOSED_FORM, EAGER, COPY}
    results = {"y"} | ({f"d{k}" for k in Problem(operator, 1, 1).operands} if backward else set())
    assert set(case["contestants"][OURS]["errors"]) == results


@pytest.mark.parametrize("peer", PEER_CLASSES)
def test_peers_compete_with_our_weights(peer):
    pytest.importorskip(PEER_CLASSES[peer].split(".")[0])
    case = measure(PROBLEM, (peer, peer + contestants.SWAPPED))
    assert set(case["contestants"]) == {peer, peer + contestants.SWAPPED}
    kept = {name: record["kept_bytes"] for name, record in case["contestants"].items()}
    assert kept[peer + contestants.SWAPPED] < kept[peer]


@pytest.mark.parametrize("wrong", ["output", "gradient", "nan"])
def test_a_wrong_kernel_is_refused(wrong, monkeypatch):
    original = fastcross.cross_network

    def broken(x0, w, b, **options):
        y = original(x0, w, b, **options)
        if wrong == "output":
            return y + 1e-3
        if wrong == "nan":
            return torch.where(torch.arange(len(y))[:, None] == 7, torch.nan, y)
        return y + 1e-3 * (x0 - x0.detach())

    monkeypatch.setattr(fastcross, "cross_network", broken)
    with pytest.raises(Refused, match="fastcross is wrong, its time does not count"):
        measure(PROBLEM, (OURS, EAGER))


def test_a_wrong_row_of_a_large_batch_is_refused(monkeypatch):
    problem = Problem("cross_network", 5000, 1024, 1)
    assert len(problem.sample) < problem.rows
    original = fastcross.cross_network
    monkeypatch.setattr(fastcross, "cross_network", lambda *a, **k: torch.cat((original(*a, **k)[:-1], a[0][-1:])))
    with pytest.raises(Refused):
        harness.verify(OURS, problem.enter(OURS), problem.expected())


def test_without_verification_there_is_no_time(tmp_path):
    contestant = PROBLEM.enter(OURS)
    with pytest.raises(Refused, match="fastcross was not verified"):
        harness.interleave([Verified(OURS, contestant)], 0.01)
    case = measure(PROBLEM, (OURS,))
    case["contestants"][OURS]["errors"] = {}
    file = tmp_path / "cpu.json"
    results.save(file, {"a": {"cases": [case]}})
    with pytest.raises(Refused, match=r"fastcross on cross_network.* was not verified"):
        results.load(file)


def test_a_peer_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(contestants.PEER_CLASSES, "TorchRec", "no_such_package.CrossNet")
    case = measure(PROBLEM, (OURS, "TorchRec"))
    assert "requirements-peers.txt" in case["missing"]["TorchRec"]
    table = tables.case_table(case)
    assert "TorchRec" in table
    assert "missing" in table


def test_what_does_not_fit_into_memory_is_named(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1e3)
    with pytest.raises(Missing, match="needs about"):
        PROBLEM.enter(EAGER)


def test_percentiles_and_paired_ratios():
    assert harness.percentiles(range(101)) == {"p20": 20, "p50": 50, "p80": 80}
    # The second call was disturbed, for both: a ratio within the round does not see it.
    times = {"a": [1.0, 10.0, 1.0], "b": [2.0, 20.0, 2.0]}
    assert harness.ratios(times, "a")["b"] == {"p20": 2, "p50": 2, "p80": 2}
    assert harness.ratios(times, "b")["a"]["p50"] == 0.5


def test_contestants_take_turns():
    calls = []
    one = Expected(torch.ones(1), 0.0)

    def entry(name):
        step = Contestant(lambda: calls.append(name), lambda: {"y": torch.ones(1)}, {"y": one})
        return harness.verify(name, step, {})

    times = harness.interleave([entry("a"), entry("b")], budget=0.0, latency=True)
    warm, rounds = calls[:2], calls[2:]
    assert warm == ["a", "b"]
    assert ["".join(rounds[i : i + 4]) for i in range(0, 12, 4)] == ["aabb", "bbaa", "aabb"]  # the first is not timed
    assert len(times["a"]) == len(times["b"]) == 20


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cuda_graphs_compete():
    case = measure(PROBLEM, (OURS, OURS + contestants.GRAPH, EAGER + contestants.GRAPH))
    assert not case["missing"]


def test_kept_bytes_are_those_of_the_closed_form_and_of_the_loop():
    rows, d, layers = PROBLEM.rows, PROBLEM.d, PROBLEM.layers
    case = measure(PROBLEM, (OURS, EAGER))["contestants"]
    assert case[OURS]["kept_bytes"] == 4 * rows * layers
    assert case[EAGER]["kept_bytes"] == 4 * rows * (d * (layers - 1) + layers)


def test_peak_counts_what_a_call_allocates():
    x = torch.ones(1 << 22)
    assert memory.peak_bytes(lambda: x + 1 + 1, clock.device()) == pytest.approx(2 * x.nbytes, rel=0.1)


def test_byte_counts_of_the_closed_form():
    assert [counts.floor_copies("cross_network", backward) for backward in (False, True)] == [1, 2.5]
    assert [counts.floor_copies("cross_layer", backward) for backward in (False, True)] == [1.5, 4]
    assert [counts.floor_copies("cross_logits", backward) for backward in (False, True)] == [0.5, 1.5]
    assert counts.moved_bytes(OURS, 10, 8, 32, 4) == counts.moved_bytes(OURS, 10, 8, 1, 4) == 5 * 10 * 8 * 4
    assert counts.moved_bytes(EAGER, 10, 8, 32, 4) == 32 * 23 * 10 * 8 * 4


@pytest.mark.parametrize("rival", [models.DEEPCTR, models.TORCHFM])
def test_whole_models_compute_the_same_before_they_are_timed(rival):
    pytest.importorskip("deepctr_torch" if rival == models.DEEPCTR else "torchfm")
    shape = models.Shape(32, 20, (4,) * 3, 2 if rival == models.DEEPCTR else 0, 2, (8, 8))
    case = measure(models.TrainingStep(shape, rival), (OURS, rival))
    assert "cross weight" in case["contestants"][rival]["errors"]
    case = measure(models.TrainingStep(shape), (OURS, EAGER, models.DNN))
    assert models.DNN in case["bases"]
    case = measure(models.Request(shape), (OURS, EAGER, rival))
    assert case["contestants"][rival]["seconds"]["p99"] >= case["contestants"][rival]["seconds"]["p50"]


def test_a_model_with_other_weights_is_refused(monkeypatch):
    pytest.importorskip("torchfm")
    shape = models.Shape(32, 20, (4,) * 3, 0, 2, (8, 8))
    places = models.torchfm_places(shape)
    monkeypatch.setitem(
        models.THEIR_MODELS,
        models.TORCHFM,
        (models.torchfm, lambda _: {k: v for k, v in places.items() if k != "deep 0"}),
    )
    with pytest.raises(Refused, match="torchfm is wrong"):
        measure(models.TrainingStep(shape, models.TORCHFM), (models.TORCHFM,))


def test_occupancy_by_published_limits():
    h100, mi300 = gpu_static.TARGETS["sm_90"], gpu_static.TARGETS["gfx942"]
    assert gpu_static.occupancy(h100, registers=32, num_warps=4) == 1.0
    assert gpu_static.occupancy(h100, registers=255, num_warps=4) == 8 / 64
    assert gpu_static.occupancy(h100, registers=255, num_warps=16) == 0
    assert gpu_static.occupancy(mi300, registers=128, num_warps=4) == 0.5


def test_baseline_covers_the_quick_run_and_a_fall_is_seen():
    baseline = json.loads(check.BASELINE.read_text())["gains"]
    assert set(baseline) == {str(problem) for problem in check.PROBLEMS}
    assert check.fallen(baseline, baseline) == []
    slower = {title: gain / 2 for title, gain in baseline.items()}
    assert check.fallen(slower, baseline) == list(baseline)
    with pytest.raises(Refused, match="no baseline"):
        check.fallen({"something new": 1.0}, baseline)


TINY_GROUP = '''
"""A tiny group."""
from benchmarks.static import gpu_static
from benchmarks.contestants import COPY, EAGER, OURS, Problem

def cases(full):
    names = (OURS, EAGER, COPY, "torchfm") if full else (OURS, EAGER)
    return [(Problem("cross_layer", 16, 8), names)]

def bench_tiny(workload, contestants, contestant, compete):
    compete(workload, contestants, contestant)
'''


def test_the_suite_from_end_to_end(tmp_path):
    """A group in its own process, through pytest-benchmark, to JSON; who cannot take part is named."""
    (tmp_path / "bench_tiny.py").write_text(TINY_GROUP)
    options = ["--benchmark-only", "--full", "--budget=0.01", f"--results={tmp_path}/out.json"]
    options += [
        f"--benchmark-json={tmp_path}/theirs.json",
        "-p",
        "benchmarks.conftest",
        "-c",
        str(ROOT / "pyproject.toml"),
    ]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path / "bench_tiny.py")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "3 passed, 1 skipped" in run.stdout
    assert "torchfm: its module is a whole network" in run.stdout
    (group,) = json.loads((tmp_path / "out.json").read_text()).values()
    assert group["title"] == "A tiny group."
    ours = group["cases"][0]["contestants"][OURS]
    shown = {b["name"]: b["stats"] for b in json.loads((tmp_path / "theirs.json").read_text())["benchmarks"]}
    assert shown[OURS]["median"] == pytest.approx(ours["seconds"]["p50"], rel=1e-3)


def test_report_from_a_real_run(tmp_path):
    """Small measurements of each kind; then the page, the figures and the README's part."""
    names = (OURS, EAGER, "torchfm", COPY)
    depths = tuple(f"{OURS}, L = {n}" for n in (1, 12, 32)) + tuple(f"{EAGER}, L = {n}" for n in (1, 12))
    machine = {"processor": "a processor", "cores": "2", "threads": "2", "memory": "4 GiB"}

    def group(title, *cases):
        return {
            "title": title,
            "command": "pytest …",
            "machine": machine,
            "versions": {"torch": "1"},
            "cases": [*cases],
        }

    paper = [measure(PROBLEM, names), measure(PROBLEM, (OURS,)), measure(Depths(8, 6), depths)]
    from benchmarks.roof import COPY as LARGE_COPY
    from benchmarks.roof import PRODUCT, Roof

    paper.append(measure(Roof(1 << 12, 32), (LARGE_COPY, PRODUCT)))
    deep = [measure(Problem("cross_network", 8, 6, n), names) for n in (1, 4)]
    wide = [measure(Problem("cross_network", 8, d, 2), names) for d in (4, 16)]
    static = {"rows": [gpu_row()], "note": gpu_static.ESTIMATE}
    file = tmp_path / "cpu.json"
    results.save(file, {"cross_network": group("The network.", *paper), "cross_network_depth": group("Depth.", *deep)})
    results.save(file, {"cross_network_width": group("Width.", *wide), "cross_network_grid": group("Grid.", *deep)})
    results.save(file, {"gpu_kernels": group("Kernels.", static)})
    assert all(
        "times" not in c
        for g in json.loads(file.read_text()).values()
        for case in g["cases"]
        for c in case.get("contestants", {}).values()
    )

    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.START}\nold numbers\n{report.END}\nafter\n")
    (tmp_path / "docs").mkdir()
    assert report.main(["--results", str(file), "--root", str(tmp_path)]) == 0
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old numbers" not in text
    eager = json.loads(file.read_text())["cross_network"]["cases"][0]["contestants"][EAGER]
    assert tables.spread(eager["ratio_to"][OURS]) in text
    page = (tmp_path / "docs" / "benchmarks.md").read_text()
    assert gpu_static.ESTIMATE in page
    assert "a processor" in page
    figures = {path.name for path in (tmp_path / "docs" / "figures").iterdir()}
    assert figures == {"time-against-depth.png", "memory-against-depth.png", "time-against-width.png", "roofline.png"}
    assert report.replace_between_markers(text, report.summary(results.load(file))) == text
    readme.write_text("no markers")
    assert report.main(["--results", str(file), "--root", str(tmp_path)]) == 1


def gpu_row():
    from benchmarks.static.machine_code import Code, Launch
    from benchmarks.static.offline import Case

    launch = Launch("sm_90", "module", "kernel", (), (), (), 4, (("x0_ptr", 4),))
    code = Code(registers=128, spills=0, words=frozenset({128}), reads=1, writes=1)
    row = gpu_static.row(Case("sm_90", "cross_network_fwd", 1026, 6, "fp32", "aligned"), [(launch, code)])
    assert row["occupancy"] == 0.25
    assert math.isclose(row["estimated_seconds"], 4096 * 8208 / 3350e9, rel_tol=0.01)
    return row
