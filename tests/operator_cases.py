"""The operands of an operator of any sizes, by what fastcross/accuracy.py knows of it, for the tests of its kind."""

import math

import torch

from fastcross.accuracy import BY_NAME


def operands_of(operator, rows=4, d=5, layers=3, outputs=2, *, bias=True, dtype=torch.float64, seed=0, scale=None):
    """Drawn in float64: rows of unit variance, and weights that keep it; or everything of one scale.

    Without a bias, it is None.
    """
    known, generator = BY_NAME[operator], torch.Generator().manual_seed(seed)
    found = []
    for name, shape in zip(known.names, known.shapes(B=rows, d=d, L=layers, C=outputs), strict=True):
        usual = 1.0 if len(found) < known.rows else 0.3 if name == "b" else math.prod(shape) ** -0.5
        t = (torch.randn(shape, generator=generator, dtype=torch.float64) * (scale or usual)).to(dtype)
        found.append(t if bias or name != "b" else None)
    return found
