"""Compiles one kernel for one target, without a GPU, and reads registers, spills and row traffic from the result."""

import importlib
import itertools
import math
import multiprocessing
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TENSOR_CORES = re.compile(r"^\s+(?:@%\w+ )?(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma|v_s?w?mfma|v_wmma)", re.MULTILINE)


def word_bits(widths: Iterable[int], dtype: torch.dtype) -> int:
    """Of the widest word that rows of all these widths are made of."""
    return 8 * math.gcd(16, *(width * dtype.itemsize for width in widths))


@dataclass(frozen=True)
class Launch:
    """One kernel with all that its machine code depends on."""

    target: str
    module: str
    kernel: str
    signature: tuple[tuple[str, Any], ...]
    constexprs: tuple[tuple[Any, Any], ...]  # by name, within a tuple by place
    divisible: tuple[tuple[int, ...], ...]
    num_warps: int
    rows: tuple[tuple[str, int], ...]  # operands (B, d): name, bytes per element
    sums: int = field(default=0, compare=False)  # bytes of the partial sums it writes or reads
    num_stages: int | None = None  # loads of a loop that are under way; None: the compiler's choice
    maxnreg: int | None = None  # registers of a thread, at most; None: the compiler's choice
    moved: tuple[tuple[str, int, tuple[int, int]], ...] = field(default=(), compare=False)  # operands with a number of
    # rows, as many as the batch: name, bytes, and what tells one place in memory from another

    @property
    def warp_size(self) -> int:
        return 64 if self.target.startswith("gfx9") else 32


@dataclass(frozen=True)
class Code:
    """What the compilers made of a launch; reads and writes are per element of the (B, d) operands, all together."""

    registers: int
    spills: int
    words: frozenset[int]  # bits; but for the last columns of a row, where N is no multiple of the word
    reads: float
    writes: float
    loop: int = 0  # instructions of the longest loop, on NVIDIA: a tile of a backward pass, a layer of a forward pass
    shuffles: int = 0  # of these, words that go from thread to thread of a warp,
    barriers: int = 0  # and waits of all warps of a program for each other
    late_loads: int = 0  # and loads from global memory after the last of these waits
    widest: int = 0  # bits, of all words that move between processor and memory
    products: int = 0  # instructions of tensor cores
    shared: int = 0  # bytes of a program's shared memory
    read: frozenset[str] = frozenset()  # operands that words are loaded from,
    written: frozenset[str] = frozenset()  # and stored to
    of_tables: tuple[
        tuple[int, int], ...
    ] = ()  # words of tables' rows, x0 and gradients: bits, bytes of all that have so

    def narrow(self, bits: int) -> float:
        """The share of these bytes that move in words of less than so many bits."""
        every = sum(size for _, size in self.of_tables)
        return sum(size for width, size in self.of_tables if width < bits) / every if every else 0.0


def compile_launch(launch: Launch, count_instructions: bool = False) -> Code:
    """Compiles a launch and reads the result."""
    source = ASTSource(
        fn=getattr(importlib.import_module(launch.module), launch.kernel),
        signature=dict(launch.signature),
        constexprs=dict(launch.constexprs),
        attrs={place: [["tt.divisibility", 16]] for place in launch.divisible},
    )
    amd = launch.target.startswith("gfx")
    target = GPUTarget("hip", launch.target, launch.warp_size) if amd else GPUTarget("cuda", int(launch.target[3:]), 32)
    options = {"num_warps": launch.num_warps}
    given = {"num_stages": launch.num_stages, "maxnreg": launch.maxnreg}
    options |= {name: value for name, value in given.items() if value is not None}
    compiled = triton.compile(source, target=target, options=options)
    registers, spills = _amd_usage(compiled.asm["amdgcn"]) if amd else _nvidia_usage(compiled.asm["cubin"])
    loop = _longest_loop(_dump(compiled.asm["cubin"], "-sass")) if count_instructions and not amd else []
    shuffles, barriers = (sum(name in text for text in loop) for name in ("SHFL", "BAR.SYNC"))
    after = list(itertools.takewhile(lambda text: "BAR.SYNC" not in text, reversed(loop)))
    late_loads = sum("LDG" in text for text in after)
    accesses = filter(None, map(_access, compiled.asm["llir"].splitlines()))
    widest = 8 * max((width for _, width, _ in accesses), default=0)
    products = len(TENSOR_CORES.findall(compiled.asm["amdgcn" if amd else "ptx"]))
    return Code(
        registers,
        spills,
        *_row_traffic(launch, compiled.asm["llir"]),
        *(len(loop), shuffles, barriers, late_loads, widest, products, compiled.metadata.shared),
        *_directions(launch, compiled.asm["llir"]),
        _words_of_tables(launch, compiled.asm["llir"]),
    )


