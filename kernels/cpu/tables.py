"""Embedding tables as kernels get them: arrays of addresses, heights and widths; each table is a tensor of its own."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from fastcross.kernels.cpu.door import table_of


def describe_tables(tables: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The addresses, heights and widths of contiguous tables."""
    shapes = [table.shape for table in tables]
    heights, widths = numbers(tuple(shape[0] for shape in shapes)), numbers(tuple(shape[1] for shape in shapes))
    return table_of("tables", tables, dtype, shapes), heights, widths


@functools.lru_cache
def numbers(values: tuple[int, ...]) -> Tensor:
    """As a tensor, which nobody changes."""
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def unit_columns(ids: Tensor) -> Tensor:
    return ids if ids.shape[1] == 1 or ids.stride(1) == 1 else ids.contiguous()
