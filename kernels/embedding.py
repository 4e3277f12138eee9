"""Embedding in PyTorch's operators, for any device and dtype, and the conventions of all backends.

    embedding_stack_fwd   x0 = [table_k[ids[m, k]] …, Σ_n coefficient_n table[values_n] …, dense]     (eq. 1 and 2)
    embedding_stack_bwd   for each table its distinct ids, ascending, and Σ dx0 over the rows m with the same id; on
                          other devices than the CPU all ids, as below
    weights_bwd           the gradient of a bag's weights

The tables are those of the single-valued features, then those of the bags. Sums over the rows with the same id run in
float32 for half precision. Ids and offsets are checked on the CPU, where checking does not synchronise. The backward
functions are differentiable.

On a GPU the gradient of table k has as many entries n_k as the batch has ids, so its size follows from shapes, not from
values: ``rows``, the ids in ascending order *with* repetitions, and ``values``: the sum of dx0 over each run of equal
ids at its first entry (its head), and exactly 0 at the others. So counting distinct ids never synchronises. As a sparse
tensor that is not coalesced this is a valid gradient. Its values have the norm of the coalesced one, and readers of
heads need not coalesce it. The Triton kernels write the rows of all tables to one buffer and the values to another, in
the order of the tables.

Wrong ids and offsets on a GPU, where raising an error at once would synchronise, are recorded and raised later. An
int64 tensor, ``faults``, has one entry for each feature, and two for each bag's offsets. A kernel writes the minimum of

    position << 32 | value found there        position: the row; for a bag's id that of the value

with the value truncated to 32 bits. Beside an offset it writes the number of the bag's values: among batches with wrong
offsets, only those with as many values as the first one are recorded. So the record of a feature describes one batch,
though not necessarily the first wrong one. x0 is NaN for wrong ids and offsets.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastcross.kernels.layout import accumulation_dtype
from fastcross.kernels.row_updates import RowGradient

# Rows of x0 start on a boundary of this many elements: 64 bytes in float32, a cache line and the widest load.
ALIGNMENT = 16


def embedding_stack(
    dense: Tensor,
    ids: Tensor,
    values: Sequence[Tensor],
    offsets: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    tables: Sequence[Tensor],
    pooling: str,
) -> Tensor:
    """x0 in operators that PyTorch differentiates, transforms and exports, without checks."""
    K = ids.shape[1]
    single = [F.embedding(ids[:, k], tables[k]) for k in range(K)]
    bags = zip(tables[K:], values, offsets, weights, strict=True)
    pooled = [_pool(table, value, offset, weight, pooling) for table, value, offset, weight in bags]
    return torch.cat((*single, *pooled, dense.to(x0_dtype(dense, tables))), dim=1)


def _pool(table: Tensor, values: Tensor, offsets: Tensor, weights: Tensor | None, pooling: str) -> Tensor:
    if not torch.compiler.is_exporting():  # embedding_bag supports neither tangents nor vmap
        # Not table[values], which would silently read the last row for an id of -1.
        rows = F.embedding(values, table) * pooling_coefficients(
            values, offsets, weights, pooling, table.dtype
        ).unsqueeze(1)
        return sum_by_row(rows, row_of_value(values, offsets), offsets.shape[0])
    if weights is None:
        return F.embedding_bag(values, table, offsets, mode=pooling)
    weights = weights.to(table.dtype)
    total = F.embedding_bag(values, table, offsets, mode="sum", per_sample_weights=weights)
    if pooling == "sum":
        return total
    ones = table.new_ones((1, 1))
    weight = F.embedding_bag(torch.zeros_like(values), ones, offsets, mode="sum", per_sample_weights=weights)
    return total * _inverse(weight)


def embedding_stack_fwd(
    dense: Tensor,
    ids: Tensor,
    values: Sequence[Tensor],
    offsets: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    tables: Sequence[Tensor],
    pooling: str,
) -> Tensor:
    check_ids(ids, values, [table.shape[0] for table in tables])
    check_offsets(values, offsets, ids.shape[1])
    x0, K = empty_x0(dense, tables), ids.shape[1]
    columns = x0[:, : x0.shape[1] - dense.shape[1]].split([table.shape[1] for table in tables], 1)
    for k in range(K):
        columns[k].copy_(tables[k][ids[:, k]])
    for k, bag in enumerate(zip(values, offsets, weights, strict=True), start=K):
        dtype = accumulation_dtype(tables[k])
        rows = tables[k][bag[0]].to(dtype) * pooling_coefficients(*bag, pooling, dtype).unsqueeze(1)
        columns[k].copy_(sum_by_row(rows, row_of_value(bag[0], bag[1]), x0.shape[0]))
    x0[:, x0.shape[1] - dense.shape[1] :] = dense
    return x0


def embedding_stack_bwd(
    dx0: Tensor,
    ids: Tensor,
    values: Sequence[Tensor],
    offsets: Sequence[Tensor],
    coefficients: Sequence[Tensor],
    sizes: Sequence[int],
    needs: Sequence[bool],
) -> list[Tensor]:
    """Alternating ids and gradients for each table; ``sizes`` are the height and width of each. Empty if not needed."""
    result: list[Tensor] = []
    columns = dx0[:, : sum(sizes[1::2])].split(list(sizes[1::2]), 1)
    for k, g in enumerate(columns):
        if not needs[k]:
            result += [ids.new_empty(0), dx0.new_empty(0)]
        elif k < ids.shape[1]:
            result += sum_distinct(ids[:, k], g, sizes[2 * k])
        else:
            bag = values[k - ids.shape[1]], offsets[k - ids.shape[1]], coefficients[k - ids.shape[1]]
            result += sum_bag(*bag, g, sizes[2 * k])
    return result


def sum_bag(values: Tensor, offsets: Tensor, coefficients: Tensor, g: Tensor, height: int) -> RowGradient:
    """A bag's distinct ids, and for each the sum of coefficient_n g over its values n, with g of n's row."""
    return sum_distinct(values, g[row_of_value(values, offsets)] * coefficients.to(g.dtype).unsqueeze(1), height)


def is_compact(g: Tensor) -> bool:
    """Whether gradients have one row per distinct id: only where counting them does not synchronise."""
    return g.device.type == "cpu"


def sum_distinct(ids: Tensor, g: Tensor, height: int) -> RowGradient:
    """The distinct ids, and the rows of g summed over each; on a GPU all ids (:func:`sum_rows`)."""
    if not is_compact(g):
        return sum_rows(ids, g)
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < height:
        # PyTorch's coalesce() would write out of bounds.
        raise RuntimeError(f"a table has {height} ids; got others: they were changed since the forward pass")
    # A copy, because PyTorch's sparse operators overrun a single row that is a view of a wider one.
    g = g.to(accumulation_dtype(g), memory_format=torch.contiguous_format, copy=True)
    total = torch.sparse_coo_tensor(ids.unsqueeze(0), g, (height, g.shape[1]), check_invariants=False).coalesce()
    return total.indices()[0], total.values()


def weights_bwd(g: Tensor, table: Tensor, values: Tensor, offsets: Tensor, weights: Tensor, pooling: str) -> Tensor:
    """The gradient of a bag's weights, from the gradient g of the bag's columns of x0.

    For "sum" that of weight n is g·row_n, for "mean" (g·row_n - Σ_m coefficient_m g·row_m) / Σ_m weight_m.
    """
    dtype, row = accumulation_dtype(g, weights), row_of_value(values, offsets)
    dots = (g[row].to(dtype) * table[values].to(dtype)).sum(1)
    if pooling == "mean":
        inverse = _inverse(sum_by_row(weights.to(dtype), row, offsets.shape[0]))
        dots = (dots - (sum_by_row(weights * dots, row, offsets.shape[0]) * inverse)[row]) * inverse[row]
    return dots.to(weights.dtype)


def in_dense_form(rows_of: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """Converts an ``embedding_stack_bwd`` to one with dense gradients; a gradient that is not needed is empty."""

    def embedding_stack_bwd_dense(*operands: Any) -> list[Tensor]:
        *_, sizes, needs = operands
        rows, result = rows_of(*operands), []
        for k, needed in enumerate(needs):
            distinct, g = rows[2 * k], rows[2 * k + 1]
            size = (sizes[2 * k], sizes[2 * k + 1])
            put = Tensor.index_copy_ if is_compact(g) else Tensor.index_add_  # all but one of an id's values are 0
            result.append(put(g.new_zeros(size), 0, distinct, g) if needed else g)
        return result

    return embedding_stack_bwd_dense


embedding_stack_bwd_dense = in_dense_form(embedding_stack_bwd)


def x0_dtype(dense: Tensor, tables: Sequence[Tensor]) -> torch.dtype:
    """The dtype to which all tables promote; that of dense without tables."""
    dtype = tables[0].dtype if tables else dense.dtype
    for table in tables:
        if table.dtype != dtype:
            dtype = torch.promote_types(dtype, table.dtype)
    return dtype


def empty_x0(dense: Tensor, tables: Sequence[Tensor]) -> Tensor:
    """(B, d), with rows padded to a multiple of ``ALIGNMENT`` elements."""
    rows, d = dense.shape[0], sum(table.shape[1] for table in tables) + dense.shape[1]
    return dense.new_empty((rows, -(-d // ALIGNMENT) * ALIGNMENT), dtype=x0_dtype(dense, tables))[:, :d]


def row_of_value(values: Tensor, offsets: Tensor) -> Tensor:
    """(n,): the row of the batch each value belongs to."""
    positions = torch.arange(values.shape[0], device=offsets.device)
    return torch.searchsorted(offsets, positions, right=True) - 1


def sum_by_row(parts: Tensor, row: Tensor, rows: int) -> Tensor:
    """(rows, …): the sum of the parts of each row's values, in their order; ``row`` is the row of each value."""
    nothing = parts.new_zeros((rows, *parts.shape[1:]))
    if is_compact(parts):
        return nothing.index_add(0, row, parts)
    # Not index_add, whose order on a GPU differs from run to run; a stable sort fixes the order.
    return nothing.index_put((row,), parts, accumulate=True)


