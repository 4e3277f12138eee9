"""Ids and offsets that are wrong on a device, where an error would have to wait for it: recorded, and raised later.

A tensor of int64 has one place for each feature, and two for each bag's offsets. A kernel puts there the least of

    position << 32 | what was found there        position: the row; of a bag's id that of the value

(what was found cut to 32 bits), and beside an offset the number of the bag's values: of batches with wrong offsets only
those that have as many values as the first one are recorded. So what is told of a feature is true of one batch, though
not of the first one that was wrong. x0 is NaN where an id or an offset was.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastcross.kernels.embedding import bad_offsets, out_of_range

NONE = torch.iinfo(torch.int64).max  # in every place where nothing was wrong
LEAST, MOST = -(2**31), 2**31 - 1


def size(single: int, bags: int) -> int:
    return single + 3 * bags


def new_faults(single: int, bags: int, device: torch.device | None = None) -> Tensor:
    return torch.full((size(single, bags),), NONE, dtype=torch.int64, device=device)


def raise_faults(faults: Tensor, single: int, heights: Sequence[int]) -> None:
    """Raises for the first feature's fault that was recorded, and forgets them all; waits for the device."""
    if faults.is_meta or not heights:
        return
    recorded = faults.tolist()
    if all(value == NONE for value in recorded):
        return
    faults.fill_(NONE)
    for k, height in enumerate(heights):
        at = len(heights) + 2 * (k - single)
        if k >= single and recorded[at] != NONE:
            row, found = _open(recorded[at])
            raise bad_offsets(k, recorded[at + 1], f"{found} in row {row}")
        if recorded[k] != NONE:
            position, found = _open(recorded[k])
            raise out_of_range(k, found, height, f"{'row' if k < single else 'value'} {position}")


def _open(value: int) -> tuple[int, str]:
    """The position, and what was found there."""
    found = ((value & (2**32 - 1)) ^ 2**31) - 2**31
    more = {LEAST: " or less", MOST: " or more"}.get(found, "")
    return value >> 32, f"{found}{more}"
