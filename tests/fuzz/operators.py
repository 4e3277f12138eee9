"""The operators with random shapes, dtypes, strides and backends, output and every gradient, against the reference."""

import functools
import math

import multiplicative_cases
import torch
from fuzz import draw, rule
from multiplicative_cases import CASES

import fastcross
from fastcross import reference
from fastcross.accuracy import BY_NAME, RANK_ONE
from fastcross.kernels import layers_of_products

layers_of_products.CHUNK = 1  # the least: 256 rows for each thread
OPERATORS = (*RANK_ONE, *CASES)


def case(number, folder):
    rng = draw.start(number)
    if rng.random() < 0.05:
        return invalid(rng) if rng.random() < 0.5 else invalid_products(rng)
    name, dtype = rng.choice(OPERATORS), draw.dtype(rng)
    operands = draw_operands(rng, name, dtype) if name in RANK_ONE else draw_products(rng, CASES[name], dtype)
    backends = ("auto", "cpu", "torch") if dtype in (torch.float32, torch.float64) else ("auto", "torch")
    same = len({operand.base.dtype for operand in operands if operand is not None}) == 1
    backend = rng.choice((*backends, *backends, *(("reference",) if same else ())))
    with torch.random.fork_rng():
        fill = rng.random() < 0.5  # what a kernel forgets to write shows as NaN
        torch.use_deterministic_algorithms(fill)
        try:
            check(rng, name, operands, backend)
        finally:
            torch.use_deterministic_algorithms(False)
    return f"{name} {backend}"


def draw_operands(rng, name, dtype):
    """Each with a layout, a dtype and a need of a gradient of its own."""
    lead, d = draw.leading(rng), draw.features(rng)
    if rng.random() < 0.01:
        lead, d = (rng.randint(500, 3000),), rng.choice((429, 1000, 1026))
    known, layers = BY_NAME[name], rng.choice((1, 1, 2, 3, rng.randint(1, 9), rng.randint(1, 33)))
    shapes = known.shapes(B=0, d=d, L=layers, C=rng.choice((1, 2, rng.randint(1, 20))))
    operands = [draw.Operand(rng, (*lead, d), dtype) for _ in range(known.rows)]
    for operand, shape in list(zip(known.names, shapes, strict=True))[known.rows :]:
        kind = dtype if rng.random() < 0.8 else draw.dtype(rng)
        scale = 0.3 if operand == "b" else math.prod(shape) ** -0.5
        missing = operand == "b" and rng.random() < 0.3
        operands.append(None if missing else draw.Operand(rng, shape, kind, scale))
    return operands


