"""python -m benchmarks.prepare: rows per second and memory of ``fastcross prepare`` on a log in Criteo's format."""

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


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.prepare", description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000, help="of the log that is generated first (5,000,000)")
    parser.add_argument("--folder", type=Path, default=None, help="for log and cache (a temporary one)")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        log = Path(folder) / "clicks.txt"
        # In a process of its own: a child's peak counts what its parent held when it was forked.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            pool.submit(write_click_log, log, chosen.rows).result()
        start = time.perf_counter()
        command = [sys.executable, "-m", "fastcross", "prepare", str(log), "--cache", str(Path(folder) / "cache")]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        if status:
            raise SystemExit(f"{' '.join(command)} failed with status {status}")
        size, peak = log.stat().st_size, 1024 * usage.ru_maxrss
    print(
        f"{chosen.rows:,} rows, {size / 1e9:.2f} GB: {seconds:.1f} s, {chosen.rows / seconds:,.0f} rows/s, "
        f"at most {peak / 2**20:,.0f} MiB resident"
    )
    print(", ".join(f"{name} {value}" for name, value in machine.machine().items()))


if __name__ == "__main__":
    main()
