"""Autograd's and functorch's side doors: every door gives what it gives for the reference, in float64."""

import torch
from fuzz import doors_of_autograd, doors_of_functorch, draw  # noqa: F401  each adds its doors
from fuzz.doors import DOORS, compare

import fastcross
from fastcross import reference
from fastcross.accuracy import BY_NAME, RANK_ONE


def case(number, folder):
    rng = draw.start(number)
    name = "compiled" if rng.random() < 0.002 else rng.choice([each for each in DOORS if each != "compiled"])
    operator = rng.choice(RANK_ONE)
    backend = rng.choice(("auto", "cpu", "torch"))
    known, d = BY_NAME[operator], rng.randint(1, 9)
    shapes = known.shapes(B=rng.randint(1, 6), d=d, L=rng.randint(1, 4), C=rng.randint(1, 3))
    scales = [1.0 if i < known.rows else d**-0.5 for i in range(len(shapes))]
    operands = [torch.randn(s, dtype=torch.float64) * scale for s, scale in zip(shapes, scales, strict=True)]
    if rng.random() < 0.2 and "b" in known.names:
        operands[known.names.index("b")] = None
    given = [t for t in operands if t is not None]
    calls = [
        _of_given(getattr(fastcross, operator), operands, backend=backend),
        _of_given(getattr(reference, operator), operands),
    ]
    state = rng.getstate()
    found = DOORS[name](rng, calls[0], [t.clone() for t in given])
    rng.setstate(state)
    expected = DOORS[name](rng, calls[1], [t.clone() for t in given])
    compare(name, found, expected)
    return name


def _of_given(function, operands, **options):
    """The operator as a function of the operands that are not None."""

    def call(*given):
        remaining = iter(given)
        return function(*(None if t is None else next(remaining) for t in operands), **options)

    return call
