"""Compile the kernels of DCN-V2's layers, without a GPU: ``python -m benchmarks.static.multiplicative``.

For each target, dtype and operator the launchers run on tensors without memory, and each launch is compiled: registers
per thread, spills, instructions of tensor cores, bytes of shared memory, and which operands with a row for each example
it reads and writes. Then one line per operator: what of such operands its launches move, each once per launch, in
bytes per row, against the floor of a network that is computed layer by layer: forward x0 and a layer's input read and
its output written, backward x0, the input and a gradient read and a gradient written; low rank, whose layers need
nothing of the size of x0 between them, x0 read and written, and with dy once more backward. PyTorch's own GEMMs are
not among the launches.

The exit status is 1 if a kernel spills, if the GEMMs of a target with tensor cores are not on them, if a program needs
more shared memory than every processor of the target has, or if a launch of the matrix, gated or low-rank layers moves
more than four operands of the size of x0 (five where gated layers write two).
"""

import argparse
import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.static.cases import BATCH, TARGETS, record
from benchmarks.static.machine_code import Code, Launch, compile_all
from fastcross.kernels.gpu import cross_low_rank, cross_matrix, multiplicative

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OPERATORS = ("cross_matrix", "cross_gated", "cross_low_rank", "steps")
LAYERS, RANK, EXPERTS = 2, 64, 4
FLOOR = {"cross_matrix": (3 * LAYERS, 4 * LAYERS), "cross_gated": (3 * LAYERS, 4 * LAYERS), "cross_low_rank": (2, 3)}
MOST_OPERANDS = 4.1  # of the size of x0; du and dt of gated layers have a few columns more, for their alignment
SHARED = {
    "sm_75": 64,
    "sm_80": 163,
    "sm_90": 227,
    "sm_100": 227,
    "gfx90a": 64,
    "gfx942": 64,
    "gfx1100": 64,
    "gfx1200": 64,
}
OTHER_SHARED = 99  # KiB of a program, on sm_86, sm_89 and sm_120


class Case(NamedTuple):
    target: str
    dtype: str
    operator: str
    d: int = 1026

    @property
    def has_tensor_cores(self) -> bool:
        """Whether Triton multiplies matrices of this dtype on them there."""
        if self.dtype == "fp32":
            return self.target.startswith("gfx9")  # which have them for float32
        if self.dtype == "tf32":
            return self.target == "gfx942" or (self.target.startswith("sm") and self.target != "sm_75")
        return self.target != "sm_75"