def pooling_coefficients(
    values: Tensor, offsets: Tensor, weights: Tensor | None, pooling: str, dtype: torch.dtype
) -> Tensor:
    """(n,): the factor of each value's row in the sum; for "mean" the factors of a row sum to 1."""
    weights = values.new_ones(values.shape, dtype=dtype) if weights is None else weights.to(dtype)
    if pooling == "sum":
        return weights
    row = row_of_value(values, offsets)
    return weights * _inverse(sum_by_row(weights, row, offsets.shape[0]))[row]


def _inverse(total: Tensor) -> Tensor:
    """1 / total, and 0 for a total of 0; its derivative is finite everywhere."""
    return torch.where(total == 0, 0, 1 / torch.where(total == 0, 1, total))


def check_ids(ids: Tensor, values: Sequence[Tensor], heights: Sequence[int]) -> None:
    """Raises for the first id outside its table."""
    if ids.device.type != "cpu":
        return
    single = [(k, ids[:, k], "row") for k in range(ids.shape[1])]
    for k, each, place in (*single, *((k, v, "value") for k, v in enumerate(values, start=ids.shape[1]))):
        bad = ((each < 0) | (each >= heights[k])).nonzero()
        if len(bad):
            raise out_of_range(k, int(each[bad[0]]), heights[k], f"{place} {int(bad[0])}")


