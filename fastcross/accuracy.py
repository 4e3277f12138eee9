"""The one rule by which a result counts as right, for the tests and for ``fastcross doctor``.

    err(ours, ref64) <= 2 · err(eager loop in the same dtype, ref64) + atol

where ref64 is ``fastcross.reference`` in float64 and err the largest absolute difference. The eager loop rounds to the
storage dtype after every operation; atol is a few units in the last place of the largest value, four unless said
otherwise: both errors are maxima of a handful of roundings (dot, recurrence, product, sum) of up to half a unit each,
and what one order of a sum loses another may win; in Triton's interpreter a store to bfloat16 truncates, which is a
whole unit. In float64 the eager loop is itself the reference, and atol alone counts: the few thousand roundings of the
longest sums.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastcross import ops, reference

UNITS, UNITS_IN_FLOAT64 = 4, 4096
# DCN-V2's layers sum over d or r in every layer, in orders of their own. A mixture's gate adds up differences of such
# sums: with sixteen units plain PyTorch was off by 1.21e-6 where 1.15e-6 were allowed.
UNITS_OF = {"cross_matrix": 16, "cross_low_rank": 16, "cross_mixture": 32, "cross_gated": 16, "cross_fcn": 16}


class Compared(NamedTuple):
    """A result beside the rule."""

    name: str
    error: float
    allowed: float

    @property
    def is_right(self) -> bool:
        return self.error <= self.allowed  # which NaN is not

    @property
    def share(self) -> float:
        """Of the allowed error; more than 1, or NaN, is wrong."""
        return self.error / self.allowed if self.error else 0.0

    def __str__(self) -> str:
        return f"{self.name}: error {self.error:.3g}, allowed {self.allowed:.3g}"


def allowed_error(eager: Tensor, exact: Tensor, units: int = UNITS) -> float:
    """What a result in the dtype of ``eager`` may differ by from ``exact``."""
    atol = (UNITS_IN_FLOAT64 if eager.dtype == torch.float64 else units) * torch.finfo(eager.dtype).eps
    return float(2 * (eager.double() - exact).abs().max() + atol * exact.abs().max())


def compare(ours: Tensor, eager: Tensor, exact: Tensor, name: str, units: int = UNITS) -> Compared:
    """The rule, for one result."""
    assert ours.shape == exact.shape, f"{name}: {tuple(ours.shape)}, not {tuple(exact.shape)}"
    if not exact.numel():
        return Compared(name, 0.0, 0.0)
    return Compared(name, float((ours.double() - exact).abs().max()), allowed_error(eager, exact, units))


def assert_as_good(ours: Tensor, eager: Tensor, exact: Tensor, name: str, units: int = UNITS) -> None:
    compared = compare(ours, eager, exact, name, units)
    assert compared.is_right, str(compared)


def evaluate(
    function: Callable[..., Tensor],
    tensors: Sequence[Tensor | None],
    dy: Tensor | Callable[[Tensor], Tensor] | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> list[Tensor]:
    """The output, and the gradients of all operands (None is left out), in ``dtype`` if given.

    ``dy`` is the incoming gradient, or a function from the output to it; ones if there is none.
    """
    leaves = [None if t is None else (t if dtype is None else t.to(dtype)).detach().requires_grad_() for t in tensors]
    y = function(*leaves, **options)
    g = torch.ones_like(y) if dy is None else dy.to(y.dtype) if isinstance(dy, Tensor) else dy(y)
    return [y.detach(), *torch.autograd.grad(y, [t for t in leaves if t is not None], g)]


def compare_with_eager(
    operator: str,
    ours: Sequence[Tensor],
    tensors: Sequence[Tensor | None],
    dy: Tensor | Callable[[Tensor], Tensor] | None = None,
    units: int | None = None,
    **options: Any,
) -> list[Compared]:
    """The rule, for the output and every gradient; each in the dtype of what it belongs to."""
    given = [t for t in tensors if t is not None]
    exact = evaluate(getattr(reference, operator), tensors, dy, torch.float64, **options)
    eager = evaluate(getattr(reference, operator), tensors, dy, given[0].dtype, **options)
    units = UNITS_OF.get(operator, UNITS) if units is None else units
    found = []
    for i, (o, e, x, t) in enumerate(zip(ours, eager, exact, (given[0], *given), strict=True)):
        assert o.dtype == t.dtype, f"result {i} of {operator}: {o.dtype}, not {t.dtype}"
        found.append(compare(o, e, x, f"result {i} of {operator}", units))
    return found


def assert_as_good_as_eager(
    operator: str,
    tensors: Sequence[Tensor | None],
    backend: str,
    dy: Tensor | Callable[[Tensor], Tensor] | None = None,
    units: int | None = None,
    **options: Any,
) -> list[Tensor]:
    """The operator on this backend, held to the rule; its output and gradients."""
    ours = evaluate(getattr(ops, operator), tensors, dy, backend=backend, **options)
    for compared in compare_with_eager(operator, ours, tensors, dy, units, **options):
        assert compared.is_right, str(compared)
    return ours
