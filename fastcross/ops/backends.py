"""The choice of a backend, the definition of operators for PyTorch's dispatcher, and checks that all operators share.

``fastcross::NAME`` is defined once: the CPU key has the C++ kernel, the CUDA key the Triton launcher, the fake the
shape rule for torch.compile. Each operator has one autograd Function in Python, for both devices.
"""

import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastcross.extras import needs
from fastcross.kernels import cpu

BACKENDS = ("auto", "triton", "cpu", "torch", "reference")
CPU_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

_HAS_CPU = cpu.load()
_HAS_TRITON = importlib.util.find_spec("triton") is not None
_LIBRARY = torch.library.Library("fastcross", "DEF")
_INTERPRETED = torch.library.Library("fastcross_interpreted", "DEF")  # for tests without a GPU
_TRITON_FILES: dict[str, str] = {}  # of each operator that has a launcher


_LIBRARY.define("instruction_set(str name) -> str")


def define(
    name: str,
    schema: str,
    fake: Callable[..., Any] | None = None,
    triton: str | None = None,
    cpu_kernel: Callable[..., Any] | None = None,
) -> None:
    """Defines ``fastcross::name``. The Triton launcher has its name and arguments, and is in kernels/gpu/``triton``.py;
    the CPU kernel is registered by C++, unless it is ``cpu_kernel``, which calls other operators."""
    tags = torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order
    schema = " ".join((name + schema).split())
    _LIBRARY.define(schema, tags=tags)
    if cpu_kernel is not None:
        _LIBRARY.impl(name, cpu_kernel, "CPU")
    if fake is not None:
        torch.library.register_fake(f"fastcross::{name}", fake, lib=_LIBRARY)
    if triton is None:
        return
    _TRITON_FILES[name] = triton

    def launch(*args: Any) -> Any:
        with torch.cuda.device_of(args[0]):  # Triton launches on the current device, which may be another one
            return launcher(name)(*args)

    _LIBRARY.impl(name, launch, "CUDA")
    _INTERPRETED.define(schema, tags=tags)
    _INTERPRETED.impl(name, launch, "CPU")
    if fake is not None:
        torch.library.register_fake(f"fastcross_interpreted::{name}", fake, lib=_INTERPRETED)


def launcher(name: str) -> Callable[..., Any]:
    """The Triton launcher of an operator."""
    return getattr(importlib.import_module(f"fastcross.kernels.gpu.{_TRITON_FILES[name]}"), name)


def kernel(name: str, backend: str, x: Tensor) -> Callable[..., Any]:
    """The operator ``fastcross::name``; for "triton" with CPU tensors, its launcher in Triton's interpreter."""
    library = torch.ops.fastcross_interpreted if backend == "triton" and x.device.type == "cpu" else torch.ops.fastcross
    return getattr(library, name).default


def choose(backend: str, x: Tensor, *others: Tensor | None) -> str:
    """The backend that will run, never "auto". A backend that cannot run here raises an error with the reason.

    PyTorch's operators replace a kernel under transforms (torch.func, forward-mode), in export, and for tensor
    subclasses such as DTensor. They support tangents and batch dimensions, and exported files run without fastcross.
    """
    check(backend)
    if backend in ("torch", "reference"):
        return backend
    if is_transformed() or torch.compiler.is_exporting():
        return "torch"
    for t in (x, *others):
        if _is_foreign(t):
            if backend == "auto":
                return "torch"
            kind = type(t).__name__
            raise ValueError(f'backend "{backend}" runs on torch.Tensor only ("auto" on others); got {kind}')
    return choose_kernels(backend, x.device, x.dtype)


