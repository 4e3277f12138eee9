"""DCN-V2's layers, GDCN's and FCN's: L layers ``x_{l+1} = x0 ⊙ h(x_l) + x_l`` that differ only in h.

The GEMMs run in one dtype: float64 if an operand is float64, otherwise autocast's if it is on, otherwise that of x0.
Parameters and rows are cast to it, and the result to the dtype of x0.
"""

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from fastcross import reference
from fastcross.kernels import closed_form, layers_of_products
from fastcross.kernels.layout import empty_rows
from fastcross.ops import backends

Options = dict[str, Any]
ACTIVATIONS = (None, "relu", "tanh")
SMALL = 6_000_000  # multiplications in a layer: with fewer, C++ steps save less than their calls take


def cross_matrix(x0: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    """DCN-V2's cross network: ``x_{l+1} = x0 ⊙ (W_l x_l + b_l) + x_l``; returns ``x_L``.

    Args:
        x0: the network's input, (..., d).
        weight, bias: (L, d, d) and (L, d); the bias is optional.
        backend: as for :func:`cross_layer`.

    Returns:
        (..., d) in the dtype of ``x0``.
    """
    _check(x0, ("bias",), weight=(weight, ("L", "d", "d")), bias=(bias, ("L", "d")))
    return _run("cross_matrix", backend, x0, (weight, bias), {})


def cross_low_rank(
    x0: Tensor,
    u: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    diag_scale: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """DCN-V2, low rank: ``x_{l+1} = x0 ⊙ (f(U_l V_l x_l + b_l) + diag_scale x_l) + x_l``; returns ``x_L``.

    Args:
        x0: the network's input, (..., d).
        u, v, bias: (L, d, r), (L, r, d) and (L, d); the bias is optional.
        activation: f: None, "relu" or "tanh".
        diag_scale: factor of the identity that is added to U V, outside of f.
        backend: as for :func:`cross_layer`.

    Returns:
        (..., d) in the dtype of ``x0``.
    """
    check_activation(activation)
    _check(x0, ("bias",), u=(u, ("L", "d", "r")), v=(v, ("L", "r", "d")), bias=(bias, ("L", "d")))
    options = {"activation": activation, "diag_scale": diag_scale}
    return _run("cross_low_rank", backend, x0, (u, v, bias), options)


def cross_mixture(
    x0: Tensor,
    u: Tensor,
    c: Tensor,
    v: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
    gate_bias: Tensor | None = None,
    *,
    activation: str | None = "tanh",
    backend: str = "auto",
) -> Tensor:
    """DCN-V2, a mixture of K low-rank experts; returns ``x_L`` of

    ``x_{l+1} = x_l + Σ_k softmax_k(G x_l) x0 ⊙ (U_k f(C_k f(V_k x_l)) + b_l)``.

    Args:
        x0: the network's input, (..., d).
        u, c, v, bias: (L, K, d, r), (L, K, r, r), (L, K, r, d) and (L, d); the bias is optional.
        gate, gate_bias: (K, d) and (K,), shared by all layers, or (L, K, d) and (L, K). The bias is optional, and so is
            the gate of a single expert, whose softmax is 1.
        activation: f: None, "relu" or "tanh".
        backend: as for :func:`cross_layer`.

    Returns:
        (..., d) in the dtype of ``x0``.
    """
    check_activation(activation)
    of_gate = ("L", "K", "d") if isinstance(gate, Tensor) and gate.dim() == 3 else ("K", "d")
    _check(
        x0,
        ("bias", "gate", "gate_bias"),
        u=(u, ("L", "K", "d", "r")),
        c=(c, ("L", "K", "r", "r")),
        v=(v, ("L", "K", "r", "d")),
        bias=(bias, ("L", "d")),
        gate=(gate, of_gate),
        gate_bias=(gate_bias, of_gate[:-1]),
    )
    if gate is None and (u.shape[1] > 1 or gate_bias is not None):
        raise ValueError(f"gate may be left out for one expert without gate_bias only; got u {tuple(u.shape)}")
    return _run("cross_mixture", backend, x0, (u, c, v, bias, gate, gate_bias), {"activation": activation})


def cross_gated(
    x0: Tensor, weight: Tensor, gate: Tensor, bias: Tensor | None = None, *, backend: str = "auto"
) -> Tensor:
    """GDCN's gated cross network: ``x_{l+1} = x0 ⊙ (W_l x_l + b_l) ⊙ σ(G_l x_l) + x_l``; returns ``x_L``.

    Args:
        x0: the network's input, (..., d).
        weight, gate, bias: (L, d, d), (L, d, d) and (L, d); the bias is optional.
        backend: as for :func:`cross_layer`.

    Returns:
        (..., d) in the dtype of ``x0``.
    """
    square = ("L", "d", "d")
    _check(x0, ("bias",), weight=(weight, square), gate=(gate, square), bias=(bias, ("L", "d")))
    return _run("cross_gated", backend, x0, (weight, gate, bias), {})


def cross_fcn(
    x0: Tensor,
    weight: Tensor,
    bias: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    *,
    exponential: bool = False,
    eps: float = 1e-5,
    backend: str = "auto",
) -> Tensor:
    """FCN's cross network (earlier DCNv3); returns ``x_L`` of ``x_{l+1} = x0 ⊙ ([h, h ⊙ m] + b_l) + x_l``

    with ``h = W_l x_l``, d/2 numbers, and ``m = relu(LayerNorm(h))``.

    Args:
        x0: the network's input, (..., d), d even. FCN puts the first halves of all embeddings first.
        weight, bias: (L, d/2, d) and (L, d).
        norm_weight, norm_bias, eps: of the LayerNorm, (L, d/2) each.
        exponential: use ``x_l`` instead of ``x0`` as the first factor; the degree then doubles with each layer.
        backend: as for :func:`cross_layer`.

    Returns:
        (..., d) in the dtype of ``x0``.
    """
    _check(
        x0,
        weight=(weight, ("L", "d/2", "d")),
        bias=(bias, ("L", "d")),
        norm_weight=(norm_weight, ("L", "d/2")),
        norm_bias=(norm_bias, ("L", "d/2")),
    )
    options = {"exponential": exponential, "eps": eps}
    return _run("cross_fcn", backend, x0, (weight, bias, norm_weight, norm_bias), options)


def _check(x0: Tensor, optional: Collection[str] = (), **parameters: tuple[Tensor | None, tuple[str, ...]]) -> None:
    """Checks each parameter against the names of its dimensions. Dimensions of the same name have the same size.

    d is x0's number of features. The other sizes are those of the first parameter that has them.
    """
    backends.check_x0(x0)
    d = x0.shape[-1]
    found = {"d": (d, "x0", x0), "d/2": (d // 2, "x0", x0)}
    for name, (t, names) in parameters.items():
        if t is None and name in optional:
            continue
        if t is None:
            raise TypeError(f"{name} is missing; x0 {tuple(x0.shape)} needs a {name} {backends.form(names)}")
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} must be a tensor; got {type(t).__name__} and x0 {tuple(x0.shape)}")
        if t.dim() != len(names) or 0 in t.shape:
            raise ValueError(
                f"{name} must be {backends.form(names)} with d = {d}, none of them 0; "
                f"got {name} {tuple(t.shape)} and x0 {tuple(x0.shape)}"
            )
        if "d/2" in names and d % 2:
            raise ValueError(
                f"x0 must have an even number of features; got x0 {tuple(x0.shape)} and {name} {tuple(t.shape)}"
            )
        for size, dimension in zip(t.shape, names, strict=True):
            expected, owner, of = found.setdefault(dimension, (size, name, t))
            if size != expected:
                raise ValueError(
                    f"{name} must be {backends.form(names)} with {dimension} = {expected}; "
                    f"got {name} {tuple(t.shape)} and {owner} {tuple(of.shape)}"
                )
        backends.check_kind(name, t, x0)


def check_activation(activation: str | None) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(map(repr, ACTIVATIONS))}; got {activation!r}")


def _run(name: str, backend: str, x0: Tensor, parameters: tuple[Tensor | None, ...], options: Options) -> Tensor:
    """Run the operator ``name`` on the chosen backend, in one dtype."""
    chosen = backends.choose(backend, x0, *parameters)
    if chosen == "reference":
        return getattr(reference, name)(x0, *parameters, **options)
    dtype = _dtype_of_gemms(chosen, x0, *parameters)
    if chosen == "triton" and dtype == torch.float64:
        if backend == "triton":
            raise ValueError(f'backend "triton" runs {name} in float32, bfloat16 and float16; got {dtype}')
        chosen = "torch"
    multiplications = sum(t[0].numel() for t in parameters if t is not None and t.dim() > 2)
    if backend == "auto" and chosen == "cpu" and not gains_by_steps(dtype, x0.shape[:-1].numel(), multiplications):
        chosen = "torch"
    cast = [None if t is None else t.to(dtype) for t in parameters]
    with closed_form.without_autocast(x0):
        if chosen == "torch":
            return getattr(closed_form, name)(x0.to(dtype), *cast, **options).to(x0.dtype)
        operands = backends.as_rows(x0.to(dtype)), *cast
        if backends.differentiates(*operands):
            y = MultiplicativeFunction.apply(name, chosen, tuple(options.items()), *operands)
        else:
            y, _ = backends.kernel(f"{name}_fwd", chosen, x0)(*operands, *options.values(), False)
        return y.to(x0.dtype).view(x0.shape)


def gains_by_steps(dtype: torch.dtype, rows: int, multiplications: int) -> bool:
    """Whether GEMMs with C++ steps between them are faster than plain PyTorch, given a layer's multiplications per row.

    In bfloat16 they are not (low rank 1.03, mixture 1.15 times as long), although they keep less.
    """
    # A compiled graph has one operator for any number of rows.
    return dtype != torch.bfloat16 and (torch.compiler.is_compiling() or rows * multiplications >= SMALL)


def _dtype_of_gemms(backend: str, x0: Tensor, *parameters: Tensor | None) -> torch.dtype:
    if any(t is not None and t.dtype == torch.float64 for t in (x0, *parameters)):
        return torch.float64
    kind = x0.device.type
    autocast = kind != "meta" and torch.is_autocast_enabled(kind)  # meta has no autocast
    dtype = torch.get_autocast_dtype(kind) if autocast else x0.dtype
    # On a CPU float16 arithmetic is not faster than float32's.
    return torch.float32 if backend == "cpu" and dtype == torch.float16 else dtype


class MultiplicativeFunction(torch.autograd.Function):
    """(x0, parameters) -> y of the operator ``name``; saves the tensors that its forward pass returns for this."""

    @staticmethod
    def forward(ctx: Any, name: str, backend: str, options: tuple, x0: Tensor, *parameters: Tensor | None) -> Tensor:
        values = (value for _, value in options)
        y, kept = backends.kernel(f"{name}_fwd", backend, x0)(x0, *parameters, *values, True)
        ctx.save_for_backward(x0, *parameters, *kept)
        ctx.name, ctx.backend, ctx.options, ctx.count = name, backend, options, 1 + len(parameters)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        operands, kept = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        options, needs = dict(ctx.options), ctx.needs_input_grad[3:]
        if backends.is_differentiated():
            function = functools.partial(getattr(closed_form, ctx.name), **options)
            return None, None, None, *backends.closed_form_vjp(function, operands, dy)
        kernel = backends.kernel(f"{ctx.name}_bwd", ctx.backend, dy)
        grads = kernel(backends.as_rows(dy), *operands, *options.values(), kept, needs)
        return None, None, None, *backends.needed_only(tuple(grads), needs)


def _define(name: str, triton: str, kind: type, operands: str, options: str, width: Callable[..., int]) -> None:
    """fastcross::NAME_fwd and _bwd. Kept are ``width(operands)`` numbers for each row and layer, if ``keep``."""
    arguments = f"{operands}, {options}" if options else operands
    count = operands.count("Tensor")

    def fake_fwd(*args: Any) -> tuple[Tensor, list[Tensor]]:
        (x0, *parameters), keep = args[:count], args[-1]
        kept = [x0.new_empty(parameters[0].shape[0], x0.shape[0], width(*parameters))] if keep else []
        return empty_rows(backends.as_rows(x0)), kept

    def fake_bwd(dy: Tensor, *args: Any) -> list[Tensor]:
        (x0, *parameters), needs = args[:count], args[-1]
        dx0 = empty_rows(backends.as_rows(x0)) if needs[0] else x0.new_empty(0)
        given = zip(parameters, needs[1:], strict=True)
        return [dx0, *(x0.new_empty(t.shape if t is not None and need else 0) for t, need in given)]

    forward = f"({arguments}, bool keep) -> (Tensor y, Tensor[] kept)"
    backward = f"(Tensor dy, {arguments}, Tensor[] kept, bool[] needs) -> Tensor[]"
    backends.define(f"{name}_fwd", forward, fake_fwd, triton, functools.partial(layers_of_products.forward, kind))
    backends.define(f"{name}_bwd", backward, fake_bwd, triton, functools.partial(layers_of_products.backward, kind))


_define(
    "cross_matrix",
    "cross_matrix",
    layers_of_products.Matrix,
    "Tensor x0, Tensor w, Tensor? b",
    "",
    lambda w, b: w.shape[1],
)
_define(
    "cross_low_rank",
    "cross_low_rank",
    layers_of_products.LowRank,
    "Tensor x0, Tensor u, Tensor v, Tensor? b",
    "str? activation, float diag_scale",
    lambda u, v, b: v.shape[1],
)
_define(
    "cross_mixture",
    "multiplicative",
    layers_of_products.Mixture,
    "Tensor x0, Tensor u, Tensor c, Tensor v, Tensor? b, Tensor? gate, Tensor? gate_bias",
    "str? activation",
    lambda u, c, v, b, gate, gate_bias: v.shape[1] * (v.shape[2] + (gate is not None)),
)
_define(
    "cross_gated",
    "cross_matrix",
    layers_of_products.Gated,
    "Tensor x0, Tensor w, Tensor g, Tensor? b",
    "",
    lambda w, g, b: w.shape[1] * (1 if w.device.type == "cuda" else 2),
)
_define(
    "cross_fcn",
    "multiplicative",
    layers_of_products.Fcn,
    "Tensor x0, Tensor w, Tensor b, Tensor norm_w, Tensor norm_b",
    "bool exponential, float eps",
    lambda w, b, norm_w, norm_b: w.shape[1],
)

# The steps between the GEMMs: kernels/layers_of_products.py calls them. Sums over rows are added to.
backends.define(
    "product_fwd",
    "(Tensor x0, Tensor u, Tensor? b, Tensor x, str f, float diag, Tensor(a!) y) -> ()",
)
backends.define(
    "product_bwd",
    """(Tensor(a!) g, Tensor x0, Tensor u, Tensor? b, Tensor x, str f, float diag, Tensor(b!) du, Tensor(c!)? dx0,
    Tensor(d!)? db, bool first, bool last) -> ()""",
)
backends.define("gated_fwd", "(Tensor x0, Tensor ut, Tensor? b, Tensor x, Tensor(a!) y) -> ()")
backends.define(
    "gated_bwd",
    """(Tensor g, Tensor x0, Tensor ut, Tensor? b, Tensor(a!) dut, Tensor(b!)? dx0, Tensor(c!)? db, bool first,
    bool last) -> ()""",
)
backends.define("activate_fwd", "(Tensor a, str f, Tensor(a!) e) -> ()")
backends.define("activate_bwd", "(Tensor de, Tensor e, str f, Tensor(a!) da) -> ()")
backends.define("experts_fwd", "(Tensor(a!) h, Tensor? logits, Tensor? gate_bias, str f, Tensor(b!) q) -> ()")
backends.define(
    "experts_bwd",
    "(Tensor dq, Tensor h, Tensor? logits, Tensor? gate_bias, str f, Tensor(a!) dh, Tensor(b!)? dlogits) -> ()",
)
backends.define(
    "fcn_fwd",
    """(Tensor x0, Tensor h, Tensor b, Tensor norm_w, Tensor norm_b, Tensor x, bool exponential, float eps,
    Tensor(a!) y) -> ()""",
)
backends.define(
    "fcn_bwd",
    """(Tensor(a!) g, Tensor x0, Tensor h, Tensor b, Tensor norm_w, Tensor norm_b, Tensor x, bool exponential,
    float eps, Tensor(b!) dh, Tensor(c!)? dx0, Tensor(d!) sums, bool first, bool last) -> ()""",
)
