"""What a network moves and computes, forward and backward, per element of x0: the closed form, and a loop of layers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Counts:
    """Reads and writes of a (B, d) tensor, and operations per element: once, and for each layer."""

    moved: int = 0
    moved_per_layer: int = 0
    computed: int = 0
    computed_per_layer: int = 0

    def bytes(self, layers: int, itemsize: int) -> int:
        return (self.moved + self.moved_per_layer * layers) * itemsize

    def operations(self, layers: int) -> int:
        return self.computed + self.computed_per_layer * layers


# It reads x0 and writes y; backward it reads dy and x0 and writes dx0, whatever the depth.
# p (2 L), y (2); g·x0 (2), dx0 (2 L + 1), dw (2 L), db (1).
OURS = Counts(moved=5, computed=6, computed_per_layer=6)
# In eager PyTorch each of four operators forward (5 reads, 3 writes) and seven to ten backward (9 or 10 reads, 4 or 5
# writes) moves its operands. x·w (2), y (3); ds (2), dx0 (2), dx (2), dw (2), db (1).
_LOOP, _FUSED_ADD = (
    Counts(moved_per_layer=8 + 15, computed_per_layer=14),
    Counts(moved_per_layer=8 + 13, computed_per_layer=14),
)
LAYER_BY_LAYER = {
    "eager loop": _LOOP,
    "DeepCTR-Torch": _FUSED_ADD,
    "TorchRec": _FUSED_ADD,
    "FuxiCTR": _LOOP,
    "torchfm": _LOOP,
}
