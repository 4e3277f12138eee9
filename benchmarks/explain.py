"""python -m benchmarks.explain: seconds and memory of ``fastcross explain`` on a run with 1 million rows and 39 fields.

Twice: over the test part, with the means of the training part as its baseline, as the command does by itself; and over
all rows, read from the file.
"""

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.harness import machine
from fastcross.data.generate import write_click_log

SECONDS, GIBIBYTES = 30, 2  # what it is meant to take at most, on two cores
MODEL = ("--cross-layers=3", "--deep-layers=256,256", "--embedding-dim=16", "--max-steps=200", "--patience=0")


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.explain", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the log that is generated first (1,000,000)")
    parser.add_argument("--folder", type=Path, default=None, help="for log, cache and run (a temporary one)")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as name:
        folder = Path(name)
        # In processes of their own: a child's peak counts what its parent held when it was forked.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            pool.submit(write_click_log, folder / "clicks.txt", chosen.rows).result()
        run, log = str(folder / "run"), str(folder / "clicks.txt")
        _measured("train", "--data", log, "--cache", str(folder / "cache"), "--run", run, *MODEL)
        for what, options in (("test part", ()), ("all rows, from the file", ("--data", log))):
            seconds, peak = _measured("explain", run, "--output", str(folder / "page"), *options)
            said = "as meant" if seconds <= SECONDS and peak <= GIBIBYTES else "MORE THAN MEANT"
            print(
                f"explain, {chosen.rows:,} rows, 39 fields, {what}: {seconds:.1f} s (at most {SECONDS}), "
                f"{peak:.2f} GiB resident (at most {GIBIBYTES}): {said}"
            )
    print(", ".join(f"{name} {value}" for name, value in machine.machine().items()))


def _measured(*arguments: str) -> tuple[float, float]:
    """Seconds and peak memory, in GiB, of a command in a process of its own."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "fastcross", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed with status {status}")
    return time.perf_counter() - start, 1024 * usage.ru_maxrss / 2**30


if __name__ == "__main__":
    main()