def choose_kernels(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """Like :func:`choose`, for plain tensors of this device and dtype."""
    check(backend)
    kind = device.type
    if backend == "auto":
        if kind == "cpu" and dtype in CPU_DTYPES:
            if not _HAS_CPU:
                if not torch.compiler.is_compiling():  # a warning cannot be traced
                    _warn_of_missing_kernels()
                return "torch"
            return "cpu"
        return "triton" if kind == "cuda" and _HAS_TRITON and dtype != torch.float64 else "torch"
    # The meta device computes nothing: the operators' shape rules are the same for every backend.
    if backend == "cpu":
        if kind not in ("cpu", "meta") or dtype not in CPU_DTYPES:
            kinds = ", ".join(str(each).removeprefix("torch.") for each in CPU_DTYPES)
            raise ValueError(f'backend "cpu" runs {kinds} on cpu; got {dtype} on {kind}')
        if not _HAS_CPU:
            raise ValueError(f'backend "cpu" needs {cpu.MISSING}')
    if backend == "triton":
        if not _HAS_TRITON:
            raise ValueError(needs(f'backend "triton" for {dtype} on {kind}', "triton"))
        if kind == "cpu" and not is_interpreting():
            raise ValueError('backend "triton" needs a GPU (or TRITON_INTERPRET=1); got a tensor on cpu')
    return backend


def instruction_set(name: str = "") -> str:
    """The instruction set of the CPU kernels: avx512, avx2 or baseline. A name selects another one, for tests."""
    if not _HAS_CPU:
        raise ValueError(f"an instruction set belongs to {cpu.MISSING}")
    return torch.ops.fastcross.instruction_set(name)


def check(backend: str) -> None:
    """Raises if there is no such backend."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}")


def is_transformed() -> bool:
    """Whether a functorch transform (vmap, grad, …) or forward-mode differentiation is active.

    Both names are private. The public way, a Function with ``setup_context``, ``vmap`` and ``jvp``, binds its arguments
    in every call: measured, 13 µs for an empty Function where this one takes 4.
    """
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def is_differentiated() -> bool:
    """In a backward pass: whether it is itself differentiated or transformed. Then the closed form runs."""
    return torch.is_grad_enabled() or is_transformed()


def _is_foreign(t: Tensor | None) -> bool:
    """Whether a tensor's class overrides PyTorch's operators, and so has no rule for fastcross's, such as DTensor."""
    if t is None or type(t) is Tensor or type(t) is torch.nn.Parameter:
        return False
    kind: Any = type(t)
    has_dispatch = kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
    has_function = kind.__torch_function__ is not torch.nn.Parameter.__torch_function__
    return (has_dispatch or has_function) and not kind.__module__.startswith("torch._subclasses.")  # PyTorch's tracers


def differentiates(*tensors: Tensor | None) -> bool:
    if torch.is_grad_enabled():
        for t in tensors:  # any() would take three times as long
            if t is not None and t.requires_grad:
                return True
    return False


def needed_only(grads: tuple[Tensor, ...], needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    return tuple(grad if need else None for grad, need in zip(grads, needs, strict=True))


def closed_form_vjp(function: Callable[..., Tensor], inputs: tuple, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of ``inputs`` (None stays None), differentiable with respect to the inputs and ``dy``."""
    given = [t for t in inputs if t is not None]

    def of_given(*tensors: Tensor) -> Tensor:
        remaining = iter(tensors)
        return function(*(None if t is None else next(remaining) for t in inputs))

    grads = iter(torch.func.vjp(of_given, *given)[1](dy))
    return tuple(None if t is None else next(grads) for t in inputs)


def empty_unless(needed: bool, x: Tensor) -> Tensor:
    """A fake's result: contiguous and shaped like ``x`` if it is needed."""
    return x.new_empty(x.shape if needed else 0)


def is_interpreting() -> bool:
    """Whether Triton runs in its interpreter, on a CPU."""
    return os.environ.get("TRITON_INTERPRET", "") not in ("", "0")


@functools.cache
def _warn_of_missing_kernels() -> None:
    warnings.warn(f"fastcross runs on plain PyTorch operators, without {cpu.MISSING}", stacklevel=4)


def check_x0(x0: Tensor) -> None:
    if not isinstance(x0, Tensor) or x0.dim() < 1:
        found = f"a tensor {tuple(x0.shape)}" if isinstance(x0, Tensor) else type(x0).__name__
        raise TypeError(f"x0 must be a tensor (..., d); got {found}")
    if x0.layout is not torch.strided:
        raise TypeError(f"x0 must be dense, {torch.strided}; got {x0.layout} of {tuple(x0.shape)}")


def check_parameter(name: str, t: Tensor, x0: Tensor, names: tuple[str, ...]) -> None:
    """Checks that a parameter has one dimension for each of ``names``; d is x0's number of features."""
    if t is None:
        raise TypeError(f"{name} is missing; x0 {tuple(x0.shape)} needs a {name} {form(names)}")
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(t).__name__} and x0 {tuple(x0.shape)}")
    shape, d = t.shape, x0.shape[-1]
    if len(shape) != len(names) or shape[-1] != d or d == 0 or shape[0] == 0:
        raise ValueError(
            f"{name} must be {form(names)} with d = {d}, none of them 0; "
            f"got {name} {tuple(shape)} and x0 {tuple(x0.shape)}"
        )
    check_kind(name, t, x0)


def check_kind(name: str, t: Tensor, x0: Tensor) -> None:
    if not (t.is_floating_point() and x0.is_floating_point()):
        raise TypeError(f"{name} and x0 must be floating point; got {name} {t.dtype} and x0 {x0.dtype}")
    if t.device != x0.device:
        raise ValueError(f"{name} must be on the device of x0; got {name} on {t.device} and x0 on {x0.device}")
    if t.layout is not torch.strided:
        raise TypeError(f"{name} must be dense, {torch.strided}; got {t.layout} of {tuple(t.shape)}")


def form(names: tuple[str, ...]) -> str:
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


def as_rows(x: Tensor) -> Tensor:
    """(..., d) -> (M, d) with unit column stride; a view if the strides allow it."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    if x.is_contiguous():  # cheaper to ask than the strides
        return x
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
