"""What a call of an operator costs in Python: the launchers, with a launch that does nothing.

``python -m benchmarks.static.host`` prints microseconds per call at the paper's shape: the fastest of several runs,
in time of the processor: what else the machine does only adds to it.
"""

import time
import timeit
from typing import Any
from unittest import mock

from triton.runtime.jit import JITFunction

from benchmarks.static.cases import FLOOR, Case, prepare

CALLS, RUNS = 300, 15


def microseconds(operator: str) -> float:
    """Per call, at d = 1026 and L = 6 in float32; the plans are made by the first one."""
    call = prepare(Case("sm_90", operator, 1026, 6, "fp32", "aligned"), "cpu")
    with mock.patch.object(JITFunction, "run", _launch_nothing):
        call()
        return min(timeit.repeat(call, timer=time.thread_time, number=CALLS, repeat=RUNS)) / CALLS * 1e6


def _launch_nothing(*args: Any, **options: Any) -> None:
    return None


if __name__ == "__main__":
    for name in FLOOR:
        print(f"{name:18} {microseconds(name):6.1f} µs")
