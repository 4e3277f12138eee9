"""The files of a cache: .npy arrays written front to back, checked, and read by memory map.

Their checksum is zlib's CRC-32: any change within four bytes changes it for certain, any other with all but one chance
in 2^32, and at 3.9 GB/s (one core; SHA-256: 1.8 GB/s) it is faster than most disks deliver. So the arrays of a part are
checked whole each time a process first uses them, 2.6 s for 10 GB, and no note of earlier checks has to be trusted.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastcross.data.errors import DataError

Array = npt.NDArray[Any]


class ArrayWriter:
    """Appends rows to a .npy file of known shape: no more memory than one append, no dirty pages of a memory map."""

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self.dtype, self.shape, self.rows = np.dtype(dtype), shape, 0
        self.crc32 = self.bytes = 0
        self.file = open(path, "wb")  # noqa: SIM115 - closed by close()
        header = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": shape}
        buffer = io.BytesIO()
        np.lib.format.write_array_header_1_0(buffer, header)
        self._write(buffer.getbuffer())

    def append(self, values: Array) -> None:
        assert values.shape[1:] == self.shape[1:], (values.shape, self.shape)
        self.rows += len(values)
        if values.size:
            self._write(np.ascontiguousarray(values, self.dtype).data.cast("B"))

    def close(self) -> None:
        self.file.close()

    def _write(self, data: memoryview) -> None:
        self.crc32 = zlib.crc32(data, self.crc32)
        self.bytes += len(data)
        self.file.write(data)


def check_size(path: Path, written: Mapping[str, int]) -> None:
    """Raise DataError where a file is absent or has not the size with which it was written."""
    found = path.stat().st_size if path.exists() else "no such file"
    if found != written["bytes"]:
        raise DataError(f"{path}: the cache is damaged; expected {written['bytes']} bytes, got {found}")


def check_content(path: Path, written: Mapping[str, int]) -> None:
    """Raise DataError where a file is not the one that was written."""
    crc32 = 0
    try:
        with open(path, "rb", buffering=0) as file:
            while data := file.read(1 << 24):
                crc32 = zlib.crc32(data, crc32)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    if crc32 != written["crc32"]:
        raise DataError(
            f"{path}: the cache is damaged; expected checksum {written['crc32']:08x}, got {crc32:08x}; prepare it again"
        )


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
