"""The gradients of an embedding stack that every backend's Function puts together in the same way."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastcross.gradients import mark_heads
from fastcross.kernels import embedding as plain
from fastcross.kernels.rows import accumulation_dtype, as_rows

Bags = tuple[list[Tensor], list[Tensor], list[Any]]  # all bags' values, all their offsets, all their weights or None


def split(operands: Sequence[Any], bags: int) -> list[list[Any]]:
    """A Function's operands: values, offsets, weights, and what follows them."""
    return [*(list(operands[i * bags : (i + 1) * bags]) for i in range(3)), list(operands[3 * bags :])]


def weights_bwd(
    dx0: Tensor, bags: Bags, read: list[Tensor | None], sizes: list[int], pooling: str
) -> list[Tensor | None]:
    """The gradients of the bags' weights, for each bag whose table was kept in ``read``; ``sizes``: of all tables."""
    single, dweights = len(sizes) // 2 - len(read), []
    for k, (table, value, offset, weight) in enumerate(zip(read, *bags, strict=True), start=single):
        column = sum(sizes[1 : 2 * k : 2])
        g = dx0[:, column : column + sizes[2 * k + 1]]
        if table is not None:
            _check_unchanged(k, table, sizes)
        dweights.append(None if table is None else plain.weights_bwd(g, table, value, offset, weight, pooling))
    return dweights


def _check_unchanged(k: int, table: Tensor, sizes: list[int]) -> None:
    """Autograd notices what is written to a table, but not that another was put in its place."""
    if list(table.shape) != sizes[2 * k : 2 * k + 2]:
        before = tuple(sizes[2 * k : 2 * k + 2])
        raise RuntimeError(f"feature {k}'s table was {before} in the forward pass and is {tuple(table.shape)} now")


def tables_bwd(
    bwd: Callable[..., list[Tensor]],
    operands: tuple[Tensor, Tensor, Bags, str],
    tables: tuple[list[int], list[torch.dtype], Sequence[bool]],
    sparse: bool,
) -> list[Tensor | None]:
    """Gradients in the tables' dtypes, by a function that returns ids and gradients in turn, or dense gradients.

    ``operands``: dx0, ids, the bags and their pooling; ``tables``: sizes, dtypes and which need a gradient.
    """
    (dx0, ids, bags, pooling), (sizes, dtypes, needs) = operands, tables
    dtype = accumulation_dtype(dx0)
    coefficients = [plain.pooling_coefficients(*bag, pooling, dtype) for bag in zip(*bags, strict=True)]
    found = bwd(as_rows(dx0), ids, *bags[:2], coefficients, sizes, needs)
    if not sparse:
        return [g.to(dtype) if need else None for g, dtype, need in zip(found, dtypes, needs, strict=True)]
    return [
        sparse_gradient(found[2 * k], found[2 * k + 1].to(dtypes[k]), sizes[2 * k : 2 * k + 2], plain.is_compact(dx0))
        if needs[k]
        else None
        for k in range(len(needs))
    ]


def sparse_gradient(rows: Tensor, values: Tensor, size: list[int], is_coalesced: bool) -> Tensor:
    """A table's gradient: compact, or of one entry for each id, which optimisers then need not sort again."""
    if not is_coalesced:
        mark_heads(rows, values)
    options: Any = {"check_invariants": False, "is_coalesced": is_coalesced}
    return torch.sparse_coo_tensor(rows.unsqueeze(0), values, size, **options)
