"""Compile what cases drawn at random launch, and print every kernel that spills a register.

``python -m benchmarks.static.drawn --seed 13 --count 1000``; the seed is printed, and draws the same cases again. Each
case has a target of its own, among sm_80, sm_90 and gfx1100. The exit status is 1 if a kernel spills.
"""

import argparse
import itertools
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from benchmarks.static import embedding
from benchmarks.static.cases import Case, draw, launches
from benchmarks.static.embedding import EmbeddingCase
from benchmarks.static.machine_code import Code, Launch, compile_launch

SEED, COUNT = 13, 1000
EMBEDDINGS = 5  # of so many cases one is an embedding, with bags or without
AnyCase = TypeVar("AnyCase", bound=Case | EmbeddingCase)


def compile_cases(
    cases: Sequence[AnyCase], processes: int = 1, rows_only: bool = False
) -> Iterator[tuple[AnyCase, list[tuple[Launch, Code]]]]:
    """Each case with the machine code of its launches, or of its passes over rows; distinct ones are compiled once."""
    wanted = {case: [launch for launch in _launches(case) if launch.rows or not rows_only] for case in cases}
    distinct = list(dict.fromkeys(itertools.chain.from_iterable(wanted.values())))
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        codes = {launch: pool.submit(compile_launch, launch) for launch in distinct}
        for case, made in wanted.items():
            yield case, [(launch, codes[launch].result()) for launch in made]


def _launches(case: Case | EmbeddingCase) -> list[Launch]:
    return embedding.launches(case) if isinstance(case, EmbeddingCase) else launches(case)


def spills(
    cases: Sequence[Case] | Sequence[EmbeddingCase], processes: int = 1, rows_only: bool = False
) -> Iterator[str]:
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
    tables = chosen.count // EMBEDDINGS
    cases = draw(chosen.seed, chosen.count - tables)[chosen.skip :]
    stacks = embedding.draw(chosen.seed, tables)[chosen.skip // EMBEDDINGS :]
    found = 0
    for line in itertools.chain(spills(cases, chosen.processes), spills(stacks, chosen.processes)):
        print(line, flush=True)
        found += 1
    print(f"seed {chosen.seed}: {len(cases) + len(stacks)} random cases, {found} kernels spill")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
