"""A slice of `make fuzz`; and the fuzzer notices what it is there to notice."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
TESTS = Path(__file__).parent


def run(*command, **environment):
    return subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        cwd=TESTS.parent,
        env={**os.environ, **environment},
    )


def test_thirty_seconds():
    done = run(TESTS / "fuzz", "--minutes", "0.5", "--failures", "5")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    for suite in ("operators", "sidedoors", "embedding", "optimiser", "swap", "bytes", "kill"):
        assert f"\n{suite}: " in done.stdout
    assert ": 0 failed" in done.stdout


@pytest.mark.parametrize(
    ("what", "reported"),
    [
        ("raise AssertionError('a wrong number')", "AssertionError: a wrong number"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "the process died of SIGSEGV"),
        ("os._exit(3)", "the process ended with code 3"),
        ("time.sleep(60)", "the process hung and died of SIGABRT"),
    ],
    ids=["wrong", "segfault", "exit", "hang"],
)
def test_a_failure_is_blamed_on_its_case(tmp_path, what, reported):
    """A suite whose case 7 goes wrong: in the report, with its number, and the other cases are counted."""
    suite = (
        f"import os, signal, time\ndef case(number, folder):\n    if number == 7:\n        {what}\n    return 'fine'\n"
    )
    (tmp_path / "broken.py").write_text(suite)
    driver = (
        "from pathlib import Path; from fuzz import supervisor;"
        f"limits = supervisor.Limits(seconds=60, processes=1, failures=1, hang=3);"
        f"print(*supervisor.run(['broken'], 0, limits, Path({str(tmp_path)!r})))"
    )
    done = run("-c", driver, PYTHONPATH=os.pathsep.join([str(TESTS), str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert f"FAILED broken:7  {reported}" in done.stdout, done.stdout + done.stderr
    assert "--case broken:7 (or, with all that ran before it, :0-7)" in done.stdout


def test_an_unknown_suite_is_refused():
    done = run(TESTS / "fuzz", "--only", "operators,nothing")
    assert done.returncode == 2
    assert "got nothing" in done.stderr
