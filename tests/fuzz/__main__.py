"""Hostile use of fastcross, at random: ``python tests/fuzz --minutes 5``. Exit code 1 if anything failed.

A case is known by its suite and its number, and is drawn anew from that: ``--case operators:1234567`` runs one again,
``--case operators:1234500-1234567`` all of these in one process, for what depends on what ran before.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fuzz import supervisor, worker


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/fuzz", description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=5, help="how long to go on (default: 5)")
    parser.add_argument("--seed", type=int, help="number of each suite's first case (default: drawn)")
    parser.add_argument("--only", default=",".join(worker.SUITES), help=f"suites (default: {','.join(worker.SUITES)})")
    parser.add_argument("--case", metavar="SUITE:N[-M]", help="run these cases alone, here, with tracebacks")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="at a time (default: one per core)")
    parser.add_argument("--failures", type=int, default=20, help="stop a suite after so many (default: 20)")
    parser.add_argument(
        "--folder", type=Path, help="where runs and caches are made and kept (default: a temporary one)"
    )
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := [name for name in names if name not in worker.SUITES]:
        parser.error(f"--only takes {', '.join(worker.SUITES)}; got {', '.join(unknown)}")
    with tempfile.TemporaryDirectory(prefix="fastcross-fuzz-") as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if args.case:
            return worker.replay(args.case, folder)
        seed = int.from_bytes(os.urandom(3), "big") * 1_000_000 if args.seed is None else args.seed
        limits = supervisor.Limits(args.minutes * 60, args.processes, args.failures)
        print(f"seed {seed}; {args.minutes:g} minutes; {args.processes} processes; {', '.join(names)}", flush=True)
        started = time.monotonic()
        reports = supervisor.run(names, seed, limits, folder)
    failed = sum(len(report.failures) for report in reports)
    print(f"{sum(report.cases for report in reports):,} cases in {time.monotonic() - started:.0f} s: {failed} failed")
    for report in reports:
        print(report)
    return 1 if failed or any(report.cases == 0 for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
