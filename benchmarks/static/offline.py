"""Compile every Triton kernel for every target, without a GPU, and print what the compilers made of it.

For each target, operator, width d, depth L and dtype the launchers run on tensors without memory, and each launch they
make is recorded and compiled with the parameters they chose. Then, per operator:

  registers   per thread, the most of its kernels
  spills      bytes of stack on NVIDIA; spilled vector registers and bytes of scratch on AMD
  word        bits per load and store of rows
  rows read / written    how often each element of a (B, d) operand is moved, against the floor of the closed form: all
              loads and stores of the kernels whose addresses lead to such an operand in the LLVM IR; lanes that a mask
              leaves out do not count, nor do weights and per-row scalars
  bytes/row   the same times d and the element size
  sums        what the programs' partial sums add to it, written and read, at B = 4096

Rows are "aligned" if their stride is padded to a multiple of 16 elements, else "packed". The exit status is 1 if a
kernel spills, if an aligned row is moved in words of less than 128 bits (64 in a backward pass of half precision), or
if rows are not moved as often as the floor says (two reads more where they are too long for the registers).
"""

import argparse
import functools
import itertools
import os
import sys
from collections.abc import Iterator

from benchmarks.static.cases import BATCH, DTYPES, FLOOR, TARGETS, Case
from benchmarks.static.drawn import compile_cases
from benchmarks.static.machine_code import Code

WIDTHS = (54, 390, 429, 624, 1026, 3456)
DEPTHS = (1, 3, 6, 8)
COLUMNS = [*Case._fields[:6], "registers", "spills", "word", "rows read", "written", "bytes/row", "sums"]
COLUMN_WIDTHS = [8, 17, 5, 6, 5, 7, 9, 6, 6, 9, 7, 15, 6]


def describe(case: Case, codes: list[Code], sums: int = 0, in_segments: bool = False) -> tuple[list[str], list[str]]:
    """One line of the table, and what is wrong with it; ``sums``: bytes of partial sums that the launches move.

    ``in_segments``: the registers hold no row with its sums, and a = dy·x0 takes two reads more.
    """
    registers, spills = max(code.registers for code in codes), sum(code.spills for code in codes)
    words = frozenset().union(*(code.words for code in codes))
    moved = sum(code.reads for code in codes), sum(code.writes for code in codes)
    floor, size = FLOOR[case.operator], DTYPES[case.dtype][0].itemsize
    wrong = []
    if spills:
        wrong.append(f"spills {spills}")
    # A backward pass may divide rows of halves into vectors of 4, so that fewer lanes are idle.
    narrowest = min(128, 32 * size) if case.operator.endswith("bwd") else 128
    if case.layout == "aligned" and min(words) < narrowest:
        wrong.append(f"words of {min(words)} bits")
    if moved != (floor[0] + 2 * in_segments, floor[1]):
        wrong.append(f"moves {moved[0]:g} + {moved[1]:g}, floor {floor[0]} + {floor[1]}")
    line = [*map(str, case[:6]), str(registers), str(spills), "/".join(map(str, sorted(words)))]
    line += [f"{moved[0]:g} / {floor[0]}", f"{moved[1]:g} / {floor[1]}"]
    line += [f"{sum(moved) * case.d * size:g} / {sum(floor) * case.d * size}", f"{sums / BATCH:.0f}"]
    return line, wrong


def survey(cases: list[Case], processes: int = 2) -> Iterator[tuple[Case, list[str], list[str]]]:
    """Compiles what the cases launch, each distinct kernel once, and describes each case as soon as it can."""
    for case, kernels in compile_cases(cases, processes):
        sums = sum(launch.sums for launch, _ in kernels)
        in_segments = any(dict(launch.constexprs).get("HAS_A") for launch, _ in kernels)
        yield case, *describe(case, [code for _, code in kernels], sums, in_segments)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.static.offline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    choose = functools.partial(parser.add_argument, nargs="+", metavar="NAME")
    choose("--targets", choices=TARGETS, default=TARGETS, help="GPU architectures (all): " + " ".join(TARGETS))
    choose("--kernels", choices=FLOOR, default=[*FLOOR], help="operators (all): " + " ".join(FLOOR))
    choose(
        "--dtypes", choices=DTYPES, default=["fp32", "bf16"], help="fp32, bf16 (both), mixed: bf16 rows, fp32 weights"
    )
    choose("--layouts", choices=["aligned", "packed"], default=["aligned"], help="aligned (default), packed")
    parser.add_argument("--shapes", nargs="+", type=int, default=WIDTHS, metavar="d", help=f"widths ({WIDTHS})")
    parser.add_argument("--layers", nargs="+", type=int, default=DEPTHS, metavar="L", help=f"depths ({DEPTHS})")
    parser.add_argument("--processes", type=int, default=2, help="compilers at work at a time (2)")
    chosen = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET", "") not in ("", "0"):
        parser.error("TRITON_INTERPRET is set: an interpreting process cannot compile")
    cases = [
        Case(*parts)
        for parts in itertools.product(
            chosen.targets, chosen.kernels, chosen.shapes, chosen.layers, chosen.dtypes, chosen.layouts
        )
        if parts[3] == chosen.layers[0] or not parts[1].startswith("cross_layer")
    ]

    def show(line: list[str], note: str = "") -> None:
        print("  ".join(text.ljust(width) for text, width in zip(line, COLUMN_WIDTHS, strict=True)), note, flush=True)

    show(COLUMNS)
    failures = 0
    for _, line, wrong in survey(cases, chosen.processes):
        show(line, "; ".join(wrong))
        failures += bool(wrong)
    count = "1 case" if len(cases) == 1 else f"{len(cases)} cases"
    print(
        f"{count}, {failures} wrong"
        if failures
        else f"{count}: no spills, wide words, rows moved as often as the floor asks"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