def out_of_range(k: int, found: int | str, height: int, where: str) -> ValueError:
    return ValueError(f"feature {k} has {height} ids, 0 to {height - 1}; got id {found} in {where}")


def check_offsets(values: Sequence[Tensor], offsets: Sequence[Tensor], K: int) -> None:
    """Raises for the first invalid offset; bags are numbered from K."""
    for k, (value, offset) in enumerate(zip(values, offsets, strict=True), start=K):
        n = value.shape[0]
        if offset.device.type != "cpu" or (n == 0 and offset.shape[0] == 0):
            continue
        before = F.pad(offset, (1, 0))  # the first offset must be 0, every other at least the one before it
        bad = ((offset < before[:-1]) | (offset > n)).nonzero() if len(offset) else [0]
        if len(bad) or offset[0] != 0:
            m = int(bad[0]) if len(offset) and offset[0] == 0 else 0
            found = f"{int(offset[m])} in row {m}" if len(offset) else "none"
            raise bad_offsets(k, n, found)


def bad_offsets(k: int, n: int, found: str) -> ValueError:
    return ValueError(f"feature {k}'s offsets must start at 0 and rise to at most {n}; got {found}")


def sum_rows(ids: Tensor, g: Tensor) -> RowGradient:
    """The ids, ascending, and the sum of the rows of g over each run of equal ids, in PyTorch's operators."""
    rows, order = ids.sort(stable=True)
    heads = torch.searchsorted(rows, rows)  # the first entry of each entry's run
    dtype = accumulation_dtype(g)
    # Not index_add, whose order on a GPU differs from run to run.
    return rows, torch.zeros_like(g, dtype=dtype).index_put((heads,), g.to(dtype)[order], accumulate=True)


