"""Launch parameters by pure arithmetic on shape, dtype and hardware: no driver call, nothing is timed. What a user has
had timed (``fastcross doctor --tune``) overrules the model: see ``measured.py``.

A program holds ``BLOCK_M`` rows in registers, each as ``CHUNKS`` chunks of ``BLOCK_N`` columns, so that 1026 columns
occupy 3 × 512 places instead of 2048. A thread loads vectors of ``align`` elements, as wide as the rows' strides allow.
If a chunk has fewer vectors than there are threads, ``ROWS`` rows lie side by side.

A model of the machine code predicts for every possible tile

    registers      rows and sums of a thread, addresses of its vectors, a constant
    resident       programs that fit the register file of an SM at once
    instructions   of one warp, per row: those of a layer times the layers, and those of the rows
    bytes          per row, between the SM and memory

and the tile with the least estimated time is chosen: bytes and instructions over what an SM moves and issues per cycle,
plus the latency that few resident warps do not hide. Tiles that would spill are excluded.
``tests/kernels/test_launch_model.py`` compares the model with the compiler's output.

Rows too long for registers are divided into segments, with a separate pass for their dots.
"""

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from fastcross.kernels.gpu.measured import Key, Measured, Tile, tiles_of

REGISTER_FILE = 2048  # 32-bit registers per lane of an SM's warps
MOST_REGISTERS = 190  # predicted, per thread; the compilers have 255, and the model may err by the difference
MOST_REGISTERS_WITH_ADDRESSES = 240  # of 256
MOST_REGISTERS_OF_16_WARPS = 100  # of 128
MOST_REGISTERS_OF_16_WARPS_WITH_SUMS = 148  # which leave the compiler less to load ahead; each layer counts once more
BLACKWELL_NEEDS = 6  # more, or the compiler spills
AMD_CAN_DO_WITHOUT = 80  # registers
MODEL_ERRS = 32  # registers, at most
DEEP = 16  # layers; NVIDIA's compiler chooses the registers of passes with more
MOST_WARPS = 48  # resident on an SM, on the smaller chips
WORD = 16  # bytes

# An SM of a current chip: bytes of memory traffic and warp instructions per cycle, with some issue slots lost.
BYTES_PER_CYCLE, INSTRUCTIONS_PER_CYCLE = 14.0, 2.5
LATENCY_WARPS = 3  # as many resident warps leave as much time uncovered as they work

BACKWARD_WARPS, LONG_ROWS_WARPS = (4, 8), (16,)  # AMD's compiler would spill with 16

SEGMENT = 4096  # columns per program if a row's dots are computed in segments
SEGMENT_WITH_SUMS = 128  # columns per program if sums over rows are computed in segments: many rows side by side
MOST_CHUNKS = 16
MOST_ROWS = 32  # of a program, so that a small batch occupies all SMs
SUMS_SHARE = 0.1  # the largest traffic of the partial sums of segments, as a share of the rows' traffic
SCALARS_PER_THREAD = 2  # rows per thread in the kernels that read per-row scalars only


class Hardware(NamedTuple):
    """The properties of a device that the model needs."""

    processors: int = 16
    warp_size: int = 32
    amd: bool = False
    tf32: bool = False  # whether Triton can multiply float32 in tf32 on its tensor cores
    blackwell: bool = False
    measured: Measured | None = None


_KNOWN: dict[torch.device, Hardware] = {}


def hardware_of(device: torch.device) -> Hardware:
    """What is known of a device; its file of measured tiles is read at first use."""
    return _KNOWN.get(device) or _KNOWN.setdefault(device, _look_up(device))


@contextlib.contextmanager
def using(device: torch.device, tiles: Measured | None) -> Iterator[None]:
    """Within it the device's plans are these, in place of those of its file."""
    before = hardware_of(device)
    _KNOWN[device] = before._replace(measured=tiles)
    try:
        yield
    finally:
        _KNOWN[device] = before


