"""torch.library registrations: each kernel as an opaque operator with a shape rule, for autograd and torch.compile.

Operands are 2-D: rows (M, d) with unit column stride, parameters as in the public interface. ``backend`` names the
module whose launcher runs; both modules have the same functions. ``needs`` says which gradients to compute, in the
order of the results; the others come back empty. ``p`` is all that the forward pass keeps for the backward pass: the
dots x0·w_l, one row per layer (and per output of the head), in the accumulation dtype; empty unless ``keep_p``.
"""

import functools
import importlib
from types import ModuleType

import torch
from torch import Tensor

from fastcross.kernels.cpu import threads  # noqa: F401  remembers the process, before anybody forks it
from fastcross.kernels.rows import accumulation_dtype, as_rows, empty_rows

_SCHEMAS = {
    "cross_layer_fwd": "(Tensor x0, Tensor x, Tensor w, Tensor? b, str backend) -> Tensor",
    "cross_layer_bwd": "(Tensor dy, Tensor x0, Tensor x, Tensor w, bool[] needs, str backend)"
    " -> (Tensor dx0, Tensor dx, Tensor dw, Tensor db)",
    "cross_network_fwd": "(Tensor x0, Tensor w, Tensor? b, bool keep_p, str backend) -> (Tensor y, Tensor p)",
    "cross_network_bwd": "(Tensor dy, Tensor x0, Tensor w, Tensor? b, Tensor p, bool[] needs, str backend)"
    " -> (Tensor dx0, Tensor dw, Tensor db)",
    "cross_logits_fwd": "(Tensor x0, Tensor w, Tensor? b, Tensor v, bool keep_p, str backend) -> (Tensor z, Tensor p)",
    "cross_logits_bwd": "(Tensor dz, Tensor x0, Tensor w, Tensor? b, Tensor v, Tensor p, bool[] needs, str backend)"
    " -> (Tensor dx0, Tensor dw, Tensor db, Tensor dv)",
}
_MODULES = {"triton": "fastcross.kernels.gpu.launchers", "numba": "fastcross.kernels.cpu.launchers"}


@functools.cache
def _launchers(backend: str) -> ModuleType:
    """The backend's module, imported at its first call: Triton and Numba are slow to import."""
    return importlib.import_module(_MODULES[backend])


def _launch(name: str):
    def run(*args):
        # PyTorch may resolve an operand on the way, zeros without memory for one, to rows of any stride.
        *operands, backend = (as_rows(t) if isinstance(t, Tensor) and t.dim() == 2 else t for t in args)
        return getattr(_launchers(backend), name)(*operands)

    return run


def call(name: str, *args):
    """The operator ``name``, or, where nobody watches, its launcher: PyTorch takes longer to find it than it runs."""
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or torch.jit.is_tracing()
        or torch.autograd.profiler._is_profiler_enabled
        or not all(_is_plain(t) for t in args if isinstance(t, Tensor))
    ):
        return getattr(torch.ops.fastcross, name)(*args)
    return getattr(_launchers(args[-1]), name)(*args[:-1])


def _is_plain(t: Tensor) -> bool:
    """Whether its memory holds its values: no subclass, nothing that PyTorch resolves on the way to an operator."""
    return (
        type(t) in (Tensor, torch.nn.Parameter)
        and not t.is_neg()
        and not t._is_zerotensor()
        and not torch._C._functorch.is_functorch_wrapped_tensor(t)
    )


def _contiguous(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _needed(x: Tensor, needed: bool, like=_contiguous) -> Tensor:
    return like(x) if needed else x.new_empty(0)


def _cross_layer_fwd(x0: Tensor, x: Tensor, w: Tensor, b: Tensor | None, backend: str) -> Tensor:
    return empty_rows(x0)


def _cross_layer_bwd(
    dy: Tensor, x0: Tensor, x: Tensor, w: Tensor, needs: list[bool], backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dx0, dx = _needed(x0, needs[0], empty_rows), _needed(x, needs[1], empty_rows)
    return dx0, dx, _needed(w, needs[2]), _needed(w, needs[3])


def _cross_network_fwd(x0: Tensor, w: Tensor, b: Tensor | None, keep_p: bool, backend: str) -> tuple[Tensor, Tensor]:
    p = x0.new_empty((w.shape[0], x0.shape[0]) if keep_p else (0,), dtype=accumulation_dtype(x0, w, b))
    return empty_rows(x0), p


def _cross_network_bwd(
    dy: Tensor, x0: Tensor, w: Tensor, b: Tensor | None, p: Tensor, needs: list[bool], backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    return _needed(x0, needs[0], empty_rows), _needed(w, needs[1]), _needed(w if b is None else b, needs[2])


def _cross_logits_fwd(
    x0: Tensor, w: Tensor, b: Tensor | None, v: Tensor, keep_p: bool, backend: str
) -> tuple[Tensor, Tensor]:
    shape = (w.shape[0] + v.shape[0], x0.shape[0]) if keep_p else (0,)
    p = x0.new_empty(shape, dtype=accumulation_dtype(x0, w, b, v))
    return x0.new_empty((x0.shape[0], v.shape[0])), p


def _cross_logits_bwd(
    dz: Tensor, x0: Tensor, w: Tensor, b: Tensor | None, v: Tensor, p: Tensor, needs: list[bool], backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *_cross_network_bwd(dz, x0, w, b, p, needs, backend), _needed(v, needs[3])


_LIBRARY = torch.library.Library("fastcross", "DEF")
for _name, _schema in _SCHEMAS.items():
    _LIBRARY.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    _LIBRARY.impl(_name, _launch(_name), "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastcross::{_name}", globals()[f"_{_name}"], lib=_LIBRARY)