def entries(ids: Tensor, values: Sequence[Any], needs: Sequence[bool]) -> list[int]:
    """n_k of each table, which for a single-valued feature is the number of rows; 0 if no gradient is needed."""
    counts = [ids.shape[0]] * ids.shape[1] + [value.shape[0] for value in values]
    return [count if needed else 0 for count, needed in zip(counts, needs, strict=True)]


def split(rows: Tensor, values: Tensor, counts: Sequence[int], widths: Sequence[int]) -> list[RowGradient]:
    """Each table's part of the two buffers."""
    sizes = [count * width for count, width in zip(counts, widths, strict=True)]
    parts = zip(rows.split(list(counts)), values.split(sizes), counts, widths, strict=True)
    return [(part, numbers.view(count, width)) for part, numbers, count, width in parts]


def first_keys(heights: Sequence[int], counts: Sequence[int]) -> list[int]:
    """The first key of each table that has entries, and the end of the last one's; a key is first_key + id.

    The key after a table's last id is for ids outside the table. So each table keeps its range of places when the keys
    are sorted, whatever its ids are.
    """
    first = [0]
    for height, count in zip(heights, counts, strict=True):
        first.append(first[-1] + (height + 1 if count else 0))
    return first


def key_dtype(heights: Sequence[int], counts: Sequence[int]) -> torch.dtype:
    """The smallest that is large enough: a radix sort takes a pass for so many bits."""
    keys = first_keys(heights, counts)[-1]
    return next(dtype for dtype in (torch.int16, torch.int32, torch.int64) if keys <= torch.iinfo(dtype).max)


NO_FAULT = torch.iinfo(torch.int64).max  # an empty entry of the record
LEAST, MOST = -(2**31), 2**31 - 1


def faults_size(single: int, bags: int) -> int:
    return single + 3 * bags


def new_faults(single: int, bags: int, device: torch.device | None = None) -> Tensor:
    return torch.full((faults_size(single, bags),), NO_FAULT, dtype=torch.int64, device=device)


def raise_faults(faults: Tensor, single: int, heights: Sequence[int]) -> None:
    """Raises the error of the first feature with a recorded fault, and clears the record. Synchronises."""
    if faults.is_meta or not heights:
        return
    recorded = faults.tolist()
    if all(value == NO_FAULT for value in recorded):
        return
    faults.fill_(NO_FAULT)
    for k, height in enumerate(heights):
        at = len(heights) + 2 * (k - single)
        if k >= single and recorded[at] != NO_FAULT:
            row, found = _open(recorded[at])
            raise bad_offsets(k, recorded[at + 1], f"{found} in row {row}")
        if recorded[k] != NO_FAULT:
            position, found = _open(recorded[k])
            raise out_of_range(k, found, height, f"{'row' if k < single else 'value'} {position}")


def _open(value: int) -> tuple[int, str]:
    """The position, and the value found there."""
    found = ((value & (2**32 - 1)) ^ 2**31) - 2**31
    more = {LEAST: " or less", MOST: " or more"}.get(found, "")
    return value >> 32, f"{found}{more}"
