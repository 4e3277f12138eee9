"""The order in which the rows of a part are visited.

Up to WINDOW rows a shuffle is a uniform permutation. Beyond that a permutation of the whole file would turn training
into random reads of single rows, so the file is cut into blocks of BLOCK consecutive rows, the blocks are permuted,
and the rows of WINDOW / BLOCK blocks at a time are permuted together: a batch is a uniform sample of 4,096 blocks
from all over the file, every row is visited once per epoch, each block is read from disk once, and any position can
be computed without the ones before it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
BLOCK = 1 << 10
WINDOW = 1 << 22


class RowOrder:
    """order.rows(lo, hi) are the rows at positions lo ... hi - 1 of the shuffled epoch."""

    def __init__(self, size: int, seed: int, epoch: int, *, window: int = WINDOW, block: int = BLOCK) -> None:
        self.size, self.key, self.block = size, (seed, epoch), block
        self.blocks = np.random.default_rng((*self.key, 0)).permutation(-(-size // block))
        # Lengths differ only for the file's last block, wherever the permutation put it.
        ends = np.cumsum(np.minimum((self.blocks + 1) * block, size) - self.blocks * block)
        self.per_window = max(window // block, 1)
        self.bounds = np.concatenate([[0], ends[self.per_window - 1 :: self.per_window], ends[-1:]]).astype(np.int64)
        self.bounds = np.unique(self.bounds)
        self.current: tuple[int, Array] = (-1, np.empty(0, np.int64))

    def rows(self, lo: int, hi: int) -> Array:
        pieces = []
        while lo < hi:
            window = int(np.searchsorted(self.bounds, lo, side="right")) - 1
            start, end = self.bounds[window], min(self.bounds[window + 1], hi)
            pieces.append(self._window(window)[lo - start : end - start])
            lo = int(end)
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, np.int64), *pieces])

    def _window(self, window: int) -> Array:
        if self.current[0] != window:
            blocks = self.blocks[window * self.per_window : (window + 1) * self.per_window]
            rows = (blocks[:, None] * self.block + np.arange(self.block)).ravel()
            rows = rows[rows < self.size]
            np.random.default_rng((*self.key, 1 + window)).shuffle(rows)
            self.current = (window, rows)
        return self.current[1]
