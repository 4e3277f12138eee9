"""The one rule by which a result counts as right, for the tests and for ``fastcross doctor``.

    err(ours, ref64) <= 2 · err(eager loop in the same dtype, ref64) + atol

where ref64 is ``fastcross.reference`` in float64 and err the largest absolute difference. The eager loop rounds to the
storage dtype after every operation; atol is a few units in the last place of the largest value, four unless said
otherwise: both errors are maxima of a handful of roundings (dot, recurrence, product, sum) of up to half a unit each,
and what one order of a sum loses another may win; in Triton's interpreter a store to bfloat16 truncates, which is a
whole unit. In float64 the eager loop is itself the reference, and atol alone counts: the few thousand roundings of the
longest sums.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastcross import ops, reference
from fastcross.batch import Bag
from fastcross.ops import row_updates

UNITS, UNITS_IN_FLOAT64 = 4, 4096
# DCN-V2's layers sum over d or r in every layer, in orders of their own.
UNITS_OF = {"cross_matrix": 16, "cross_low_rank": 16, "cross_mixture": 16, "cross_gated": 16, "cross_fcn": 16}


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
        return self.error / max(self.allowed, 1e-300) if self.error else 0.0

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


@dataclass(frozen=True)
class Operator:
    """An operator, and the sizes of its operands: B rows, d features (h: half of them), L layers, C outputs, rank r, K
    experts. ``passes``: reads and writes of a (B, d) tensor, forward and backward, that nobody can do without."""

    name: str
    operands: str
    passes: int = 5

    @property
    def has_matrices(self) -> bool:
        return self.name in UNITS_OF

    @property
    def has_layers(self) -> bool:
        return "L" in self.operands

    @property
    def rows(self) -> int:
        """How many operands have a row for each example. They come first."""
        return self.operands.count(":B")

    @property
    def names(self) -> list[str]:
        """Of the operands; a bias is b."""
        return [operand.partition(":")[0] for operand in self.operands.split()]

    def shapes(self, **sizes: int) -> list[tuple[int, ...]]:
        """Of the operands, by the letters' sizes."""
        return [tuple(sizes[letter] for letter in operand.partition(":")[2]) for operand in self.operands.split()]

    def draw(
        self, rows: int, d: int, layers: int, dtype: torch.dtype, device: torch.device, outputs: int = 2
    ) -> list[Tensor]:
        """Rows of unit variance, and weights that keep it."""
        generator = torch.Generator().manual_seed(rows + d + layers)
        d = max(6, d + d % 2) if self.name == "cross_fcn" else d  # a LayerNorm of few numbers has gradients of noise
        sizes = {"B": rows, "d": d, "h": d // 2, "L": layers, "C": outputs, "r": min(64, max(3, d // 4)), "K": 4}
        found: list[Tensor] = []
        for name, shape in zip(self.names, self.shapes(**sizes), strict=True):
            is_rows = len(found) < self.rows
            scale = 1.0 if is_rows else 0.3 if name in ("b", "norm") else (shape[-1] * layers) ** -0.5
            found.append((torch.randn(shape, generator=generator) * scale).to(device, dtype))
        return found


OPERATORS = (
    Operator("cross_layer", "x0:Bd x:Bd w:d b:d", 8),
    Operator("cross_network", "x0:Bd w:Ld b:Ld"),
    Operator("cross_logits", "x0:Bd w:Ld b:Ld head:Cd", 3),
    Operator("cross_matrix", "x0:Bd w:Ldd b:Ld"),
    Operator("cross_low_rank", "x0:Bd u:Ldr v:Lrd b:Ld"),
    Operator("cross_mixture", "x0:Bd u:LKdr c:LKrr v:LKrd b:Ld gate:Kd"),
    Operator("cross_gated", "x0:Bd w:Ldd gate:Ldd b:Ld"),
    Operator("cross_fcn", "x0:Bd w:Lhd b:Ld norm:Lh norm:Lh"),
)
BY_NAME = {operator.name: operator for operator in OPERATORS}
RANK_ONE = tuple(operator.name for operator in OPERATORS if not operator.has_matrices)  # the paper's


SMALL = ((7, 33, 3), (1, 16, 1), (9, 130, 2))  # rows, d, layers: odd, one row, wider than a warp
LARGER = ((1030, 54, 6), (63, 390, 3), (40, 48, 16))  # tall, wide, deep
LONG_ROWS = ((5, 1026, 6), (3, 4096, 2))  # the paper's, and more than registers hold


def check_operator(
    operator: Operator, *, backend: str, device: torch.device, dtype: torch.dtype, few: bool
) -> Iterator[Compared]:
    """Output and all gradients, at small shapes and, unless ``few``, at larger ones."""
    for shape in SMALL + LARGER * (not few) + LONG_ROWS[: 1 if few else 2] * (not operator.has_matrices):
        tensors = operator.draw(*shape, dtype, device)
        for compared in held_to_the_rule(operator, tensors, backend):
            yield compared._replace(name="{}, B = {}, d = {}, L = {}".format(compared.name, *shape))


def held_to_the_rule(operator: Operator, tensors: Sequence[Tensor], backend: str) -> list[Compared]:
    ours = evaluate(getattr(ops, operator.name), tensors, gradient_of, backend=backend)
    return compare_with_eager(operator.name, ours, tensors, gradient_of)


def gradient_of(y: Tensor) -> Tensor:
    """An incoming gradient that is the same in every dtype."""
    return torch.linspace(-1, 1, y.numel(), device=y.device).bfloat16().to(y.dtype).view(y.shape)


def check_embedding(*, backend: str, device: torch.device, dtype: torch.dtype) -> Iterator[Compared]:
    """Single values and a bag with weights, both widths of ids, tables of wide words and of odd widths."""
    for widths, of_ids, pooling in (((16, 8, 16), torch.int64, "mean"), ((3, 17, 39), torch.int32, "sum")):
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int, generator: torch.Generator = generator) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        rows, values, height = 33, 70, 11
        ids = torch.randint(height, (rows, 2), generator=generator).to(device, of_ids)
        bag = Bag(torch.randint(height, (values,), generator=generator), torch.arange(rows) * 2).to(device, of_ids)
        tensors = [normal(rows, 5), normal(values).abs(), *(normal(height, width) for width in widths)]
        ours = functools.partial(_embed, ids, bag, pooling, backend)
        loop = functools.partial(_embed, ids.cpu().long(), bag.to("cpu", torch.int64), pooling, "reference")
        on_cpu = [t.cpu() for t in tensors]  # the reference is a loop over rows
        eager, exact = (evaluate(loop, on_cpu, gradient_of, kind) for kind in (None, torch.float64))
        for i, (o, e, x) in enumerate(zip(evaluate(ours, tensors, gradient_of), eager, exact, strict=True)):
            yield compare(o.cpu(), e, x, f"result {i}, widths {widths}, ids {of_ids}")


