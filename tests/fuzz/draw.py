"""Random operands: sizes, dtypes, and how a tensor lies in memory."""

import random

import torch

HALVES = (torch.float16, torch.bfloat16)


def start(number):
    """The generator of a case; PyTorch's own starts anew, too.

    Most cases run on one thread: more of them, on cores that other workers use, make a case several times as long.
    """
    torch.manual_seed(number % 2**63)
    rng = random.Random(number)
    torch.set_num_threads(rng.randint(2, 4) if rng.random() < 0.03 else 1)
    return rng


def dtype(rng):
    return rng.choices((torch.float32, torch.float64, *HALVES), (6, 3, 1, 1))[0]


def features(rng):
    """d: mostly small, around the widths of vector registers, sometimes the paper's."""
    return rng.choice(
        (rng.randint(1, 9), rng.randint(1, 70), rng.choice((15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 257)))
    )


def rows(rng):
    return rng.choice((0, 1, 2, rng.randint(1, 9), rng.randint(1, 40), rng.randint(1, 200)))


def leading(rng):
    """The dimensions before d: none, one, or several, some of them empty."""
    kind = rng.random()
    if kind < 0.1:
        return ()
    if kind < 0.75:
        return (rows(rng),)
    return tuple(
        rng.choice((0, 1, 1, 2, 3, 5)) if rng.random() < 0.3 else rng.randint(1, 6) for _ in range(rng.randint(2, 3))
    )


LAYOUTS = {}


def _layout(function):
    LAYOUTS[function.__name__] = function
    return function


# Each takes a shape and returns the shape of a base and how the operand is a view of it.


@_layout
def contiguous(rng, shape):
    return shape, lambda base: base


@_layout
def padded(rng, shape):
    after, before = rng.randint(1, 70), rng.randint(0, 3)
    return (*shape[:-1], before + shape[-1] + after), lambda base: base[..., before : before + shape[-1]]


@_layout
def every_other_column(rng, shape):
    return (*shape[:-1], 2 * shape[-1]), lambda base: base[..., ::2]


@_layout
def every_other_row(rng, shape):
    return (2 * shape[0], *shape[1:]), lambda base: base[::2]


@_layout
def transposed(rng, shape):
    return shape[::-1], lambda base: base.permute(*range(base.dim())[::-1])


@_layout
def expanded_rows(rng, shape):
    return (1, *shape[1:]), lambda base: base.expand(shape)


@_layout
def expanded_columns(rng, shape):
    return (*shape[:-1], 1), lambda base: base.expand(shape)


@_layout
def overlapping(rng, shape):
    """Rows that begin a few elements after one another."""
    step = rng.randint(1, max(1, shape[-1]))
    count = shape[0]
    length = (count - 1) * step + shape[-1] if count else shape[-1]
    return (length,), lambda base: base.unfold(0, shape[-1], step)[:count]


@_layout
def at_an_odd_address(rng, shape):
    size = 1
    for n in shape:
        size *= n
    return (size + 1,), lambda base: base[1:].view(shape)


def layout(rng, shape):
    """A layout that fits the shape, by name: most operands lie as usual."""
    if rng.random() < 0.45:
        return "contiguous"
    names = [name for name in LAYOUTS if name != "overlapping" or len(shape) == 2]
    if len(shape) < 2:
        names = [name for name in names if name not in ("every_other_row", "expanded_rows")]
    return rng.choice(names)


class Operand:
    """A base that may require a gradient, and a view of it; the same values in any dtype."""

    def __init__(self, rng, shape, dtype, scale=1.0, needs_grad=None, name=None):
        self.layout = layout(rng, shape) if name is None else name
        base_shape, self.view = LAYOUTS[self.layout](rng, tuple(shape))
        self.base = (torch.randn(base_shape, dtype=torch.float64) * scale).to(dtype)
        self.needs_grad = rng.random() < 0.7 if needs_grad is None else needs_grad

    def leaf(self, dtype=None):
        base = self.base.detach().clone() if dtype is None else self.base.detach().to(dtype, copy=True)
        return base.requires_grad_(self.needs_grad)


def cotangent(rng, y):
    """An incoming gradient: ones that are not stored, random, or strided."""
    kind = rng.randrange(4)
    if kind == 0:
        return torch.ones((), dtype=y.dtype).expand(y.shape)
    if kind == 1 and y.dim():
        return torch.randn(*y.shape[:-1], 2 * y.shape[-1], dtype=torch.float64).to(y.dtype)[..., ::2]
    if kind == 2 and y.dim() > 1:
        return torch.randn(y.shape[::-1], dtype=torch.float64).to(y.dtype).permute(*range(y.dim())[::-1])
    return torch.randn(y.shape, dtype=torch.float64).to(y.dtype)
