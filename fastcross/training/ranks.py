"""The processes that train together, as the training loop sees them: here just one."""

from typing import Any

from torch import Tensor


class Ranks:
    """One process of ``size``, which calls each of these together with the others; the base class is alone."""

    rank, size = 0, 1

    def mean(self, value: Tensor) -> Tensor:
        """The mean of the ranks' values."""
        return value

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag, whether it is set on any rank."""
        return flags

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, one rank after the other."""
        return rows

    def share(self, value: Any) -> Any:
        """What rank 0 has."""
        return value


ALONE = Ranks()
