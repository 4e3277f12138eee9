"""Launch parameters by pure arithmetic on shape, dtype and hardware: no driver call, no tuning run.

A program holds ``BLOCK_M`` rows in registers, each as ``CHUNKS`` chunks of ``BLOCK_N`` columns, so that 1026 columns
occupy 9 × 128 places rather than 2048. A chunk is one 16-byte word for each thread of the warps that share a row; how
many warps share one is what the register budget decides.

Forward passes take one dot per layer and row: the fewest warps share a row, since a dot within a warp needs no shared
memory. Backward passes take one dot per row, but sum weight gradients over rows: all warps share a row, so that a
thread owns its columns and sums over the rows by itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

# 32-bit registers per thread for tiles and sums, by the warps that share a row. The rest of the 255 (with 16 warps: of
# the 128) holds addresses, masks and weights; more than this spills on some target.
FORWARD_REGISTERS = {1: 80, 2: 80, 4: 80, 8: 80, 16: 64}
BACKWARD_REGISTERS = {4: 112, 8: 112, 16: 48}
BACKWARD_REGISTERS_WITHOUT_SUMS = {8: 96}
TEMPORARIES = 64
REGISTER_FILE = 65536

# Sums that do not fit in registers go through L2 once per tile; for longer rows a second read of x0 is cheaper.
MAX_COLUMNS_WITH_SUMS_IN_MEMORY = 4096
SEGMENT = 4096  # columns per program where rows are too long for registers
MAX_ROWS_PER_THREAD = 4
MAX_ROWS_PER_THREAD_WITH_SUMS = 2  # they share each weight read; more would only cost residency
SCALARS_PER_THREAD = 4  # rows per thread in the kernels that see per-row scalars only


class Hardware(NamedTuple):
    """What the arithmetic needs to know of a device."""

    processors: int = 16
    warp_size: int = 32


@dataclass(frozen=True)
class Plan:
    """The tile of one kernel: what is passed to it, and what its launcher needs to know."""

    BLOCK_M: int
    BLOCK_N: int
    CHUNKS: int
    ROWS: int  # rows that the threads cover side by side: as many partial sums per program
    num_warps: int
    registers: int
    whole_rows: bool = True  # else a program sees a segment of each row, and dots are taken in a pass of their own
    sums_in_registers: bool = True

    @property
    def columns(self) -> int:
        return self.BLOCK_N * self.CHUNKS

    def segments(self, d: int) -> int:
        return -(-d // self.columns)

    def programs(self, rows: int, hardware: Hardware) -> int:
        """Persistent programs: as many as are resident at once and no more, since each costs a partial sum."""
        resident = REGISTER_FILE // (hardware.warp_size * self.num_warps * (self.registers + TEMPORARIES))
        return max(1, min(-(-rows // self.BLOCK_M), hardware.processors * min(max(resident, 1), 4)))


def forward(d: int, itemsize: int, hardware: Hardware, held: int = 1) -> Plan:
    """``held`` tensors of rows in registers."""
    plan = _fit(d, itemsize, hardware, FORWARD_REGISTERS, held)
    if plan is None:
        plan = _fit(SEGMENT, itemsize, hardware, FORWARD_REGISTERS, held)
        assert plan is not None
        plan = replace(plan, whole_rows=False)
    return plan


def backward(
    d: int,
    itemsize: int,
    hardware: Hardware,
    held: int,
    sums: int,
    whole_rows: bool = True,
    sums_in_memory: bool = True,
) -> Plan:
    """``held`` tensors of rows and ``sums`` partial sums of d columns in registers.

    Where they do not fit: sums in the program's own buffer; for long rows, segments of rows instead.
    """
    if whole_rows:
        plan = _fit(d, itemsize, hardware, BACKWARD_REGISTERS, held, sums)
        if plan is not None:
            return plan
        plan = _fit(d, itemsize, hardware, BACKWARD_REGISTERS_WITHOUT_SUMS, held)
        if plan is not None and sums_in_memory and d <= MAX_COLUMNS_WITH_SUMS_IN_MEMORY:
            return replace(plan, sums_in_registers=False)
    block = min(d, 4 * hardware.warp_size * _vector(itemsize))
    plan = _fit(block, itemsize, hardware, BACKWARD_REGISTERS, held, sums)
    in_registers = plan is not None
    plan = plan or _fit(block, itemsize, hardware, BACKWARD_REGISTERS, held)
    assert plan is not None
    return replace(plan, whole_rows=False, sums_in_registers=in_registers)


def scalars(hardware: Hardware) -> dict[str, int]:
    """Several rows per thread and one warp per program: many programs even for a small batch."""
    return {"BLOCK_M": hardware.warp_size * SCALARS_PER_THREAD, "num_warps": 1}


def alignment(itemsize: int, *strides: int) -> int:
    """The widest word, in elements, that divides every row stride: up to 16 bytes."""
    align = _vector(itemsize)
    while any(stride % align for stride in strides):
        align //= 2
    return align


def _fit(d: int, itemsize: int, hardware: Hardware, budget: Mapping[int, int], held: int, sums: int = 0) -> Plan | None:
    """The tile with the fewest warps that holds two rows per thread, which share each weight read; else one row."""
    vector, best = _vector(itemsize), None
    words = vector * max(1, itemsize // 4)
    for sharing, registers in budget.items():
        block = min(max(_next_power_of_2(d), vector), vector * hardware.warp_size * sharing)
        chunks = -(-d // block)
        most = MAX_ROWS_PER_THREAD_WITH_SUMS if sums else MAX_ROWS_PER_THREAD
        rows = min((registers - sums * chunks * words) // (held * chunks * words), most)
        if rows < 1 or (best is not None and rows < 2):
            continue
        rows = 1 << (rows.bit_length() - 1)
        at_once = sharing * hardware.warp_size * vector // block
        used = (sums + held * rows) * chunks * words
        best = Plan(at_once * rows, block, chunks, at_once, sharing, used)
        if rows >= 2:
            break
    return best


def _vector(itemsize: int) -> int:
    return 16 // itemsize


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
