"""The files of a cache: .npy arrays written front to back and read by memory map."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class ArrayWriter:
    """Appends rows to a .npy file of known shape: no more memory than one append, no dirty pages of a memory map."""

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self.dtype, self.shape, self.rows = np.dtype(dtype), shape, 0
        self.file = open(path, "wb")  # noqa: SIM115 - closed by close()
        header = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self.file, header)

    def append(self, values: Array) -> None:
        assert values.shape[1:] == self.shape[1:], (values.shape, self.shape)
        self.rows += len(values)
        self.file.write(np.ascontiguousarray(values, self.dtype).data)

    def close(self) -> None:
        self.file.close()


def open_array(path: Path) -> Array:
    """A memory map; an array without elements, which cannot be mapped, is read."""
    array = np.load(path, mmap_mode=None if _is_empty(path) else "r", allow_pickle=False)
    return np.asarray(array)  # the plain view indexes faster than np.memmap


def _is_empty(path: Path) -> bool:
    with open(path, "rb") as file:
        np.lib.format.read_magic(file)
        shape, _, _ = np.lib.format.read_array_header_1_0(file)
    return 0 in shape


def gather_ragged(bounds: Array, rows: Array) -> tuple[Array, Array]:
    """Rows of a ragged array whose row i is [bounds[i], bounds[i + 1]): the positions of their elements in order, and
    where each row starts among them."""
    first = bounds[rows]
    counts = bounds[rows + 1] - first
    offsets = np.cumsum(counts) - counts
    positions = np.arange(counts.sum()) + np.repeat(first - offsets, counts)
    return positions, offsets
