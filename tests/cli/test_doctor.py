"""fastcross doctor: the command itself, on the C++ kernels and on the Triton kernels in the interpreter."""

import json
import os
import subprocess
import sys

import pytest

from fastcross import doctor, ops
from fastcross.cli.main import main
from fastcross.doctor import Check, Report, Timing, take_turns


def some_of(*names):
    return tuple(operator for operator in doctor.OPERATORS if operator.name in names)


def test_a_healthy_machine(tmp_path, capsys, monkeypatch, cpu_kernels):
    monkeypatch.setattr(doctor, "OPERATORS", some_of("cross_network", "cross_logits", "cross_matrix"))
    folder = tmp_path / "report"
    assert main(["doctor", "--quick", "--device", "cpu", "--output", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "**right: " in printed
    assert {path.name for path in folder.iterdir()} == {"report.md", "report.json", "roofline.png"}
    found = json.loads((folder / "report.json").read_text())
    assert found["verdict"].startswith("right")
    assert {check["dtype"] for check in found["checks"] if check["what"] == "cross_network"} == {
        "float32", "bfloat16", "float16", "float64",
    }  # fmt: skip
    assert len(found["timings"]) == 5
    assert all(0 < check["share"] <= 1 for check in found["checks"] if check["dtype"] == "float32")
    assert (folder / "roofline.png").read_bytes().startswith(b"\x89PNG")


def test_a_wrong_result_is_told_and_not_timed(tmp_path, capsys, monkeypatch, cpu_kernels):
    right = ops.cross_network
    monkeypatch.setattr(ops, "cross_network", lambda *tensors, **options: right(*tensors, **options) * 1.0001)
    monkeypatch.setattr(doctor, "OPERATORS", some_of("cross_network", "cross_logits"))
    assert main(["doctor", "--quick", "--device", "cpu", "--output", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "**wrong: cross_network (cpu, float32): result 0 of cross_network, B = 7, d = 33, L = 3: error" in printed
    found = json.loads((tmp_path / "report.json").read_text())
    wrong = {(check["what"], check["dtype"]) for check in found["checks"] if check["problem"]}
    assert ("cross_network", "float64") in wrong
    assert {what for what, _ in wrong} == {"cross_network", "cross_network, timed"}
    timed = [timing["what"].partition(",")[0] for timing in found["timings"]]
    assert timed == ["cross_logits", "embedding_stack", "training step of DCN"]


@pytest.mark.parametrize("stand_in", ["an exception", "no error"])
def test_what_fails_or_is_not_raised_is_a_finding(stand_in, capsys, monkeypatch, cpu_kernels):
    def broken(*operands, **options):
        if stand_in == "an exception":
            raise RuntimeError("illegal memory access\nand more")
        return operands[0]

    monkeypatch.setattr(ops, "embedding_stack", broken)
    report = Report("cpu", [], [])
    jobs = dict(doctor.jobs(doctor.torch.device("cpu"), True)[::-1])
    jobs["wrong ids"](report)
    (check,) = report.checks
    told = "RuntimeError: illegal memory access" if stand_in == "an exception" else "nothing was raised"
    assert told in check.problem
    assert report.verdict.startswith("wrong: wrong ids (cpu, ")


def test_not_a_number_is_wrong():
    report = Report("cpu", [], [])
    compared = doctor.Compared("result 0", float("nan"), 1.0)
    doctor._check("an operator", "cpu", None, lambda backend: [compared])(report)
    assert report.wrong == ["an operator (cpu, ): result 0: error nan, allowed 1"]


def test_a_slow_kernel_is_told_by_its_whole_spread():
    seconds = {"fastcross": [2.0] * 10, "eager loop": [1.0] * 10, "copy": [0.5] * 10}
    slow = Timing("cross_layer", seconds)
    assert slow.slow == "cross_layer takes 2.00 times as long as the eager loop"
    noisy = Timing("cross_layer", seconds | {"eager loop": [1.0] * 7 + [3.0] * 3})
    assert not noisy.slow
    report = Report("cpu", [], [("Triton", "pip install triton")], [Check("x", "cpu", "float32", 0.5)], [slow])
    assert report.verdict == f"right: 1 checks; slow: {slow.slow}; missing: Triton"
    assert "| cross_layer | 2e+03 ms | 0.5 (0.5 to 0.5) | 0.25 (0.25 to 0.25) |" in report.markdown()


def test_contestants_take_turns_by_the_clock():
    called = []
    steps = {name: lambda name=name: called.append(name) for name in ("fastcross", "eager loop")}
    costs = {"fastcross": 0.1, "eager loop": 0.2}

    def clock(step):
        step()
        return costs[called[-1]]

    found = take_turns(steps, clock, 6.1)
    assert {name: set(times) for name, times in found.items()} == {"fastcross": {0.1}, "eager loop": {0.2}}
    assert {len(times) for times in found.values()} == {10}
    assert called[4:12] == ["fastcross"] * 2 + ["eager loop"] * 4 + ["fastcross"] * 2


def test_the_triton_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "fastcross.cli.main", "doctor", "--quick", "--device", "cpu"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-2000:]
    assert "**right: " in run.stdout
    assert "; not timed" in run.stdout
    for name in (*(operator.name for operator in doctor.OPERATORS), "embedding_stack", "wrong ids", "training step"):
        assert any(line.split("|")[1:3] == [f" {name:22} ", " triton "] for line in run.stdout.splitlines())
