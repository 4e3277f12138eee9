"""The one rule of the tests, for results whose terms may cancel.

    err(ours, ref64) <= 2 · err(eager loop in the same dtype, ref64) + atol

At random, results may be single numbers, sums may cancel to nothing, and the eager loop may be right by luck. So atol
is in units in the last place of what the roundings are relative to, the same expression with all signs positive; and
sixteen of them, a few roundings for each of the sums that a result goes through. In float64 the reference rounds as
we do, and its own error counts too: hundreds of units for its longest sums and its 33 layers.
"""

import torch

ULPS, ULPS_IN_FLOAT64 = 16, 512


def compare(found, eager, exact, magnitudes, names, dtypes=()):
    """Each result by the rule; raises for the first that breaks it. ``dtypes`` are those of the operands: what a sum in
    float32 rounded stays rounded in a float64 result."""
    for name, o, e, x, m in zip(names, found, eager, exact, magnitudes, strict=True):
        if x is None or o is None:
            if (x is None) != (o is None):
                raise AssertionError(
                    f"{name}: {'a gradient' if x is None else 'no gradient'} that is not the reference's"
                )
            continue
        if o.shape != x.shape:
            raise AssertionError(f"{name}: shape {tuple(o.shape)}, the reference's is {tuple(x.shape)}")
        if o.dtype != e.dtype:
            raise AssertionError(f"{name}: {o.dtype}, the eager loop's is {e.dtype}")
        if x.numel() == 0:
            continue
        error, allowed = (o.double() - x).abs().max(), 2 * (e.double() - x).abs().max()
        units = max(
            (ULPS_IN_FLOAT64 if dtype == torch.float64 else ULPS) * torch.finfo(dtype).eps
            for dtype in (o.dtype, *dtypes)
        )
        allowed = allowed + units * m.abs().max()
        if not error <= allowed and torch.isfinite(e).all():
            raise AssertionError(f"{name}: error {error:.3g}, allowed {allowed:.3g}")
