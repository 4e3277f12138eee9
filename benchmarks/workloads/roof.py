"""What the machine can do at most, for the roofline: a large copy and a large matrix product, in float32."""

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.contestants import Contestant
from benchmarks.harness import clock
from benchmarks.harness.measure import Entry, Expected

LARGE_COPY, PRODUCT = Contestant("copy", floor="large copy"), Contestant("matrix product", floor="product")


@dataclass(frozen=True)
class Roof:
    elements: int = 1 << 26
    size: int = 2048
    latency: bool = False

    def __str__(self) -> str:
        return (
            f"roof: a copy of {4 * self.elements >> 20} MiB, a product of {self.size} × {self.size} matrices, float32"
        )

    def describe(self) -> dict[str, Any]:
        counted = {"copy_bytes": 8 * self.elements, "product_operations": 2 * self.size**3}
        return {"title": str(self), "kind": "roof", **counted}

    def expected(self) -> dict[str, Expected]:
        return {}

    def enter(self, contestant: Contestant) -> Entry:
        if contestant == LARGE_COPY:
            x = torch.randn(self.elements, device=clock.device())
            y = torch.zeros_like(x)  # into memory that is there: no time for the system to find pages
            return Entry(lambda: y.copy_(x), lambda: {"x": y.copy_(x)}, {"x": Expected(x, 0.0)})
        a, b = (torch.randn(self.size, self.size, device=clock.device()) for _ in range(2))
        rows = a[:8].double() @ b.double()
        expected = {"rows": Expected(rows, float(1e-2 * rows.abs().max()))}  # TF32 would pass, a wrong product not
        return Entry(lambda: a @ b, lambda: {"rows": (a @ b)[:8]}, expected)
