"""What a launch over the rows of all tables needs: their addresses and sizes on the device, and the grid.

It is made once for a set of tables, moments and places of gradients and kept, so that a step copies nothing to the
device: gradients count by their place relative to the first table's, which stays the same where all of them are slices
of one buffer. Here, and nowhere else, is seen to it that the kernels may have these addresses.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastcross.kernels.row_updates import Rows

DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
ELEMENTS, MOST_COLUMNS = 512, 32  # of a program's tile: four elements for each thread of four warps
KEPT = 64  # launches


class RowLaunch(NamedTuple):
    tables: Tensor  # (fields, K): first program, height, width, entries, places of rows and values, addresses
    programs: int
    blocks: dict[str, Any]

    def pointers(self, gradients: Sequence[Rows]) -> tuple[Tensor, Tensor, Tensor]:
        """The tables, and the rows and values that the places are relative to."""
        return self.tables, *gradients[0]


_LAUNCHES: dict[tuple[Any, ...], RowLaunch] = {}
_CAPTURED: list[RowLaunch] = []  # a CUDA graph reads them as long as it lives


def describe(tables: Sequence[Tensor], gradients: Sequence[Rows], *kept: Sequence[Tensor]) -> RowLaunch:
    """The launch over these rows; ``kept`` are the tables' moments, or for each row of a table one."""
    rows, values = [each for each, _ in gradients], [each for _, each in gradients]
    places = _places(rows), _places(values)
    lists = {"tables": tables, "rows": rows, "values": values, **{f"moments {i}": each for i, each in enumerate(kept)}}
    addresses = tuple(tuple(t.data_ptr() for t in each) for each in (tables, *kept))
    key = addresses, places, values[0].data_ptr() % 16, *(tuple(map(_metadata, each)) for each in lists.values())
    found = _LAUNCHES.get(key)
    if found is None:
        _check(lists)
        while len(_LAUNCHES) >= KEPT:
            del _LAUNCHES[next(iter(_LAUNCHES))]
        found = _LAUNCHES[key] = _make(lists, places, addresses)
    if tables[0].is_cuda and torch.cuda.is_current_stream_capturing():
        _CAPTURED.append(found)
    return found


def _make(lists: dict[str, Sequence[Tensor]], places: Any, addresses: Any) -> RowLaunch:
    tables, counts = lists["tables"], [len(rows) for rows in lists["rows"]]
    heights, widths = [table.shape[0] for table in tables], [table.shape[1] for table in tables]
    word = 16 // tables[0].itemsize
    whole = [t for name, each in lists.items() if name != "rows" for t in each if t.dim() == 2]
    is_aligned = all(t.data_ptr() % 16 == 0 and t.shape[1] % word == 0 for t in whole)
    columns = min(MOST_COLUMNS, triton.next_power_of_2(max(1, *widths)))
    entries = ELEMENTS // columns
    firsts = [0]
    for count in counts:
        firsts.append(firsts[-1] + -(-count // entries))
    fields = [firsts[:-1], heights, widths, counts, *places, *addresses]
    blocks = {"BLOCK_K": triton.next_power_of_2(len(tables)), "BLOCK_M": entries, "BLOCK_N": columns}
    return RowLaunch(
        torch.tensor(fields, device="cpu").to(tables[0].device, non_blocking=True),  # blocking, it would wait
        firsts[-1],
        {"DTYPE": DTYPES[tables[0].dtype], "ALIGN": word if is_aligned else 1, **blocks},
    )


def _places(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """In elements, relative to the first."""
    first = tensors[0].data_ptr()
    return tuple((t.data_ptr() - first) // t.itemsize for t in tensors)


def _metadata(t: Tensor) -> tuple[Any, ...]:
    return t.dtype, t.device, t.layout, *t.shape, t.is_contiguous()


def _check(lists: dict[str, Sequence[Tensor]]) -> None:
    """Raises unless all tensors lie together and are as large as the kernels take them to be."""
    tables = lists["tables"]
    for name, tensors in lists.items():
        if len(tensors) != len(tables):
            raise ValueError(f"{name} must be {len(tables)} tensors; got {len(tensors)}")
        for t, table, rows in zip(tensors, tables, lists["rows"], strict=True):
            shapes = {"tables": table.shape, "rows": rows.shape[:1], "values": (len(rows), table.shape[1])}
            shape = tuple(shapes.get(name, table.shape[: t.dim()]))  # a moment is like its table, or like a column
            dtype = torch.int64 if name == "rows" else tables[0].dtype
            fits = t.dtype == dtype and t.shape == shape and t.device == tables[0].device
            if not (fits and t.layout is torch.strided and t.is_contiguous()):
                wanted = f"{dtype} on {tables[0].device}, {shape}, contiguous"
                raise ValueError(f"{name} must be {wanted}; got {t.dtype} on {t.device}, {tuple(t.shape)}")
            memory = t.untyped_storage()
            if t.numel() and t.data_ptr() + t.nbytes > memory.data_ptr() + memory.nbytes():
                raise ValueError(f"{name} must have memory of its own, {t.nbytes} bytes; got {memory.nbytes()}")
