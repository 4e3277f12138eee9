"""The one rule by which a result counts as right.

    err(ours, ref64) <= 2 · err(eager loop in the same dtype, ref64) + atol

where ref64 is ``fastcross.reference`` in float64 and err the largest absolute difference. The eager loop rounds to the
storage dtype after every operation; atol is a few units in the last place of the largest value, four unless said
otherwise: both errors are maxima of a handful of roundings (dot, recurrence, product, sum) of up to half a unit each,
and what one order of a sum loses another may win; in Triton's interpreter a store to bfloat16 truncates, which is a
whole unit. In float64 the eager loop is itself the reference, and atol alone counts: the few thousand roundings of the
longest sums.
"""

import torch
from torch import Tensor

import fastcross
from fastcross import reference

UNITS, UNITS_IN_FLOAT64 = 4, 4096


def allowed_error(eager: Tensor, exact: Tensor, units: int = UNITS) -> float:
    """What a result in the dtype of ``eager`` may differ by from ``exact``."""
    atol = (UNITS_IN_FLOAT64 if eager.dtype == torch.float64 else units) * torch.finfo(eager.dtype).eps
    return float(2 * (eager.double() - exact).abs().max() + atol * exact.abs().max())


def assert_as_good(ours: Tensor, eager: Tensor, exact: Tensor, name: str, units: int = UNITS) -> None:
    """The rule, for one result."""
    assert ours.shape == exact.shape, f"{name}: {tuple(ours.shape)}, not {tuple(exact.shape)}"
    if exact.numel():
        error, allowed = float((ours.double() - exact).abs().max()), allowed_error(eager, exact, units)
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"  # which NaN is not


def evaluate(function, tensors, dy=None, dtype=None, **options):
    """The output, and the gradients of all operands (None is left out), in ``dtype`` if given.

    ``dy`` is the incoming gradient, or a function from the output to it; ones if there is none.
    """
    leaves = [None if t is None else (t if dtype is None else t.to(dtype)).detach().requires_grad_() for t in tensors]
    y = function(*leaves, **options)
    g = torch.ones_like(y) if dy is None else dy(y) if callable(dy) else dy.to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [t for t in leaves if t is not None], g)]


def assert_as_good_as_eager(operator, tensors, backend, dy=None, units=UNITS, **options):
    """The rule, for the output and every gradient; each in the dtype of what it belongs to."""
    exact = evaluate(getattr(reference, operator), tensors, dy, torch.float64, **options)
    eager = evaluate(getattr(reference, operator), tensors, dy, tensors[0].dtype, **options)
    ours = evaluate(getattr(fastcross, operator), tensors, dy, backend=backend, **options)
    dtypes = [tensors[0].dtype, *(t.dtype for t in tensors if t is not None)]
    for i, (o, e, x, dtype) in enumerate(zip(ours, eager, exact, dtypes, strict=True)):
        assert o.dtype == dtype, f"result {i} of {operator}: {o.dtype}, not {dtype}"
        assert_as_good(o, e, x, f"result {i} of {operator}", units)
    return ours