def _embed(
    ids: Tensor, bag: Bag, pooling: str, backend: str, dense: Tensor, weights: Tensor, *tables: Tensor
) -> Tensor:
    bags = [Bag(bag.values, bag.offsets, weights)]
    return ops.embedding_stack(dense, ids, tables, bags, pooling=pooling, backend=backend)


def check_rows(update: str, *, backend: str, device: torch.device, dtype: torch.dtype) -> Iterator[Compared]:
    """An optimiser's update of the rows that a gradient names, beside PyTorch's own operators in float64."""
    generator = torch.Generator().manual_seed(1)
    widths, height, entries = (16, 8, 39), 40, torch.tensor([0, 0, 3, 7, 7, 7, 39])
    heads = torch.tensor([True, False, True, True, False, False, True])

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    shapes = [[(height, width)] * 3 + [(len(heads), width)] for width in widths]
    drawn = [[normal(*shape) for shape in each] for each in shapes]

    def updated(backend: str, kind: torch.dtype, place: torch.device) -> list[Tensor]:
        tables, first, second, values = ([t.to(kind, copy=True) for t in each] for each in zip(*drawn, strict=True))
        values, second = [g * heads[:, None] for g in values], [v.square() for v in second]
        rows = entries
        if backend == "cpu":  # the C++ kernels take each row once
            rows, values = entries[heads], [g[heads] for g in values]
        tables, first, second = ([t.to(place) for t in each] for each in (tables, first, second))
        gradients = [(rows.to(place), g.to(place)) for g in values]
        if update == "adam":
            moments = list(zip(first, second, strict=True))
            row_updates.adam_rows(backend, tables, moments, gradients, 0.1, (0.9, 0.99), 1e-3, 3)
            return [*tables, *first, *second]
        if update == "sgd":
            row_updates.sgd_rows(backend, tables, gradients, 0.1)
            return tables
        sums = [each[:, 0].contiguous() for each in second] if update.startswith("row-wise") else second
        row_updates.adagrad_rows(backend, tables, sums, gradients, 0.1, 1e-3, update.startswith("row-wise"))
        return [*tables, *sums]

    here = torch.device("cpu")
    results = updated(backend, dtype, device), updated("torch", dtype, here), updated("torch", torch.float64, here)
    for i, (o, e, x) in enumerate(zip(*results, strict=True)):
        yield compare(o.cpu(), e, x, f"result {i}")


def check_ids(*, backend: str, device: torch.device) -> Iterator[Compared]:
    """An id outside its table is raised with its feature and its row; on a GPU it is recorded first."""
    tables = [torch.randn(5, 4, device=device), torch.randn(7, 4, device=device)]
    ids = torch.zeros(9, 2, dtype=torch.int64)
    ids[6, 1] = 7
    told = ""
    try:
        ops.embedding_stack(torch.randn(9, 2, device=device), ids.to(device), tables, backend=backend)
    except ValueError as error:
        told = str(error)
    right = "feature 1 has 7 ids, 0 to 6; got id 7 in row 6" in told
    yield Compared(f"an id of 7 in a table of 7 rows: {told or 'nothing was raised'}", float(not right), 0.0)