def _look_up(device: torch.device) -> Hardware:
    """From the properties that PyTorch has cached, without synchronisation. The defaults are for the interpreter and
    for devices whose properties PyTorch does not provide."""
    if device.type != "cuda":
        return Hardware()
    properties = torch.cuda.get_device_properties(device)
    warp_size = getattr(properties, "warp_size", 32)
    amd = torch.version.hip is not None
    tf32 = properties.gcnArchName.startswith("gfx942") if amd else properties.major >= 8
    blackwell = not amd and properties.major >= 10
    return Hardware(properties.multi_processor_count, warp_size, amd, tf32, blackwell, tiles_of(properties.name))


def word_of(itemsize: int, lengths: Sequence[int], addresses: Sequence[int]) -> int:
    """Elements per vector such that all lengths are multiples of it, and all addresses are aligned to it."""
    return math.gcd(WORD, *(length * itemsize for length in lengths), *addresses) // itemsize


class Work(NamedTuple):
    """The work of a kernel on a row of d elements."""

    itemsize: int
    align: int  # elements per vector load, at most
    layers: int  # rows of parameters applied to the row
    held: int  # tensors of rows in registers at once
    moved: int  # reads and writes of rows
    sums: int = 0  # sums over rows, of d columns each, in registers
    scalars: int = 0  # of a row, one for each layer and kind, in registers
    dots: int = 0  # per row and layer (forward passes: 1; backward passes take one for all layers)
    rest: bool = False  # rows end within a vector, whose elements move one by one; this module sets it

    @property
    def size(self) -> int:
        """32-bit registers per element in the accumulation dtype."""
        return 2 if self.itemsize == 8 else 1


