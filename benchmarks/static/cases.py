"""A case: an operator on operands of one shape, dtype and layout, for one target; and the launches it makes there.

The launchers run on tensors without memory, and each launch they make is recorded with the parameters they chose.
"""

import functools
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction, type_canonicalisation_dict

from benchmarks.static.machine_code import Launch
from benchmarks.suites import OPERATORS
from fastcross.kernels.gpu import launch
from fastcross.kernels.gpu.launch import Hardware
from fastcross.kernels.layout import kept_sizes
from fastcross.ops.backends import launcher

TARGETS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx1100", "gfx1200")
DRAWN_TARGETS = ("sm_80", "sm_90", "gfx1100")
DTYPES = {  # of rows and of parameters
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "mixed": (torch.bfloat16, torch.float32),
    "fp16": (torch.float16, torch.float16),
    "fp16/32": (torch.float16, torch.float32),
    "fp32/16": (torch.float32, torch.bfloat16),
    "fp64": (torch.float64, torch.float64),
}
GRADIENTS = {operator.name: len(operator.operands) for operator in OPERATORS}
FLOOR = {  # reads and writes of a (B, d) tensor that no implementation can do without
    f"{operator.name}_{suffix}": floor
    for operator in OPERATORS
    for suffix, floor in (("fwd", operator.forward), ("bwd", operator.backward))
}
BATCH, PROCESSORS = 4096, 132


class Case(NamedTuple):
    target: str
    operator: str
    d: int
    layers: int
    dtype: str
    layout: str  # "aligned": the rows' stride is a multiple of 16; "packed": it is d; "odd": d + 1
    outputs: int = 1
    bias: bool = True
    keep_p: bool = True
    needs: tuple[bool, ...] | None = None  # which gradients; None: all


def draw(seed: int, count: int) -> list[Case]:
    """Cases at random: widths from 1 to 8192 and depths from 1 to 32 by their logarithms, and all that callers vary."""
    generator = random.Random(seed)
    cases = []
    for _ in range(count):
        operator = generator.choice(list(FLOOR))
        stem = operator.rpartition("_")[0]
        needs = [generator.random() < 0.75 for _ in range(GRADIENTS[stem])]
        needs[generator.randrange(len(needs))] = True
        cases.append(
            Case(
                generator.choice(DRAWN_TARGETS),
                operator,
                round(math.exp(generator.uniform(0, math.log(8192)))),
                round(math.exp(generator.uniform(0, math.log(32)))),
                generator.choice(list(DTYPES)),
                generator.choice(("aligned", "packed", "odd")),
                generator.choice((1, 1, 2, 7)),
                generator.random() < 0.75,
                generator.random() < 0.75,
                tuple(needs),
            )
        )
    return cases


def launches(case: Case) -> list[Launch]:
    """What the operator's launcher would launch."""
    return record(case.target, prepare(case, "meta"), (BATCH, case.d))


def record(target: str, call: Callable[[], object], rows: tuple[int, ...] = ()) -> list[Launch]:
    """What a call of launchers would launch; ``rows``: the shape of operands whose traffic is counted."""
    recorded: list[Launch] = []
    amd, warp_size = target.startswith("gfx"), 64 if target.startswith("gfx9") else 32
    tf32, blackwell = target == "gfx942" if amd else target != "sm_75", target in ("sm_100", "sm_120")
    device = Hardware(PROCESSORS, warp_size, amd, tf32, blackwell)

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        recorded.append(specialise(target, kernel, args, options, rows))

    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(launch, "hardware_of", return_value=device),
    ):
        call()
    return recorded


def prepare(case: Case, device: str) -> Callable[[], object]:
    """A call of the operator's launcher."""
    stem = case.operator.rpartition("_")[0]
    run = launcher(case.operator)
    x_dtype, w_dtype = DTYPES[case.dtype]
    stride = {"aligned": -(-case.d // 16) * 16, "packed": case.d, "odd": case.d + 1}[case.layout]

    def rows() -> Tensor:
        return torch.empty_strided((BATCH, case.d), (stride, 1), dtype=x_dtype, device=device)

    def parameter(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=w_dtype, device=device)

    w, v = parameter(case.layers, case.d), parameter(case.outputs, case.d)
    b = parameter(case.layers, case.d) if case.bias else None

    def kept(rows: int) -> Tensor:
        dtype = torch.promote_types(x_dtype, torch.float32)
        return torch.empty(sum(kept_sizes(rows, BATCH, case.d, w_dtype, dtype)), device=device, dtype=dtype)

    dz = torch.empty(BATCH, case.outputs, dtype=x_dtype, device=device)
    needs = [True] * GRADIENTS[stem] if case.needs is None else list(case.needs)
    parameters = w[0], None if b is None else b[0]
    operands: dict[str, tuple] = {
        "cross_layer_fwd": (rows(), rows(), *parameters),
        "cross_layer_bwd": (rows(), rows(), rows(), *parameters, needs),
        "cross_network_fwd": (rows(), w, b, case.keep_p),
        "cross_network_bwd": (rows(), rows(), w, b, kept(case.layers), needs),
        "cross_logits_fwd": (rows(), w, b, v, case.keep_p),
        "cross_logits_bwd": (dz, rows(), w, b, v, kept(case.layers + case.outputs), needs),
    }
    return functools.partial(run, *operands[case.operator])


def specialise(
    target: str, kernel: JITFunction, args: tuple, options: dict[str, Any], shape: tuple[int, ...] = ()
) -> Launch:
    """Types and hints as the JIT derives them: pointers and multiples of 16 are marked, the integer 1 is a constant.

    ``shape``: of the operands whose traffic is looked at.
    """
    given = dict(zip(kernel.arg_names, args, strict=False)) | options
    signature: list[tuple[str, Any]] = []
    constexprs: list[tuple[Any, Any]] = []
    divisible: list[tuple[int, ...]] = []
    rows, moved, sums = [], [], 0

    def kind(path: tuple[int, ...], value: Any, is_constexpr: bool, free: bool) -> Any:
        if isinstance(value, tuple):  # the JIT marks what is in a tuple, whatever the kernel says of it
            return tuple(kind((*path, i), each, False, False) for i, each in enumerate(value))
        if is_constexpr or value is None or (isinstance(value, int) and value == 1 and not free):
            constexprs.append((path if len(path) > 1 else kernel.params[path[0]].name, value))
            return "constexpr"
        if isinstance(value, Tensor):
            divisible.append(path)
            return "*" + type_canonicalisation_dict[str(value.dtype).removeprefix("torch.")]
        if isinstance(value, float):
            return "fp32"
        if value % 16 == 0 and not free:
            divisible.append(path)
        return "i32" if -(2**31) <= value < 2**31 else "i64"

    for i, parameter in enumerate(kernel.params):
        name, value = parameter.name, given[parameter.name]
        signature.append((name, kind((i,), value, parameter.is_constexpr, parameter.do_not_specialize)))
        if isinstance(value, Tensor) and not parameter.is_constexpr:
            if value.shape == shape:
                rows.append((name, value.element_size()))
            if BATCH in value.shape:
                place = value.untyped_storage()._cdata, int(value.storage_offset())
                moved.append((name, value.numel() * value.element_size(), place))
            if name == "sums_ptr":
                sums = value.numel() * value.element_size()
    return Launch(
        target,
        kernel.fn.__module__,
        kernel.fn.__name__,
        tuple(signature),
        tuple(constexprs),
        tuple(divisible),
        options["num_warps"],
        tuple(rows) if "ALIGN" in given else (),
        sums,
        options.get("num_stages"),
        options.get("maxnreg"),
        tuple(moved),
    )
