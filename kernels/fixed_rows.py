"""Gradients of tables that have as many entries as the batch has ids: their size follows from shapes, not from values.

Of table k there are n_k entries: ``rows``, the ids in ascending order *with* repetitions, and ``values``: at the first
entry of each run of equal ids (its head) the sum of dx0 over the run, at all others exactly 0. So nobody waits for a
device to count distinct ids. As a sparse tensor that is not coalesced this is a gradient for anybody, its values have
the norm of the coalesced one, and who looks at heads only needs not coalesce it.

The Triton kernels write all tables' rows into one buffer and all values into another, in the order of the tables.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastcross.kernels.rows import accumulation_dtype

Rows = tuple[Tensor, Tensor]


def sum_rows(ids: Tensor, g: Tensor) -> Rows:
    """The ids, ascending, and the rows of g summed over each run of equal ones; in operators of PyTorch."""
    rows, order = ids.sort(stable=True)
    heads = torch.searchsorted(rows, rows)  # of each entry's run: the first place where its id could stand
    dtype = accumulation_dtype(g)
    # Not index_add, whose order on a GPU differs from run to run.
    return rows, torch.zeros_like(g, dtype=dtype).index_put((heads,), g.to(dtype)[order], accumulate=True)


def entries(ids: Tensor, values: Sequence[Any], needs: Sequence[bool]) -> list[int]:
    """n_k of each table: a row of the batch has one id of a single-valued feature; 0 where no gradient is needed."""
    counts = [ids.shape[0]] * ids.shape[1] + [value.shape[0] for value in values]
    return [count if needed else 0 for count, needed in zip(counts, needs, strict=True)]


def split(rows: Tensor, values: Tensor, counts: Sequence[int], widths: Sequence[int]) -> list[Rows]:
    """Each table's part of the two buffers."""
    sizes = [count * width for count, width in zip(counts, widths, strict=True)]
    parts = zip(rows.split(list(counts)), values.split(sizes), counts, widths, strict=True)
    return [(part, numbers.view(count, width)) for part, numbers, count, width in parts]


def first_keys(heights: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Where the keys, first_key + id, begin of each table that has entries, and where the last one's end.

    The key after a table's last id belongs to ids that are not in the table, so that each table keeps its own places
    when the keys are sorted, whatever its ids are.
    """
    first = [0]
    for height, count in zip(heights, counts, strict=True):
        first.append(first[-1] + (height + 1 if count else 0))
    return first


def key_dtype(heights: Sequence[int], counts: Sequence[int]) -> torch.dtype:
    """32 bits where they are enough: a radix sort takes half the passes."""
    return torch.int32 if first_keys(heights, counts)[-1] < 2**31 else torch.int64
