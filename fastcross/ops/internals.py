"""Every private interface of PyTorch that the operators use, each with a fallback for when it is gone.

They all answer one of two questions faster than a public interface could: may the kernels be called directly, and may
an autograd Function be applied without the machinery of functorch? The fallback is always the cautious answer, which is
right everywhere and slower. They are looked up once, at import.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _find(path: str, fallback: Callable[..., Any]) -> Callable[..., Any]:
    """The function at ``path`` under torch, or the fallback."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return fallback if found is None else found


def _cautious(*_: object) -> bool:
    return True


transforms_are_active = _find("_C._are_functorch_transforms_active", _cautious)
_is_wrapped = _find("_C._functorch.is_functorch_wrapped_tensor", _cautious)
_dispatch_modes = _find("_C._len_torch_dispatch_stack", _cautious)
_is_zero_tensor = _find("Tensor._is_zerotensor", _cautious)
_apply_base = _find("_C._FunctionBase.apply", _cautious)


def tangents_are_tracked() -> bool:
    """Whether a level of forward-mode differentiation is open."""
    return getattr(torch.autograd.forward_ad, "_current_level", 0) >= 0


def is_profiling() -> bool:
    return getattr(torch.autograd.profiler, "_is_profiler_enabled", True)


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply`` without its ``inspect.signature``, which takes longer than a small kernel."""
    if (
        _apply_base is _cautious
        or torch.compiler.is_compiling()
        or transforms_are_active()
        or any(isinstance(t, Tensor) and _is_wrapped(t) for t in args)
    ):
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def is_transformed() -> bool:
    """Whether operators are exported, traced or transformed by functorch now, who know PyTorch's own only."""
    return (
        torch.compiler.is_exporting()
        or torch.jit.is_tracing()
        or (not torch.compiler.is_compiling() and (transforms_are_active() or tangents_are_tracked()))
    )


def may_call_kernels(args: tuple[Any, ...]) -> bool:
    """Whether an operator may be skipped for its kernel: nothing observes or transforms PyTorch's operators now."""
    return not (
        torch.compiler.is_compiling()
        or _dispatch_modes()
        or transforms_are_active()
        or torch.jit.is_tracing()
        or is_profiling()
        or not all(_is_plain(t) for t in args if isinstance(t, Tensor))
        or not all(_is_plain(t) for each in args if isinstance(each, list) for t in each if isinstance(t, Tensor))
    )


def _is_plain(t: Tensor) -> bool:
    """Whether its memory holds its values: no subclass, nothing that PyTorch resolves on the way to an operator."""
    return type(t) in (Tensor, torch.nn.Parameter) and not t.is_neg() and not _is_zero_tensor(t) and not _is_wrapped(t)
