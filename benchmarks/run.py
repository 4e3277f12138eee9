"""python -m benchmarks.run: the runs that the report is made from, one after the other, on a machine that is quiet."""

import argparse
import subprocess
import sys
import time

from benchmarks.harness import results


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.run", description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="how many (3)")
    parser.add_argument("--first", type=int, default=1, help="the number of the first (1): run-1.json, run-2.json, …")
    parser.add_argument("rest", nargs="*", help="after --: options of pytest, as --suite NAME or --full")
    chosen = parser.parse_args(arguments)
    for run in range(chosen.first, chosen.first + chosen.runs):
        start = time.perf_counter()
        command = [
            sys.executable,
            "-m",
            "pytest",
            "benchmarks/",
            "--benchmark-only",
            "-q",
            f"--run={run}",
            *chosen.rest,
        ]
        if status := subprocess.run(command).returncode:
            print(f"run {run} failed: {' '.join(command)}", file=sys.stderr)
            return status
        print(f"run {run}: {(time.perf_counter() - start) / 60:.1f} minutes, {results.path(run)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
