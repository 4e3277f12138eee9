"""The choice of a backend, for every operator and for the optimiser, and where each backend's kernels are."""

import functools
import importlib
import importlib.util
import os
from types import ModuleType

import torch
from torch import Tensor

from fastcross.extras import needs
from fastcross.ops import internals

BACKENDS = ("auto", "triton", "numba", "torch", "reference")

_CPU_DTYPES = (torch.float32, torch.float64)
_INSTALLED = {package: importlib.util.find_spec(package) is not None for package in ("triton", "numba")}
_KERNELS = {
    ("cross_layer", "numba"): "fastcross.kernels.cpu.cross_layer",
    ("cross_network", "numba"): "fastcross.kernels.cpu.cross_network",
    ("cross_logits", "numba"): "fastcross.kernels.cpu.cross_network",
    ("cross_layer", "triton"): "fastcross.kernels.gpu.launchers",
    ("cross_network", "triton"): "fastcross.kernels.gpu.launchers",
    ("cross_logits", "triton"): "fastcross.kernels.gpu.launchers",
    ("embedding_stack", "numba"): "fastcross.kernels.cpu.embedding",
    ("embedding_stack", "triton"): "fastcross.kernels.embedding",
    ("embedding_stack", "torch"): "fastcross.kernels.embedding",
    ("embedding_stack", "reference"): "fastcross.kernels.embedding",
    ("embedding_stack_keyed", "triton"): "fastcross.kernels.gpu.launchers",
    ("row_updates", "numba"): "fastcross.kernels.cpu.row_updates",
    ("row_updates", "triton"): "fastcross.kernels.gpu.row_updates",
    ("row_updates", "torch"): "fastcross.kernels.row_updates",
    ("row_updates", "reference"): "fastcross.kernels.row_updates",
}


def choose(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """The backend that will run, never "auto"; asking for one that cannot run here raises, and says why.

    Where PyTorch transforms or exports operators, its own are chosen in place of a kernel: they carry tangents and
    batch dimensions along, and what is exported runs where fastcross is not installed.
    """
    if backend not in ("torch", "reference") and (internals.is_transformed() or torch.compiler.is_exporting()):
        return "torch"
    return choose_kernels(backend, device, dtype)


def choose_for(backend: str, *operands: Tensor | None) -> str:
    """As :func:`choose` for the first operand; tensors with rules of their own, such as DTensor, keep to those."""
    first = operands[0]
    assert first is not None
    chosen = choose(backend, first.device, first.dtype)
    foreign = [t for t in operands if internals.is_foreign(t)]  # a list: PyTorch 2.8 cannot trace next() of another
    if not foreign or chosen in ("torch", "reference"):
        return chosen
    kind = type(foreign[0])
    if backend == "auto" or kind in (Tensor, torch.nn.Parameter):
        return "torch"
    raise ValueError(f'backend "{backend}" runs on torch.Tensor only ("auto" on others); got {kind.__name__}')


def choose_kernels(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """As :func:`choose`, where nothing transforms PyTorch's operators."""
    kind = device.type
    if backend == "auto":
        if kind == "cpu":
            return "numba" if dtype in _CPU_DTYPES and _INSTALLED["numba"] else "torch"
        return "triton" if kind == "cuda" and _INSTALLED["triton"] and dtype != torch.float64 else "torch"
    check(backend)
    if backend in ("torch", "reference"):
        return backend
    if not _INSTALLED[backend]:
        raise ValueError(needs(f'backend "{backend}" for {dtype} on {kind}', backend))
    # On the meta device there is nothing to compute: the shape rules of the operators work for every backend.
    if backend == "numba" and (kind not in ("cpu", "meta") or dtype not in _CPU_DTYPES):
        kinds = ", ".join(str(each) for each in _CPU_DTYPES)
        raise ValueError(f'backend "numba" runs {kinds} on cpu; got {dtype} on {kind}')
    if backend == "triton" and kind == "cpu" and not _interpreting():
        raise ValueError('backend "triton" needs a GPU (or TRITON_INTERPRET=1); got a tensor on cpu')
    return backend


def check(backend: str) -> None:
    """Raises where there is no such backend."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}")


@functools.cache
def kernels(operator: str, backend: str) -> ModuleType:
    """The module with an operator's launchers, imported at its first use: Triton and Numba are slow to import."""
    return importlib.import_module(_KERNELS[operator, backend])


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET", "") not in ("", "0")