@dataclass(frozen=True)
class Plan:
    """The tile of one kernel, and the model's predictions."""

    BLOCK_M: int
    BLOCK_N: int
    CHUNKS: int
    ROWS: int  # rows that the threads process side by side
    ALIGN: int  # elements per vector
    num_warps: int
    registers: int
    resident: int  # programs per SM
    busy: float  # of their warps those that have columns, lanes without any left out
    instructions: float  # of a warp, per row
    bytes: float  # per row
    addresses: int = 0  # further registers on AMD, whose instructions have no large immediate offsets
    maxnreg: int | None = None  # registers that NVIDIA's compiler may give a thread; None: its own choice
    whole_rows: bool = True  # otherwise a program processes a segment of each row
    groups: int = 1  # groups of layers, each with a separate pass over the rows for its sums

    @property
    def tile(self) -> Tile:
        return self.BLOCK_M, self.BLOCK_N, self.ROWS, self.ALIGN, self.num_warps

    @property
    def columns(self) -> int:
        return self.BLOCK_N * self.CHUNKS

    @property
    def cycles(self) -> float:
        """Estimated cycles of one SM per row: the longer of memory and issue time hides half of the other."""
        memory, issue = self.bytes / BYTES_PER_CYCLE, self.instructions / INSTRUCTIONS_PER_CYCLE
        return (max(memory, issue) + min(memory, issue) / 2) * (1 + LATENCY_WARPS / self.busy)

    def segments(self, d: int) -> int:
        return -(-d // self.columns)

    def programs(self, rows: int, d: int, work: Work, hardware: Hardware) -> int:
        """Persistent programs per segment: at most those resident at once, because each writes its sums."""
        segments = self.segments(d)
        most = hardware.processors * self.resident // (segments * self.groups)
        if segments > 1 and work.sums:
            # A sum is written and read again. At least as many programs as SMs.
            padded = -(-d // 16) * 16
            share = SUMS_SHARE * rows * work.moved * work.itemsize * d / (2 * work.sums * 4 * work.size * padded)
            most = min(most, max(int(share), -(-hardware.processors // (segments * self.groups))))
        return max(1, min(-(-rows // self.BLOCK_M), most))


@functools.lru_cache(maxsize=4096)
def forward(d: int, work: Work, hardware: Hardware) -> Plan:
    """The plan of a pass without sums over rows."""
    return _choose("forward", d, work, hardware, True)


@functools.lru_cache(maxsize=4096)
def backward(d: int, work: Work, hardware: Hardware, whole_rows: bool = True) -> Plan:
    """The plan of a pass with sums over rows."""
    return _choose("backward", d, work, hardware, whole_rows)


def _choose(kind: str, d: int, work: Work, hardware: Hardware, whole_rows: bool) -> Plan:
    """The fastest of those that were measured, or the model's choice."""
    plans = candidates(kind, d, work, hardware, whole_rows)
    if hardware.measured is None:
        return plans[0]
    tile = hardware.measured.get(key_of(kind, d, work, whole_rows))
    return next((plan for plan in plans if plan.tile == tile), plans[0])


def key_of(kind: str, d: int, work: Work, whole_rows: bool) -> Key:
    """The class of shapes that share a plan, on one device."""
    return tuple(sorted({"kind": kind, "d": d, "whole_rows": whole_rows, **work._asdict()}.items()))


def candidates(kind: str, d: int, work: Work, hardware: Hardware, whole_rows: bool = True) -> list[Plan]:
    """Every plan that can run, the model's choice first.

    Backward, whole rows have their sums in registers, if they fit; otherwise segments of rows, with a separate pass for
    their dots.
    """
    work = _with_rest(d, work)
    if kind == "forward":
        every = (1, 2, 4, 8, 16)
        segments = [replace(plan, whole_rows=False) for plan in _ranked(min(d, SEGMENT), [work], hardware, every)]
        return _ranked(d, [work], hardware, every) or segments
    if whole_rows:
        # A vector of 8 halves can leave half of the lanes without columns; one of 4 divides rows as float32 does.
        words = dict.fromkeys((work.align, min(work.align, 4)))
        works = [_with_rest(d, work._replace(align=word)) for word in words]
        for warps in (BACKWARD_WARPS, LONG_ROWS_WARPS)[: 1 if hardware.amd else 2]:
            if plans := _ranked(d, works, hardware, warps):
                return plans
    block, groups = min(d, SEGMENT_WITH_SUMS), 1
    work = work._replace(scalars=0) if whole_rows else work  # computed before, with the dots
    while not (plans := _ranked(block, [_group(work, groups)], hardware, BACKWARD_WARPS)):
        groups += 1
    # The dots read both operands once more, and each of several groups reads the rows once more.
    moved = (work.moved + 2 * whole_rows + (groups if groups > 1 else 0)) * d * work.itemsize
    plans = [replace(plan, whole_rows=False, groups=groups, bytes=moved) for plan in plans]
    # With groups, dx0 has a pass of its own, of whose registers the plan says nothing.
    return plans if groups == 1 else [replace(plan, maxnreg=None) for plan in plans]


def _with_rest(d: int, work: Work) -> Work:
    return work._replace(rest=d % work.align > 0)


def _group(work: Work, groups: int) -> Work:
    """The sums of one group of layers. Several read the scalars, which are computed before."""
    scalars = work.scalars if groups == 1 else 0
    return work._replace(layers=-(-work.layers // groups), sums=-(-work.sums // groups), scalars=scalars)


def scalars(hardware: Hardware) -> dict[str, int]:
    """Several rows per thread and one warp per program: many programs even for a small batch."""
    return {"BLOCK_M": hardware.warp_size * SCALARS_PER_THREAD, "num_warps": 1}


def _ranked(d: int, works: Sequence[Work], hardware: Hardware, warps: tuple[int, ...]) -> list[Plan]:
    """The plans that fit, the fastest first."""
    every = ((work, predict(d, work, hardware, *t)) for work in works for t in _tiles(d, work, hardware, warps))
    return sorted((plan for work, plan in every if _fits(plan, work, hardware)), key=lambda plan: plan.cycles)


def _tiles(d: int, work: Work, hardware: Hardware, warps: tuple[int, ...]) -> Iterator[tuple[int, int, int, int]]:
    """(BLOCK_M, BLOCK_N, ROWS, num_warps): powers of two, one vector per thread, no chunk wider than necessary."""
    widest = max(1 << (d - 1).bit_length(), work.align)
    for count in warps:
        words = count * hardware.warp_size * work.align
        block = min(words, widest)
        while block >= min(widest, 32) and -(-d // block) <= MOST_CHUNKS:
            at_once = words // block
            if at_once > 1 and count > 4:
                break  # two smaller programs do the same
            for rows in (1, 2, 4):
                if rows == 1 or at_once * rows <= MOST_ROWS:
                    yield at_once * rows, block, at_once, count
            block //= 2


def _fits(plan: Plan, work: Work, hardware: Hardware) -> bool:
    most = MOST_REGISTERS
    if plan.num_warps >= 16:
        with_sums = MOST_REGISTERS_OF_16_WARPS_WITH_SUMS - work.layers - BLACKWELL_NEEDS * hardware.blackwell
        most = with_sums if work.sums else MOST_REGISTERS_OF_16_WARPS
    return plan.registers <= most and plan.registers + plan.addresses <= MOST_REGISTERS_WITH_ADDRESSES


def predict(d: int, work: Work, hardware: Hardware, BLOCK_M: int, BLOCK_N: int, ROWS: int, num_warps: int) -> Plan:
    """The model's prediction of a tile's machine code."""
    chunks = -(-d // BLOCK_N)
    chunk = max(work.align, BLOCK_N // (num_warps * hardware.warp_size))  # columns of a chunk's row, per thread
    rows, columns = BLOCK_M // ROWS, chunk * chunks  # per thread
    elements, words = columns * rows, columns * rows // work.align
    rest = rows * chunk if work.rest else 0  # loads of one element
    sharing = -(-num_warps // ROWS)  # warps that share a row

    # A backward pass loads a layer's weights ahead; a forward pass, which waits for each dot, one or two vectors.
    ahead, base = (min(columns, 8), 24) if work.dots else (columns, 40)
    if work.dots and work.itemsize == 2:
        ahead += elements // 2  # rows before they are converted
    registers = base + work.size * (work.held * elements + work.sums * columns + ahead) + 2 * rest
    # If sums unroll the layers, each loads its scalars ahead, and in float64 AMD's compiler as many again.
    unrolled = work.layers * work.size**2 if work.sums else 0
    registers += words + rows * (2 * work.moved + work.size * work.scalars + unrolled)
    addresses = 2 * work.size * work.layers * (columns // work.align) if work.sums else 0
    if hardware.amd and work.sums:
        # AMD's compiler loads the weights and scalars of all unrolled layers ahead, except a constant number.
        addresses = max(addresses, work.size * work.layers * (columns + 6 * rows) - AMD_CAN_DO_WITHOUT)
    given = -(-min(registers, 255) // 8) * 8
    resident = max(1, min(REGISTER_FILE // (given * num_warps), MOST_WARPS // num_warps))
    # NVIDIA's compiler spills some registers for more programs at a time, unless it is told how many it has: those that
    # are predicted, and some to spare, because the model errs. With sums no more programs are launched than these, and
    # they must fit with the spare ones, or it is not told. Nor where two programs leave all that a thread can have (it
    # may find room for a third), nor for deep networks, of whose layers it loads more ahead than the model can tell.
    needed = -(-(registers + (max(8, work.layers) if work.sums else MODEL_ERRS)) // 8) * 8
    left = REGISTER_FILE // (max(1, REGISTER_FILE // (needed * num_warps)) * num_warps) // 8 * 8
    told = left <= min(MOST_REGISTERS, REGISTER_FILE // (resident * num_warps)) and work.layers <= DEEP
    maxnreg = min(left, 248) if not hardware.amd and (told or not work.sums) else None

    dot = rows * 10 + (16 if sharing > 1 else 0)  # instructions besides its products
    scalars = 8 if work.sums else 4  # a pass with sums computes those of its rows
    layer = work.size * elements * (1 + (work.sums > 0)) + columns / 2 + scalars * rows + work.dots * dot
    passes = work.moved * (words * 4 + elements * (2 if work.itemsize == 2 else 0.5) + rest * 5) + 30
    if not work.dots:
        passes += work.size * elements + dot
    instructions = (work.layers * layer + passes) * num_warps / BLOCK_M
    moved = work.moved * d * work.itemsize
    busy = resident * num_warps * d / (chunks * BLOCK_N)
    layout = BLOCK_M, BLOCK_N, chunks, ROWS, work.align, num_warps
    return Plan(*layout, registers, resident, busy, instructions, moved, addresses, maxnreg)
