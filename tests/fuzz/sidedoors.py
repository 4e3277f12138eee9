"""Autograd's and functorch's side doors: every door gives what it gives for the reference, in float64."""

import torch
from fuzz import doors_of_autograd, doors_of_functorch, draw  # noqa: F401  each adds its doors
from fuzz.doors import DOORS, compare

import fastcross
from fastcross import reference


def case(number, folder):
    rng = draw.start(number)
    name = "compiled" if rng.random() < 0.002 else rng.choice([each for each in DOORS if each != "compiled"])
    operator = rng.choice(("cross_layer", "cross_network", "cross_logits"))
    backend = rng.choice(("auto", "cpu", "torch"))
    rows, d, layers = rng.randint(1, 6), rng.randint(1, 9), rng.randint(1, 4)
    x = [torch.randn(rows, d, dtype=torch.float64) for _ in range(2 if operator == "cross_layer" else 1)]
    many = () if operator == "cross_layer" else (layers,)
    parameters = [torch.randn(*many, d, dtype=torch.float64) * d**-0.5 for _ in range(2)]
    if rng.random() < 0.2:
        parameters[1] = None
    head = [torch.randn(rng.randint(1, 3), d, dtype=torch.float64)] if operator == "cross_logits" else []
    operands = [*x, *parameters, *head]
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
