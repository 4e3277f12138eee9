"""The cross layers and the embedding layer as modules: parameters and initialisation only."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

# Reads the (L, d) weights and biases of another package's cross network; fastcross/__init__.py puts it here.
read_peer: "Callable[[nn.Module], tuple[Tensor, Tensor]]"
