"""Compile what cases drawn at random launch, and print every kernel that spills a register.

``python -m benchmarks.static.drawn --seed 13 --count 1000``; the seed is printed, and draws the same cases again. Each
case has a target of its own, among sm_80, sm_90 and gfx1100. The exit status is 1 if a kernel spills.
"""

import argparse
import itertools
import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from benchmarks.static.cases import Case, draw, launches
from benchmarks.static.machine_code import Code, Launch, compile_launch

SEED, COUNT = 13, 1000


def compile_cases(
    cases: list[Case], processes: int = 1, rows_only: bool = False
) -> Iterator[tuple[Case, list[tuple[Launch, Code]]]]:
    """Each case with the machine code of its launches, or of its passes over rows; distinct ones are compiled once."""
    wanted = {case: [launch for launch in launches(case) if launch.rows or not rows_only] for case in cases}
    distinct = list(dict.fromkeys(itertools.chain.from_iterable(wanted.values())))
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        codes = {launch: pool.submit(compile_launch, launch) for launch in distinct}
        for case, made in wanted.items():
            yield case, [(launch, codes[launch].result()) for launch in made]


def spills(cases: list[Case], processes: int = 1, rows_only: bool = False) -> Iterator[str]:
    """A line for each kernel that spills."""
    for case, kernels in compile_cases(cases, processes, rows_only):
        for launch, code in kernels:
            if code.spills:
                yield f"{launch.kernel} spills {code.spills} at {code.registers} registers: {case}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.static.drawn", description=__doc__)
    parser.add_argument("--seed", type=int, default=SEED, help=f"({SEED})")
    parser.add_argument("--count", type=int, default=COUNT, help=f"cases to draw ({COUNT})")
    parser.add_argument("--skip", type=int, default=0, help="of these, how many to leave out at the beginning (0)")
    parser.add_argument("--processes", type=int, default=2, help="compilers at work at a time (2)")
    chosen = parser.parse_args(arguments)
    cases = draw(chosen.seed, chosen.count)[chosen.skip :]
    found = 0
    for line in spills(cases, chosen.processes):
        print(line, flush=True)
        found += 1
    print(f"seed {chosen.seed}: {len(cases)} random cases, {found} kernels spill")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