def compile_all(launches: Iterable[Launch], processes: int) -> Iterator[Code]:
    """The machine code of each, in their order; equal ones are compiled once."""
    wanted = list(launches)
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        codes = {launch: pool.submit(compile_launch, launch) for launch in dict.fromkeys(wanted)}
        for launch in wanted:
            yield codes[launch].result()


def _amd_usage(assembly: str) -> tuple[int, int]:
    def value(name: str) -> int:
        return int(re.findall(rf"\.{name}: +(\d+)", assembly)[-1])

    return value("vgpr_count"), value("vgpr_spill_count") + value("private_segment_fixed_size")


def _nvidia_usage(cubin: bytes) -> tuple[int, int]:
    text = _dump(cubin, "--dump-resource-usage")
    registers, stack, local = (int(re.findall(rf"{name}:(\d+)", text)[-1]) for name in ("REG", "STACK", "LOCAL"))
    return registers, stack + local


def _dump(cubin: bytes, option: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout


def longest_loop(sass: str) -> int:
    """How many instructions it has."""
    return len(_longest_loop(sass))


def _longest_loop(sass: str) -> list[str]:
    """Instructions from the target of a backward branch to the branch, the most of all branches."""
    code = {int(at, 16): text for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/ +([^;/]+);", sass)}
    most: list[str] = []
    for at, text in code.items():
        if (branch := re.search(r"BRA(?:\.\w+)* .*?0x([0-9a-f]+)", text)) and int(branch[1], 16) < at:
            most = max(most, [code[other] for other in code if int(branch[1], 16) <= other <= at], key=len)
    return most


def _row_traffic(launch: Launch, llir: str) -> tuple[frozenset[int], float, float]:
    """Words, reads and writes of the row operands, from every load and store whose address leads to one of them."""
    arguments, parents = _arguments(launch), _parents(llir)
    operands = {f"%{arguments.index(name)}": size for name, size in launch.rows}
    moved: dict[tuple[str, bool], list[int]] = {}  # bytes of each instruction, by operand and whether it is a load
    for line in llir.splitlines():
        if (access := _access(line)) is not None:
            is_load, width, address = access
            for operand in _roots(address, parents) & operands.keys():
                moved.setdefault((operand, is_load), []).append(width)

    constexprs, words, passes = dict(launch.constexprs), set(), [0.0, 0.0]
    for (operand, is_load), widths in moved.items():
        word = max(widths)
        # Narrower words are the last N % ALIGN columns: lanes that the wide words leave out.
        rest = sum(width for width in widths if width < word)
        elements = constexprs["BLOCK_M"] * constexprs["BLOCK_N"] / (launch.num_warps * launch.warp_size)
        if rest > constexprs.get("REST", 1) * elements * operands[operand]:
            words.add(8 * min(widths))
        words.add(8 * word)
        passes[is_load] += (sum(widths) - rest) / (elements * constexprs.get("CHUNKS", 1) * operands[operand])
    return frozenset(words), passes[True], passes[False]


def _directions(launch: Launch, llir: str) -> tuple[frozenset[str], frozenset[str]]:
    """The operands that are read, and those that are written, by the addresses of all loads and stores."""
    arguments, parents, found = _arguments(launch), _parents(llir), ({""}, {""})
    names = {f"%{place}": name for place, name in enumerate(arguments)}
    for line in llir.splitlines():
        if (access := _access(line)) is not None:
            found[not access[0]].update(names[root] for root in _roots(access[2], parents) & names.keys())
    return frozenset(found[0]), frozenset(found[1])


TABLE_ROWS = {"x0_ptr", "dx0_ptr", "values_ptr", "g_ptr"}


def _words_of_tables(launch: Launch, llir: str) -> tuple[tuple[int, int], ...]:
    """Of kernels that read the addresses and columns of tables from memory: every word of a row."""
    arguments, parents, found = _arguments(launch), _parents(llir), dict[int, int]()
    names = {f"%{place}": name for place, name in enumerate(arguments)}
    addresses = set(re.findall(r"(%[\w.]+) = inttoptr", llir))
    for line in llir.splitlines() if "tables_ptr" in arguments else ():
        if (access := _access(line)) is not None:
            seen = _ancestors(access[2], parents)
            roots = {names[each] for each in seen - parents.keys() if each in names}
            if seen & addresses or ("tables_ptr" in roots and roots & TABLE_ROWS):
                found[8 * access[1]] = found.get(8 * access[1], 0) + access[1]
    return tuple(sorted(found.items()))


def _arguments(launch: Launch) -> list[str]:
    return [name for name, kind in launch.signature if kind != "constexpr"]


def _parents(llir: str) -> dict[str, list[str]]:
    """Of each value those that it is computed from."""
    lines = (re.match(r" +(%[\w.]+) = (.*?)(, !dbg.*)?$", line) for line in llir.splitlines())
    return {match[1]: re.findall(r"%[\w.]+", match[2]) for match in lines if match}


def _access(line: str) -> tuple[bool, int, str] | None:
    """(is a load, bytes, address) of a line of LLVM IR that moves global memory: inline PTX, LLVM's own, AMD's."""
    if match := re.search(r"(ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)[ ;].*?ptr addrspace\(1\) (%[\w.]+)", line):
        return match[1] == "ld", int(match[2] or 1) * int(match[3]) // 8, match[4]
    if match := re.search(r"cp\.async\.c[ag]\.shared\.global.* 0x([0-9a-f]+), .*ptr addrspace\(1\) (%[\w.]+)", line):
        return True, int(match[1], 16), match[2]
    if match := re.search(r"= load ([^,]+), ptr addrspace\(1\) (%[\w.]+)", line):
        return True, _bytes(match[1]), match[2]
    if match := re.search(r"^ +store (<[^>]+>|\w+) .*, ptr addrspace\(1\) (%[\w.]+)", line):
        return False, _bytes(match[1]), match[2]
    if match := re.search(
        r"call (<[^>]+>|\w+) @llvm.amdgcn.raw.ptr.buffer.load\S*?\(ptr addrspace\(8\) (%[\w.]+)", line
    ):
        return True, _bytes(match[1]), match[2]
    if match := re.search(r"buffer.store\S*?\((<[^>]+>|\w+) .*?ptr addrspace\(8\) (%[\w.]+)", line):
        return False, _bytes(match[1]), match[2]
    return None


def _bytes(kind: str) -> int:
    count, element = match.groups() if (match := re.match(r"<(\d+) x (\w+)>", kind)) else ("1", kind)
    bits = {"float": 32, "double": 64, "bfloat": 16, "half": 16}.get(element) or int(element[1:])
    return int(count) * bits // 8


def _roots(value: str, parents: dict[str, list[str]]) -> set[str]:
    """The values without a definition, among them the kernel's arguments, that ``value`` is computed from."""
    return _ancestors(value, parents) - parents.keys()


def _ancestors(value: str, parents: dict[str, list[str]]) -> set[str]:
    """All that ``value`` is computed from, and itself."""
    seen, stack = {value}, [value]
    while stack:
        for parent in parents.get(stack.pop(), []):
            if parent not in seen:
                seen.add(parent)
                stack.append(parent)
    return seen
