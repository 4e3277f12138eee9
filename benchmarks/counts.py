"""Bytes and operations of the cross operators, per pass: the floor of the closed form, and what a loop of layers moves.

Traffic is counted in reads and writes of one (B, d) tensor. The closed form of L layers moves as little as that of one:
it reads x0 and writes y; backward it reads dy and x0 and writes dx0.
"""

from typing import NamedTuple

from benchmarks.static import offline


class Traffic(NamedTuple):
    """Reads and writes of (B, d) tensors."""

    reads: int
    writes: int

    @property
    def total(self) -> int:
        return self.reads + self.writes


# Forward, backward: no implementation moves less.
FLOOR = {
    operator: tuple(Traffic(*offline.FLOOR[f"{operator}_{suffix}"]) for suffix in ("fwd", "bwd"))
    for operator in ("cross_layer", "cross_network", "cross_logits")
}
# Per layer, in eager PyTorch: each of four operators forward and seven to ten backward reads and writes its operands.
LAYER_BY_LAYER = {
    "eager loop": (Traffic(5, 3), Traffic(10, 5)),
    "DeepCTR-Torch": (Traffic(5, 3), Traffic(9, 4)),
    "TorchRec": (Traffic(5, 3), Traffic(9, 4)),
    "FuxiCTR": (Traffic(5, 3), Traffic(10, 5)),
    "torchfm": (Traffic(5, 3), Traffic(10, 5)),
}


def floor_bytes(operator: str, rows: int, d: int, itemsize: int, backward: bool) -> int:
    """The bytes that the operator has to move."""
    return sum(traffic.total for traffic in FLOOR[operator][: 1 + backward]) * rows * d * itemsize


def floor_copies(operator: str, backward: bool) -> float:
    """The floor in copies of x0: one read and one write each."""
    return floor_bytes(operator, 1, 1, 1, backward) / 2


def moved_bytes(contestant: str, rows: int, d: int, layers: int, itemsize: int) -> int | None:
    """What a network's forward and backward pass moves; None where nobody has counted it (torch.compile)."""
    if contestant == "fastcross":
        return floor_bytes("cross_network", rows, d, itemsize, backward=True)
    if contestant not in LAYER_BY_LAYER:
        return None
    return sum(traffic.total for traffic in LAYER_BY_LAYER[contestant]) * layers * rows * d * itemsize


def operations(contestant: str, rows: int, d: int, layers: int) -> int:
    """Additions and multiplications of a network's forward and backward pass, in the contestant's own algorithm.

    Closed form: p (2 d L), y (2 d); g·x0 (2 d), dx0 (2 d L + d), dw (2 d L), db (d).
    Layer by layer: x·w (2 d), y (3 d); ds (2 d), dx0 (2 d), dx (2 d), dw (2 d), db (d).
    """
    return rows * d * (6 * layers + 6 if contestant == "fastcross" else 14 * layers)
