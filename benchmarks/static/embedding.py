"""Compile the embedding kernels, and print registers, spills and the widest words that they move.

``python -m benchmarks.static.embedding``. The kernels are those of a training step's forward and backward pass, for
tables of several widths, with and without bags, on every target. The exit status is 1 if a kernel spills, or moves
narrower words than the tables allow.
"""

import argparse
import itertools
import math
import random
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.static.cases import BATCH, DRAWN_TARGETS, TARGETS, record
from benchmarks.static.machine_code import Code, Launch, compile_all, word_bits
from fastcross.kernels import embedding as plain
from fastcross.kernels.gpu.embedding import embedding_stack_keyed_bwd, embedding_stack_keyed_fwd

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
DEFAULT_DTYPES = ("fp32", "bf16", "fp16")
# A usual table, the paper's d = 1026, all sorts, and those that are whole words.
WIDTHS = ((16,) * 26, (39,) * 25 + (38,), (11, 190, 64), (8,) * 26, (64, 32, 16))


class EmbeddingCase(NamedTuple):
    target: str
    dtype: str
    widths: tuple[int, ...]
    bags: int = 0  # of these features the last ones; every other has weights
    pooling: str = "mean"
    values: int = 3 * BATCH  # of each bag
    height: int = 2000  # of each table: keys of 16 bits for few tables, of 32 for many
    ids: torch.dtype = torch.int64

    @property
    def word(self) -> int:
        """Bits of the widest word that all rows are made of."""
        return word_bits(self.widths, DTYPES[self.dtype])


def draw(seed: int, count: int) -> list[EmbeddingCase]:
    """Cases at random: up to 30 tables of widths from 1 to 256 by their logarithms, of one width or of several."""
    generator, cases = random.Random(seed), []
    for _ in range(count):
        tables, kinds = generator.randint(1, 30), generator.choice((1, 1, 2, 5))
        widths = [round(math.exp(generator.uniform(0, math.log(256)))) for _ in range(kinds)]
        if generator.random() < 0.5:
            widths = [-(-width // 8) * 8 for width in widths]
        cases.append(
            EmbeddingCase(
                generator.choice(DRAWN_TARGETS),
                generator.choice(list(DTYPES)),
                tuple(generator.choice(widths) for _ in range(tables)),
                min(tables, generator.choice((0, 1, 2, 3, 5))),
                generator.choice(("mean", "sum")),
                height=generator.choice((200, 2000, 2**31)),
                ids=generator.choice((torch.int32, torch.int64)),
            )
        )
    return cases


def launches(case: EmbeddingCase) -> list[Launch]:
    """What forward and backward pass would launch."""
    dtype, tables = DTYPES[case.dtype], len(case.widths)

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def integers(*shape: int) -> Tensor:
        return empty(*shape, dtype=case.ids)

    def step() -> None:
        dense, ids = empty(BATCH, 13, dtype=torch.float32), integers(BATCH, tables - case.bags)
        values, offsets = [integers(case.values)] * case.bags, [integers(BATCH)] * case.bags
        weights = [empty(case.values) if i % 2 else None for i in range(case.bags)]
        stack = [empty(case.height, width) for width in case.widths]
        recorded = plain.new_faults(ids.shape[1], case.bags, dense.device)
        needs, bags = [True] * tables, [*values, *offsets, *weights]
        x0, keys, rows, coefficients = embedding_stack_keyed_fwd(dense, ids, bags, stack, recorded, case.pooling, needs)
        sizes, counts = [size for table in stack for size in table.shape], plain.entries(ids, values, needs)
        embedding_stack_keyed_bwd(x0, keys, rows, coefficients, sizes, counts, case.bags)

    return record(case.target, step)


def survey(cases: list[EmbeddingCase], processes: int = 2) -> Iterator[tuple[EmbeddingCase, Launch, Code, str]]:
    """Each kernel of each case, its machine code, and what is wrong with it."""
    wanted = [(case, launch) for case in cases for launch in launches(case)]
    codes = compile_all([launch for _, launch in wanted], processes)
    for (case, launch), code in zip(wanted, codes, strict=True):
        wrong = []
        if code.spills:
            wrong.append(f"spills {code.spills}")
        # The total of a run is a single row of few columns, of which neighbouring threads write an element each.
        if launch.kernel != "_runs_kernel" and (narrow := code.narrow(case.word)):
            wrong.append(f"{narrow:.0%} of the rows' bytes in words of less than {case.word} bits")
        yield case, launch, code, "; ".join(wrong)


def grid(targets: tuple[str, ...] = TARGETS, dtypes: tuple[str, ...] = DEFAULT_DTYPES) -> list[EmbeddingCase]:
    """Every shape, without bags and with two."""
    return [EmbeddingCase(*parts) for parts in itertools.product(targets, dtypes, WIDTHS, (0, 2))]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.static.embedding", description=__doc__)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS, metavar="NAME")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DEFAULT_DTYPES, metavar="NAME")
    parser.add_argument("--processes", type=int, default=2, help="compilers at work at a time (2)")
    chosen = parser.parse_args(arguments)
    failures = 0
    for case, launch, code, wrong in survey(grid(tuple(chosen.targets), tuple(chosen.dtypes)), chosen.processes):
        shape = f"{len(case.widths)} tables, {sum(case.widths)} columns, {case.bags} bags"
        line = f"{case.target:8}{launch.kernel:20}{case.dtype:6}{shape:36}"
        words = f"{code.widest:4} bits  {code.narrow(case.word):4.0%} narrow"
        print(f"{line}{code.registers:4} registers{code.spills:4} spilled  {words}", wrong, flush=True)
        failures += bool(wrong)
    print(f"{failures} kernels wrong" if failures else "no spills, and words as wide as the tables allow")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