def draw_products(rng, case, dtype):
    """The operands of one of DCN-V2's layers; in float64 where a rounding may take them across the edge of a relu."""
    if case.operator == "cross_fcn" or case.options.get("activation") == "relu":
        dtype = torch.float64
    lead, d = draw.leading(rng), draw.features(rng)
    if rng.random() < 0.02:  # more than one chunk
        lead, d = (rng.randint(257, 900),), rng.randint(1, 70)
    if case.operator == "cross_fcn":
        d = max(6, d + d % 2)
    layers, rank = rng.choice((1, 2, 3, rng.randint(1, 5))), rng.randint(1, 20)
    sizes = {"L": layers, "K": rng.randint(1, 5), "d": d, "r": rank, "h": d // 2, "1": 1}
    operands = [draw.Operand(rng, (*lead, d), dtype)]
    for letters in case.shapes[1:]:
        shape = letters and tuple(sizes[letter] for letter in letters)
        scale = (sizes["d"] * layers) ** -0.5 if letters and letters[-1] in "dr" else 0.3
        kind = dtype if rng.random() < 0.8 or dtype == torch.float64 else rng.choice((torch.float32, torch.float64))
        operands.append(None if letters is None else draw.Operand(rng, shape, kind, scale))
    return operands


def function(of, name, **others):
    """The operator or its reference, with the options of the case; ``others`` replace some."""
    if name not in CASES:
        return getattr(of, name)
    return functools.partial(getattr(of, CASES[name].operator), **CASES[name].options | others)


def check(rng, name, operands, backend):
    given = [operand for operand in operands if operand is not None]
    leaves = [operand.leaf() for operand in given]
    before = [leaf.detach().clone() for leaf in leaves]
    mode = rng.choices((torch.enable_grad, torch.no_grad, torch.inference_mode), (8, 1, 1))[0]
    with mode():
        y = function(fastcross, name)(*views(operands, leaves), backend=backend)
    dy = draw.cotangent(rng, y)
    differentiable = mode is torch.enable_grad and any(operand.needs_grad for operand in given)
    if y.requires_grad != differentiable:
        raise AssertionError(f"requires_grad is {y.requires_grad}, and should be {differentiable}")
    again = rng.random() < 0.2
    found = [y.detach(), *gradients(y, leaves, dy, retain=again)] if differentiable else [y.detach()]
    if again and differentiable:
        repeated = gradients(y, leaves, dy)
        if not all(a is b is None or torch.equal(a, b) for a, b in zip(found[1:], repeated, strict=True)):
            raise AssertionError("a second backward pass gives other bits")
    for leaf, kept in zip(leaves, before, strict=True):
        if not torch.equal(leaf.detach(), kept):
            raise AssertionError("an operand was written to")
    dtype = given[0].base.dtype
    eager = results(function(reference, name), operands, lambda base: base, dy, differentiable, dtype)
    exact = results(function(reference, name), operands, lambda base: base.double(), dy.double(), differentiable)
    size = magnitudes(name, operands, dy, differentiable, exact)
    names = ["y", *(f"gradient {i}" for i in range(len(given)))][: len(found)]
    rule.compare(found, eager, exact, size, names, [dtype] if name in CASES else [])


def views(operands, leaves):
    """The operands as views of these leaves, None where there is none."""
    remaining = iter(leaves)
    return [None if operand is None else operand.view(next(remaining)) for operand in operands]


def gradients(y, leaves, dy, retain=False):
    needed = [leaf for leaf in leaves if leaf.requires_grad]
    found = iter(torch.autograd.grad(y, needed, dy, retain_graph=retain))
    return [next(found) if leaf.requires_grad else None for leaf in leaves]


def results(f, operands, convert, dy, differentiable, compute=None):
    """A reference's output and gradients, of converted bases; parameters are cast to ``compute`` on the way."""
    given = [operand for operand in operands if operand is not None]
    leaves = [convert(operand.base.detach()).clone().requires_grad_(operand.needs_grad) for operand in given]
    tensors = views(operands, leaves)
    if compute is not None:
        tensors = [None if t is None else t.to(compute) for t in tensors]
    y = f(*tensors)
    return [y.detach(), *gradients(y, leaves, dy)] if differentiable else [y.detach()]


def magnitudes(name, operands, dy, differentiable, exact):
    """What the roundings of each result are relative to: the same expression with all signs positive.

    A softmax of other signs is another softmax, and a tanh or a gate of larger numbers has no derivative left. There it
    is the largest number of all.
    """
    options = CASES[name].options if name in CASES else {}
    positive = {"diag_scale": abs(options["diag_scale"])} if "diag_scale" in options else {}
    f = function(reference, name, **positive)
    found = results(f, operands, lambda base: base.double().abs(), dy.double().abs(), differentiable)
    if name.startswith(("mixture", "gated")) or options.get("activation") == "tanh":
        most = max((t.abs().max() for t in (*found, *exact) if t is not None and t.numel()), default=torch.zeros(()))
        found = [t if t is None else most for t in found]
    return found


def invalid(rng):
    """What does not fit is a ValueError or a TypeError that names both, never anything else and never an answer."""
    d, layers = rng.randint(1, 9), rng.randint(1, 4)
    x0, w, b = torch.randn(3, d), torch.randn(layers, d), torch.randn(layers, d)
    head = torch.randn(2, d)
    changes = {
        "features": lambda: (x0, torch.randn(layers, d + 1), b, head),
        "layers": lambda: (x0, w, torch.randn(layers + 1, d), head),
        "no layers": lambda: (x0, w[:0], b[:0], head),
        "a vector": lambda: (x0, w[0], b, head),
        "integers": lambda: (x0.long(), w, b, head),
        "complex": lambda: (x0.to(torch.complex64), w, b, head),
        "integer weights": lambda: (x0, w.long(), b, head),
        "a number": lambda: (torch.tensor(1.0), w, b, head),
        "a list": lambda: (x0.tolist(), w, b, head),
        "no weight": lambda: (x0, None, b, head),
        "head": lambda: (x0, w, b, torch.randn(2, d + 1)),
        "meta": lambda: (x0, w.to("meta"), b, head),
    }
    name, operator = rng.choice(list(changes)), rng.choice(("cross_network", "cross_logits"))
    operands = changes[name]() if operator == "cross_logits" or name != "head" else changes["layers"]()
    backend = rng.choice(("auto", "cpu", "torch", "reference"))
    operands = operands[: len(BY_NAME[operator].names)]
    refused(getattr(fastcross, operator), operands, backend, name)
    return f"invalid {operator}"


def invalid_products(rng):
    """The same of DCN-V2's layers: one of the operands changed."""
    changes = {
        "one more": lambda t: torch.nn.functional.pad(t, (0, 1)),
        "integers": lambda t: t.long(),
        "complex": lambda t: t.to(torch.complex64),
        "a list": lambda t: t.tolist(),
        "a number": lambda t: t.sum(),
        "a dimension more": lambda t: t.unsqueeze(-1),
        "nothing": lambda t: t[..., :0],
        "meta": lambda t: t.to("meta"),
    }
    change, name, backend = rng.choice(list(changes)), rng.choice(list(CASES)), rng.choice(("auto", "cpu", "torch"))
    operands = multiplicative_cases.operands(CASES[name], rng.randint(1, 3), rng.randint(2, 9), torch.float32)
    position = rng.choice([i for i, t in enumerate(operands) if t is not None])
    operands[position] = changes[change](operands[position])
    refused(function(fastcross, name), operands, backend, f"{name}, operand {position}: {change}")
    return "invalid product"


def refused(function, operands, backend, what):
    try:
        y = function(*operands, backend=backend)
    except (ValueError, TypeError) as error:
        if len(str(error)) < 10:
            raise AssertionError(f"{what}: an error that says nothing: {error!r}") from error
        return
    raise AssertionError(f"{what}: no error, but {tuple(y.shape)}")
