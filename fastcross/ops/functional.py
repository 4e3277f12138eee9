"""The three operators: validate, flatten to rows, choose a backend."""

import importlib.util
import os

import torch
from torch import Tensor

from fastcross import reference
from fastcross.kernels import closed_form
from fastcross.kernels.rows import as_rows
from fastcross.ops import autograd
from fastcross.ops import library as ops

FEW_ELEMENTS = 1 << 17
BACKENDS = ("auto", "triton", "numba", "torch", "reference")


def cross_layer(x0: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    """One cross layer (eq. 3): ``y = x0 (xᵀ w) + b + x``, for each row; the d×d matrix ``x0 xᵀ`` is never formed.

    Args:
        x0: the network's input, (..., d).
        x: the previous layer's output, shaped like ``x0``.
        weight, bias: (d,) each; the bias may be left out.
        backend: "auto" takes Triton on a GPU, the fused CPU kernels on a CPU and PyTorch's own operators elsewhere;
            "triton", "numba", "torch" (closed form) and "reference" (the paper, literally) ask for one.

    Returns:
        (..., d) in the dtype of ``x0``. Sums run in float32 for half precision, under autocast too.
    """
    _check("weight", weight, x0, dim=1)
    _check("bias", bias, x0, dim=1)
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor like x0; got {type(x).__name__} and x0 {tuple(x0.shape)}")
    if x.shape != x0.shape:
        raise ValueError(f"x must have the shape of x0; got x {tuple(x.shape)} and x0 {tuple(x0.shape)}")
    _check_kind("x", x, x0)
    if x.dtype != x0.dtype:
        raise TypeError(f"x must have the dtype of x0; got x {x.dtype} and x0 {x0.dtype}")
    backend = _resolve(backend, x0)
    if backend in _PLAIN:
        return _PLAIN[backend].cross_layer(x0, x, weight, bias)
    rows, x_rows = as_rows(x0), as_rows(x)
    if _differentiates(x0, x, weight, bias):
        y = autograd.apply(autograd.CrossLayerFunction, rows, x_rows, weight, bias, backend)
    else:
        y = ops.call("cross_layer_fwd", rows, x_rows, weight, bias, backend)
    return y if y.shape == x0.shape else y.view(x0.shape)


def cross_network(x0: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    """L cross layers: ``x_{l+1} = x0 (x_lᵀ w_l) + b_l + x_l``; returns ``x_L``, in one pass over ``x0`` whatever L is.

    Args:
        x0: the network's input, (..., d).
        weight, bias: (L, d) each; the bias may be left out.
        backend: as for :func:`cross_layer`.

    Returns:
        (..., d) in the dtype of ``x0``.
    """
    if not _agree(x0, weight, bias):
        _check("weight", weight, x0, dim=2)
        _check("bias", bias, x0, dim=2, rows=weight.shape[0], rows_of="weight")
    elif backend == "auto" and _is_little_work(x0, weight.shape[0]):
        assert bias is not None
        return closed_form.single_layer(x0, weight, bias)
    backend = _resolve(backend, x0)
    if backend in _PLAIN:
        return _PLAIN[backend].cross_network(x0, weight, bias)
    rows = as_rows(x0)
    if _differentiates(x0, weight, bias):
        y, _ = autograd.apply(autograd.CrossNetworkFunction, rows, weight, bias, backend)
    else:
        y, _ = ops.call("cross_network_fwd", rows, weight, bias, False, backend)
    return y if y.shape == x0.shape else y.view(x0.shape)


def cross_logits(x0: Tensor, weight: Tensor, bias: Tensor | None, head: Tensor, *, backend: str = "auto") -> Tensor:
    """The cross network's part of the combination layer (eq. 5): ``z = x_L Vᵀ``; ``x_L`` itself is never written.

    Args:
        x0: the network's input, (..., d).
        weight, bias: (L, d) each; the bias may be None.
        head: V, the logits layer's weights on the cross output, (C, d).
        backend: as for :func:`cross_layer`.

    Returns:
        (..., C) in the dtype of ``x0``.
    """
    _check("weight", weight, x0, dim=2)
    _check("bias", bias, x0, dim=2, rows=weight.shape[0], rows_of="weight")
    _check("head", head, x0, dim=2)
    backend = _resolve(backend, x0)
    if backend in _PLAIN:
        return _PLAIN[backend].cross_logits(x0, weight, bias, head)
    rows = as_rows(x0)
    if _differentiates(x0, weight, bias, head):
        z, _ = autograd.apply(autograd.CrossLogitsFunction, rows, weight, bias, head, backend)
    else:
        z, _ = ops.call("cross_logits_fwd", rows, weight, bias, head, False, backend)
    return z if x0.dim() == 2 else z.view(*x0.shape[:-1], head.shape[0])


_PLAIN = {"torch": closed_form, "reference": reference}


def _check(name: str, t: Tensor | None, x0: Tensor, *, dim: int, rows: int | None = None, rows_of: str = "") -> None:
    """A parameter has ``dim`` dimensions, x0's feature count last, and as many rows as the parameter ``rows_of``."""
    if not isinstance(x0, Tensor) or x0.dim() < 1:
        raise TypeError(f"x0 must be a tensor (..., d); got {_describe(x0)}")
    if t is None:
        if name == "bias":
            return
        raise TypeError(f"{name} is missing; x0 {tuple(x0.shape)} needs a {dim}-dimensional {name}")
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(t).__name__} and x0 {tuple(x0.shape)}")
    expected = "(d,)" if dim == 1 else "(L, d)" if name != "head" else "(C, d)"
    if t.dim() != dim or t.shape[-1] != x0.shape[-1] or t.numel() == 0:
        raise ValueError(
            f"{name} must be {expected} with d = {x0.shape[-1]}, none of them 0; "
            f"got {name} {tuple(t.shape)} and x0 {tuple(x0.shape)}"
        )
    if rows is not None and t.shape[0] != rows:
        raise ValueError(
            f"{name} must have one row per layer; got {name} {tuple(t.shape)} and {rows} rows of {rows_of}"
        )
    _check_kind(name, t, x0)


def _check_kind(name: str, t: Tensor, x0: Tensor) -> None:
    if not (t.is_floating_point() and x0.is_floating_point()):
        raise TypeError(f"{name} and x0 must be floating point; got {name} {t.dtype} and x0 {x0.dtype}")
    if t.device != x0.device:
        raise ValueError(f"{name} must be on the device of x0; got {name} on {t.device} and x0 on {x0.device}")


def _describe(value: object) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _agree(x0: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a network's operands are as usual: asked in a hurry, before the checks that say what is wrong."""
    return (
        isinstance(x0, Tensor)
        and isinstance(weight, Tensor)
        and isinstance(bias, Tensor)
        and weight.dim() == 2
        and weight.shape == bias.shape
        and x0.shape[-1:] == weight.shape[1:]
        and x0.dtype == weight.dtype == bias.dtype
        and x0.device == weight.device == bias.device
        and x0.is_floating_point()
        and weight.numel() > 0
    )


def _is_little_work(x0: Tensor, layers: int) -> bool:
    """Whether this is a single layer of so few elements that PyTorch's own operators are done sooner."""
    return (
        layers == 1
        and x0.dim() > 1
        and x0.dtype in _CPU_DTYPES
        and x0.device.type == "cpu"
        and not torch.compiler.is_compiling()  # where a batch of another size would be compiled anew
        and not torch.is_autocast_enabled("cpu")
        and 0 < x0.numel() <= FEW_ELEMENTS
    )


def _resolve(backend: str, x0: Tensor) -> str:
    """The backend that will run; asking for one that cannot run here raises, and says why."""
    device = x0.device.type
    if backend in ("auto", "triton", "numba"):
        if torch.compiler.is_exporting():
            return "torch"  # what is exported runs where fastcross is not installed
        if torch.autograd.forward_ad._current_level >= 0:
            return "torch"  # PyTorch's own operators carry tangents along
    if backend == "auto":
        if device == "cuda" and _INSTALLED["triton"] and x0.dtype != torch.float64:
            return "triton"
        return "numba" if device == "cpu" and x0.dtype in _CPU_DTYPES and _INSTALLED["numba"] else "torch"
    if backend in _PLAIN:
        return backend
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}")
    if not _INSTALLED[backend]:
        raise ValueError(f'backend "{backend}" needs the package {backend}, which is not installed; x0 is on {device}')
    if backend == "numba" and (device != "cpu" or x0.dtype not in _CPU_DTYPES):
        kinds = ", ".join(str(dtype) for dtype in _CPU_DTYPES)
        raise ValueError(f'backend "numba" runs {kinds} on cpu; got x0 {x0.dtype} on {device}')
    if backend == "triton" and device == "cpu" and not _interpreting():
        raise ValueError('backend "triton" needs x0 on a GPU (or TRITON_INTERPRET=1); got x0 on cpu')
    return backend


_CPU_DTYPES = (torch.float32, torch.float64)


_INSTALLED = {package: importlib.util.find_spec(package) is not None for package in ("triton", "numba")}


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET", "") not in ("", "0")


def _differentiates(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
