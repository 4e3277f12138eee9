"""What a call of an operator costs in Python: the launchers, with a launch that does nothing.

``python -m benchmarks.static.host`` prints microseconds per call at the paper's shape: the fastest of several runs,
in time of the processor: what else the machine does only adds to it. Beside them: how many functions, Python's and C's,
a call enters, which is the same on every machine.
"""

import sys
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from triton.runtime.jit import JITFunction

from benchmarks.static.cases import FLOOR, Case, prepare

CALLS, RUNS = 300, 15
MOST = {"fwd": 25, "bwd": 60}  # microseconds


def microseconds(operator: str) -> float:
    """Per call, at d = 1026 and L = 6 in float32; the plans are made by the first one."""
    with _prepared(operator) as call:
        return min(timeit.repeat(call, timer=time.thread_time, number=CALLS, repeat=RUNS)) / CALLS * 1e6


def functions(operator: str) -> int:
    """Entered by such a call."""
    entered = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal entered
        entered += event in ("call", "c_call")

    with _prepared(operator) as call:
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            call()
        finally:
            sys.setprofile(before)
    return entered


@contextmanager
def _prepared(operator: str) -> Iterator[Callable[[], object]]:
    call = prepare(Case("sm_90", operator, 1026, 6, "fp32", "aligned"), "cpu")
    with mock.patch.object(JITFunction, "run", _launch_nothing):
        call()
        yield call


def _launch_nothing(*args: Any, **options: Any) -> None:
    return None


if __name__ == "__main__":
    for name in FLOOR:
        wanted = f"(at most {MOST[name[-3:]]})"
        print(f"{name:18} {microseconds(name):6.1f} µs {wanted:15} {functions(name):4} functions")