def launches(case: Case) -> tuple[list[Launch], list[Launch]]:
    """What the operator would launch, forward and backward."""
    dtype, d = DTYPES[case.dtype], case.d

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def rows() -> Tensor:
        return torch.empty_strided((BATCH, d), (-(-d // 16) * 16, 1), dtype=dtype, device="meta")

    x0, dy, b, w = rows(), rows(), empty(LAYERS, d), empty(LAYERS, d, d)
    low_rank = x0, empty(LAYERS, d, RANK), empty(LAYERS, RANK, d), b, None, 0.0
    kept: list[Tensor] = []

    def forward() -> None:
        if case.operator == "cross_matrix":
            kept[:] = cross_matrix.cross_matrix_fwd(x0, w, b, True)[1]
        elif case.operator == "cross_gated":
            kept[:] = cross_matrix.cross_gated_fwd(x0, w, w, b, True)[1]
        elif case.operator == "cross_low_rank":
            kept[:] = cross_low_rank.cross_low_rank_fwd(*low_rank, True)[1]
        else:
            h, logits, q = empty(EXPERTS, BATCH, RANK), empty(BATCH, EXPERTS), empty(BATCH, EXPERTS * RANK)
            multiplicative.product_fwd(x0, rows(), b[0], rows(), "tanh", 0.5, rows())
            multiplicative.experts_fwd(h, logits, empty(EXPERTS), "tanh", q)
            half = empty(BATCH, d // 2), b[0], empty(d // 2), empty(d // 2)
            multiplicative.fcn_fwd(x0, *half, rows(), True, 1e-5, rows())

    def backward() -> None:
        if case.operator == "cross_matrix":
            cross_matrix.cross_matrix_bwd(dy, x0, w, b, kept, [True] * 3)
        elif case.operator == "cross_gated":
            cross_matrix.cross_gated_bwd(dy, x0, w, w, b, kept, [True] * 4)
        elif case.operator == "cross_low_rank":
            cross_low_rank.cross_low_rank_bwd(dy, *low_rank, kept, [True] * 4)
        else:
            h, logits, q = empty(EXPERTS, BATCH, RANK), empty(BATCH, EXPERTS), empty(BATCH, EXPERTS * RANK)
            sums = torch.empty(2 * d, device="meta")
            multiplicative.product_bwd(
                dy, x0, rows(), b[0], rows(), "tanh", 0.5, rows(), rows(), sums[:d], False, False
            )
            multiplicative.experts_bwd(q, h, logits, empty(EXPERTS), "tanh", h, logits)
            half = empty(BATCH, d // 2), b[0], empty(d // 2), empty(d // 2)
            multiplicative.fcn_bwd(dy, x0, *half, rows(), False, 1e-5, half[0], rows(), sums, False, False)

    settings = torch.backends.cuda.matmul
    before, settings.fp32_precision = settings.fp32_precision, "tf32" if case.dtype == "tf32" else "ieee"
    try:
        return record(case.target, forward, (BATCH, d)), record(case.target, backward, (BATCH, d))
    finally:
        settings.fp32_precision = before


def moved(launch: Launch, code: Code) -> int:
    """Bytes of the operands with a row for each example, each read once and written once, if it is at all."""
    read = {place: size for name, size, place in launch.moved if name in code.read}
    written = {place: size for name, size, place in launch.moved if name in code.written}
    return sum(read.values()) + sum(written.values())


def faults(case: Case, launch: Launch, code: Code) -> list[str]:
    """What is wrong with a kernel."""
    wrong = []
    if code.spills:
        wrong.append(f"spills {code.spills}")
    multiplies = launch.kernel != "_dx0_kernel" and case.operator != "steps"
    if multiplies and case.has_tensor_cores and not code.products:
        wrong.append("no tensor cores")
    if code.shared > 1024 * SHARED.get(case.target, OTHER_SHARED):
        wrong.append(f"{code.shared} bytes of shared memory")
    if multiplies:
        passes = moved(launch, code) / (BATCH * case.d * DTYPES[case.dtype].itemsize)
        # Gated layers write du and dt of what they read.
        if passes > MOST_OPERANDS + (launch.kernel == "_cross_gated_bwd_kernel"):
            wrong.append(f"{passes:.1f} passes")
    return wrong


def cases(targets: Iterable[str] = TARGETS, dtypes: Iterable[str] = DTYPES) -> list[Case]:
    """Without tf32 where there is none, and low-rank layers only where they have kernels of their own."""

    def is_case(case: Case) -> bool:
        if case.operator == "cross_low_rank" and case.dtype == "fp32":
            return False
        return case.has_tensor_cores or (case.dtype != "tf32" and case.operator != "cross_low_rank")

    every = (Case(*parts) for parts in itertools.product(targets, dtypes, OPERATORS))
    return [case for case in every if is_case(case)]


def survey(chosen: list[Case], processes: int = 2) -> Iterator[tuple[Case, str, list[tuple[Launch, Code]]]]:
    """The distinct launches of each case, forward and backward, with their machine code."""
    wanted = [
        (case, suffix, made) for case in chosen for suffix, made in zip(("fwd", "bwd"), launches(case), strict=True)
    ]
    codes: Iterator[Code] = compile_all([launch for _, _, made in wanted for launch in made], processes)
    for case, suffix, made in wanted:
        yield case, suffix, [(launch, next(codes)) for launch in made]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.static.multiplicative", description=__doc__)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS, metavar="NAME")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=[*DTYPES], metavar="NAME")
    parser.add_argument("--operators", nargs="+", choices=OPERATORS, default=OPERATORS, metavar="NAME")
    parser.add_argument("--processes", type=int, default=2, help="compilers at work at a time (2)")
    chosen = parser.parse_args(arguments)
    failures = 0
    selected = [case for case in cases(chosen.targets, chosen.dtypes) if case.operator in chosen.operators]
    for case, suffix, made in survey(selected, chosen.processes):
        name = f"{case.target:8} {case.dtype} {case.operator}_{suffix}"
        for launch, code in dict(made).items():
            wrong = "; ".join(faults(case, launch, code))
            print(
                f"{name:36} {launch.kernel:32} registers {code.registers:3} spills {code.spills}"
                f" tensor cores {code.products:3} shared {code.shared:6} {wrong}",
                flush=True,
            )
            failures += bool(wrong)
        if case.operator in FLOOR and made:
            size = case.d * DTYPES[case.dtype].itemsize
            total = sum(moved(*each) for each in made) / BATCH
            print(f"{name:36} bytes/row {total:.0f}, floor {FLOOR[case.operator][suffix == 'bwd'] * size}", flush=True)
    print(f"{failures} kernels are not as they should be")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
