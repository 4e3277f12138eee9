"""What is known of the GPU kernels without a GPU: their machine code against the targets' published limits.

Registers, spills, words and bytes per row come from ``benchmarks.static.offline``. Occupancy is the share of a
processor's warps that its registers let run at once. The time is an estimate: bytes over published bandwidth.
"""

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

from benchmarks.static import offline
from benchmarks.static.drawn import compile_cases
from benchmarks.static.machine_code import Code, Launch

SUITE = "gpu_kernels"
TITLE = "The GPU kernels' machine code, where no GPU is there to run them: compiled offline for every target"
ROWS, D, LAYERS = 4096, 1026, 6
DTYPES = ("fp32", "bf16")
ESTIMATE = "estimate from bytes and published bandwidth, not measured"


class Target(NamedTuple):
    """A chip of the architecture: published memory bandwidth, and the limits of one scheduler's warps."""

    chip: str
    gigabytes_per_second: int
    registers: int  # 32-bit registers per lane that a scheduler's warps share
    granularity: int  # in which they are given out
    warps: int  # at most, per scheduler
    schedulers: int = 4  # per processor


TARGETS = {
    "sm_75": Target("T4", 320, 512, 8, 8),
    "sm_80": Target("A100 80 GB SXM", 2039, 512, 8, 16),
    "sm_86": Target("RTX 3090", 936, 512, 8, 12),
    "sm_89": Target("RTX 4090", 1008, 512, 8, 12),
    "sm_90": Target("H100 SXM", 3350, 512, 8, 16),
    "sm_100": Target("B200", 8000, 512, 8, 16),
    "sm_120": Target("RTX 5090", 1792, 512, 8, 12),
    "gfx90a": Target("MI250X, one of two dies", 1638, 512, 8, 8),
    "gfx942": Target("MI300X", 5300, 512, 8, 8),
    "gfx1100": Target("RX 7900 XTX", 960, 1536, 24, 16),
    "gfx1200": Target("RX 9060 XT", 320, 1536, 24, 16),
}


def occupancy(target: Target, registers: int, num_warps: int) -> float:
    """Warps at once over warps at most, whole programs counted, as far as registers decide."""
    given = -(-registers // target.granularity) * target.granularity
    resident = min(target.warps, target.registers // given) * target.schedulers
    return resident // num_warps * num_warps / (target.warps * target.schedulers)


def inspect(
    targets: Iterable[str] = TARGETS, operators: Iterable[str] = offline.FLOOR, dtypes: Iterable[str] = DTYPES
) -> list[dict[str, Any]]:
    """One row of the table for each target, operator and dtype, at the paper's width and depth."""
    combinations = itertools.product(targets, operators, dtypes)
    cases = [offline.Case(target, name, D, LAYERS, dtype, "aligned") for target, name, dtype in combinations]
    return [row(case, kernels) for case, kernels in compile_cases(cases, processes=2)]


def row(case: offline.Case, kernels: list[tuple[Launch, Code]]) -> dict[str, Any]:
    """A case with its kernels' machine code, and what ``offline`` finds wrong with it."""
    target = TARGETS[case.target]
    line, wrong = offline.describe(case, [code for _, code in kernels], sum(launch.sums for launch, _ in kernels))
    described = dict(zip(offline.COLUMNS, line, strict=True))
    moved = float(described["bytes/row"].split(" / ")[0])
    share = min(occupancy(target, code.registers, launch.num_warps) for launch, code in kernels if launch.rows)
    return {
        **{key: described[key] for key in ("target", "operator", "dtype", "registers", "spills", "word", "bytes/row")},
        "chip": target.chip,
        "occupancy": round(share, 2),
        "estimated_seconds": float(f"{ROWS * moved / target.gigabytes_per_second / 1e9:.3g}"),
        "wrong": "; ".join(wrong),
    }
