"""Compile the row updates of the optimisers, without a GPU: ``python -m benchmarks.static.row_updates``.

For each target, update, dtype and set of widths one line: registers per thread and spills. The exit status is 1 if a
kernel spills, or moves words narrower than the rows allow. The tables are tensors on the CPU, and each launch is
recorded in place of being made.
"""

import argparse
import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from benchmarks.static.cases import TARGETS, record
from benchmarks.static.machine_code import Code, Launch, compile_all, word_bits
from fastcross.kernels.gpu import row_updates

UPDATES = ("adam", "adagrad", "row-wise", "sgd")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WIDTHS = ((16,) * 26, (8, 16, 32, 64), (3, 17, 39), (1,))
HEIGHT, ENTRIES = 50, 20


class Case(NamedTuple):
    target: str
    update: str
    dtype: str
    widths: tuple[int, ...]
    on_device: bool  # whether the learning rate and the number of the step are

    def wrong(self, code: Code) -> str:
        """What is wrong with its kernel."""
        if code.spills:
            return f"spills {code.spills}"
        # Row-wise Adagrad's number for each row is no row.
        narrow = 0 if self.update == "row-wise" else code.narrow(word_bits(self.widths, DTYPES[self.dtype]))
        return f"{narrow:.0%} of the rows' bytes in narrow words" if narrow else ""


def launches(case: Case) -> list[Launch]:
    """What an update of these tables launches."""
    dtype = DTYPES[case.dtype]
    tables = [torch.zeros(HEIGHT, width, dtype=dtype) for width in case.widths]
    rows = torch.zeros(ENTRIES * len(tables), dtype=torch.int64).split(ENTRIES)
    flat = torch.zeros(ENTRIES * sum(case.widths), dtype=dtype).split([ENTRIES * width for width in case.widths])
    gradients = [(each, g.view(ENTRIES, -1)) for each, g in zip(rows, flat, strict=True)]
    lr, step = (torch.ones(()), torch.ones(())) if case.on_device else (0.1, 3)

    def update() -> None:
        row_updates._LAUNCHES.clear()  # of another target
        if case.update == "adam":
            moments = [(torch.zeros_like(table), torch.zeros_like(table)) for table in tables]
            row_updates.adam_rows(tables, moments, gradients, lr, (0.9, 0.999), 1e-8, step, 0.01)
        elif case.update == "sgd":
            row_updates.sgd_rows(tables, gradients, lr)
        else:
            is_row_wise = case.update == "row-wise"
            sums = [torch.zeros_like(table[:, 0] if is_row_wise else table) for table in tables]
            row_updates.adagrad_rows(tables, sums, gradients, lr, 1e-10, is_row_wise)

    return record(case.target, update)


def cases(targets: Iterable[str] = TARGETS, dtypes: Iterable[str] = DTYPES) -> list[Case]:
    return [Case(*parts) for parts in itertools.product(targets, UPDATES, dtypes, WIDTHS, (False, True))]


def survey(chosen: list[Case], processes: int = 2) -> Iterator[tuple[Case, Code]]:
    """Each case with the machine code of its one launch."""
    wanted = [launch for case in chosen for launch in launches(case)]
    yield from zip(chosen, compile_all(wanted, processes), strict=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.static.row_updates", description=__doc__)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS, metavar="NAME")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=[*DTYPES], metavar="NAME")
    parser.add_argument("--processes", type=int, default=2, help="compilers at work at a time (2)")
    chosen = parser.parse_args(arguments)
    failures = 0
    for case, code in survey(cases(chosen.targets, chosen.dtypes), chosen.processes):
        widths = "/".join(map(str, dict.fromkeys(case.widths)))
        place = "device" if case.on_device else "host"
        line = f"{case.target:8} {case.update:9} {case.dtype:5} {widths:12} {place:7}"
        print(line, code.registers, code.spills, case.wrong(code), flush=True)
        failures += bool(case.wrong(code))
    print(f"{failures} kernels spill, or move narrow words")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
