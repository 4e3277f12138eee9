"""L cross layers, ``x_{l+1} = x0 (x_lᵀ w_l) + b_l + x_l``, in one pass over x0 whatever L is.

The forward pass keeps p, the dots x0·w_l: L scalars per row beside its inputs. Where a gradient is itself
differentiated, and under vmap over parameters, the closed form takes over: PyTorch can transform it freely.
"""

from typing import Any

import torch
from torch import Tensor

from fastcross import reference
from fastcross.kernels import closed_form
from fastcross.kernels.rows import accumulation_dtype, as_rows, empty_rows
from fastcross.ops import backends, checks, dispatch, internals

# Up to so many elements a single layer takes less time in PyTorch's own operators.
FEW_ELEMENTS = 1 << 17


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
        checks.check_network(x0, weight, bias)
    elif backend == "auto" and _is_little_work(x0, weight.shape[0]):
        assert bias is not None
        return closed_form.single_layer(x0, weight, bias)
    backend = backends.choose(backend, x0.device, x0.dtype)
    if backend == "torch":
        return closed_form.cross_network(x0, weight, bias)
    if backend == "reference":
        return reference.cross_network(x0, weight, bias)
    rows = as_rows(x0)
    if dispatch.differentiates(x0, weight, bias):
        y, _ = internals.apply(CrossNetworkFunction, rows, weight, bias, backend)
    else:
        y, _ = cross_network_fwd(rows, weight, bias, False, backend)
    return y if y.shape == x0.shape else y.view(x0.shape)


class CrossNetworkFunction(torch.autograd.Function):
    """(x0, w, b) -> y and the kept p."""

    @staticmethod
    def forward(x0: Tensor, w: Tensor, b: Tensor | None, backend: str) -> tuple[Tensor, Tensor]:
        return cross_network_fwd(x0, w, b, True, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        x0, w, b, ctx.backend = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x0, w, b, output[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        x0, w, b, p = ctx.saved_tensors
        if dy is None:
            return (None,) * 4
        if torch.is_grad_enabled():
            return *dispatch.closed_form_vjp(closed_form.cross_network, (x0, w, b), dy), None
        needs = ctx.needs_input_grad[:3]
        grads = cross_network_bwd(dispatch.rows_of_gradient(dy), x0, w, b, p, needs, ctx.backend)
        return *dispatch.needed_only(grads, needs), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x0: Tensor, w: Tensor, b: Tensor | None, backend: str) -> tuple:
        if in_dims[1] is None and in_dims[2] is None:
            x0 = dispatch.batch_first(x0, in_dims[0], info.batch_size)
            y, p = internals.apply(CrossNetworkFunction, x0.flatten(0, 1), w, b, backend)
            return (y.view(x0.shape), p.unflatten(1, x0.shape[:2])), (0, 1)
        y = torch.vmap(closed_form.cross_network, in_dims[:3])(x0, w, b)
        return (y, y.new_empty(0)), (0, None)


def _fake_fwd(x0: Tensor, w: Tensor, b: Tensor | None, keep_p: bool, backend: str) -> tuple[Tensor, Tensor]:
    p = x0.new_empty((w.shape[0], x0.shape[0]) if keep_p else (0,), dtype=accumulation_dtype(x0, w, b))
    return empty_rows(x0), p


def _fake_bwd(
    dy: Tensor, x0: Tensor, w: Tensor, b: Tensor | None, p: Tensor, needs: list[bool], backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    dx0 = empty_rows(x0) if needs[0] else x0.new_empty(0)
    return dx0, dispatch.empty_unless(needs[1], w), dispatch.empty_unless(needs[2], w if b is None else b)


# p is all that the forward pass keeps: one row per layer, in the accumulation dtype; empty unless ``keep_p``.
cross_network_fwd = dispatch.define(
    "cross_network",
    "cross_network_fwd",
    "(Tensor x0, Tensor w, Tensor? b, bool keep_p, str backend) -> (Tensor y, Tensor p)",
    _fake_fwd,
)
cross_network_bwd = dispatch.define(
    "cross_network",
    "cross_network_bwd",
    "(Tensor dy, Tensor x0, Tensor w, Tensor? b, Tensor p, bool[] needs, str backend)"
    " -> (Tensor dx0, Tensor dw, Tensor db)",
    _fake_bwd,
)


def _agree(x0: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the operands need no further check: the usual case, without the checks that say what is wrong."""
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
        and x0.dtype in (torch.float32, torch.float64)
        and x0.device.type == "cpu"
        and not torch.compiler.is_compiling()  # where a batch of another size would be compiled anew
        and not torch.is_autocast_enabled("cpu")
        and 0 < x0.numel() <= FEW_ELEMENTS
    )
