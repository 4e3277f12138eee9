"""The test_triton_*.py in Triton's interpreter: a process of its own, since one either interprets or compiles."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "name",
    [
        "kernels",
        "bounds",
        "embedding",
        "faults",
        "training",
        "row_updates",
        "multiplicative",
        "steps",
        "folded",
        "plans",
    ],
)
def test_kernels_in_the_interpreter(name):
    pytest.importorskip("triton")
    tests = Path(__file__).parent
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", tests / f"test_triton_{name}.py"]
    run = subprocess.run(command, cwd=tests.parent, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]


def test_importing_fastcross_leaves_triton_alone():
    code = "import sys, fastcross; assert 'triton' not in sys.modules, 'triton was imported'"
    subprocess.run([sys.executable, "-c", code], check=True)
