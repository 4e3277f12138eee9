"""Compile every Triton kernel for every target, without a GPU, and print what the compilers made of it.

For each target, operator, width d, depth L and dtype the launchers run on tensors without memory, and each launch they
make is recorded and compiled with the parameters they chose. Then, per operator:

  registers   per thread, the most of its kernels
  spills      bytes of stack on NVIDIA; spilled vector registers and bytes of scratch on AMD
  word        bits per load and store of rows
  rows read / written    how often each element of a (B, d) operand is moved, against the floor of the closed form: all
              loads and stores of the kernels whose addresses lead to such an operand in the LLVM IR; lanes that a mask
              leaves out do not count, nor do weights, per-row scalars and partial sums
  bytes/row   the same times d and the element size

Rows are "aligned" if their stride is padded to a multiple of 16 elements, else "packed". The exit status is 1 if a
kernel spills, if an aligned row is moved in words of less than 128 bits, or if
rows are not moved as often as the floor says.
"""

import argparse
import functools
import importlib
import itertools
import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction, type_canonicalisation_dict

from benchmarks.static.machine_code import Code, Launch, compile_launch
from benchmarks.suites import OPERATORS
from fastcross.kernels.gpu import hardware
from fastcross.kernels.gpu.launch import Hardware

TARGETS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx1100", "gfx1200")
WIDTHS = (54, 390, 429, 624, 1026, 3456)
DEPTHS = (1, 3, 6, 8)
DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "mixed": (torch.bfloat16, torch.float32),
}
FLOOR = {  # reads and writes of a (B, d) tensor that no implementation can do without
    f"{operator.name}_{suffix}": floor
    for operator in OPERATORS
    for suffix, floor in (("fwd", operator.forward), ("bwd", operator.backward))
}
BATCH, OUTPUTS = 4096, 1


class Case(NamedTuple):
    target: str
    operator: str
    d: int
    layers: int
    dtype: str
    layout: str


COLUMNS = [*Case._fields, "registers", "spills", "word", "rows read", "written", "bytes/row"]
COLUMN_WIDTHS = [8, 17, 5, 6, 5, 7, 9, 6, 6, 9, 7, 15]


def launches(case: Case) -> list[Launch]:
    """What the operator's launcher would launch."""
    recorded: list[Launch] = []
    warp_size = 64 if case.target.startswith("gfx9") else 32

    def record(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        recorded.append(_specialise(case, kernel, args, options))

    with (
        mock.patch.object(JITFunction, "run", record),
        mock.patch.object(hardware, "of", return_value=Hardware(132, warp_size)),
    ):
        _run(case)
    return recorded


def _run(case: Case) -> None:
    stem = case.operator.rpartition("_")[0]
    launcher = getattr(importlib.import_module(f"fastcross.kernels.gpu.{stem}"), case.operator)
    x_dtype, w_dtype = DTYPES[case.dtype]
    stride = -(-case.d // 16) * 16 if case.layout == "aligned" else case.d

    def rows() -> Tensor:
        return torch.empty_strided((BATCH, case.d), (stride, 1), dtype=x_dtype, device="meta")

    def parameter(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=w_dtype, device="meta")

    w, b, v = parameter(case.layers, case.d), parameter(case.layers, case.d), parameter(OUTPUTS, case.d)
    p = torch.empty(case.layers + OUTPUTS, BATCH, device="meta")
    dz = torch.empty(BATCH, OUTPUTS, dtype=x_dtype, device="meta")
    match case.operator:
        case "cross_layer_fwd":
            launcher(rows(), rows(), w[0], b[0])
        case "cross_layer_bwd":
            launcher(rows(), rows(), rows(), w[0], b[0], [True] * 4)
        case "cross_network_fwd":
            launcher(rows(), w, b, True)
        case "cross_network_bwd":
            launcher(rows(), rows(), w, b, p[: case.layers], [True] * 3)
        case "cross_logits_fwd":
            launcher(rows(), w, b, v, True)
        case "cross_logits_bwd":
            launcher(dz, rows(), w, b, v, p, [True] * 4)


def _specialise(case: Case, kernel: JITFunction, args: tuple, options: dict[str, Any]) -> Launch:
    """Types and hints as the JIT derives them: pointers and multiples of 16 are marked, the integer 1 is a constant."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | options
    signature: list[tuple[str, str]] = []
    constexprs: list[tuple[str, Any]] = []
    divisible, rows = [], []
    for i, parameter in enumerate(kernel.params):
        name, value = parameter.name, given[parameter.name]
        free = parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1 and not free):
            signature.append((name, "constexpr"))
            constexprs.append((name, value))
        elif isinstance(value, Tensor):
            signature.append((name, "*" + type_canonicalisation_dict[str(value.dtype).removeprefix("torch.")]))
            divisible.append(i)
            if value.shape == (BATCH, case.d):
                rows.append((name, value.element_size()))
        else:
            signature.append((name, "i32"))
            if value % 16 == 0 and not free:
                divisible.append(i)
    return Launch(
        case.target,
        kernel.fn.__module__,
        kernel.fn.__name__,
        tuple(signature),
        tuple(constexprs),
        tuple(divisible),
        options["num_warps"],
        tuple(rows),
    )


def describe(case: Case, codes: list[Code]) -> tuple[list[str], list[str]]:
    """One line of the table, and what is wrong with it."""
    registers, spills = max(code.registers for code in codes), sum(code.spills for code in codes)
    words = frozenset().union(*(code.words for code in codes))
    moved = sum(code.reads for code in codes), sum(code.writes for code in codes)
    floor, size = FLOOR[case.operator], DTYPES[case.dtype][0].itemsize
    wrong = []
    if spills:
        wrong.append(f"spills {spills}")
    if case.layout == "aligned" and words != {128}:
        wrong.append(f"words of {min(words)} bits")
    if moved != floor:
        wrong.append(f"moves {moved[0]:g} + {moved[1]:g}, floor {floor[0]} + {floor[1]}")
    line = [*map(str, case), str(registers), str(spills), "/".join(map(str, sorted(words)))]
    line += [f"{moved[0]:g} / {floor[0]}", f"{moved[1]:g} / {floor[1]}"]
    return [*line, f"{sum(moved) * case.d * size:g} / {sum(floor) * case.d * size}"], wrong


def survey(
    cases: list[Case], processes: int = 2, progress: bool = False
) -> Iterator[tuple[Case, list[str], list[str]]]:
    """Compiles what the cases launch, each distinct kernel once, and describes each case as soon as it can."""
    wanted = {case: launches(case) for case in cases}
    distinct = list(dict.fromkeys(itertools.chain.from_iterable(wanted.values())))
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        codes = {launch: pool.submit(compile_launch, launch) for launch in distinct}
        for case in cases:
            done = [codes[launch].result() for launch in wanted[case]]
            if progress and sys.stderr.isatty():
                finished = sum(code.done() for code in codes.values())
                print(f"\r{finished} of {len(codes)} kernels", end="\r", file=sys.stderr, flush=True)
            yield case, *describe(case, done)


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
    for _, line, wrong in survey(cases, chosen.processes, progress=True):
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
