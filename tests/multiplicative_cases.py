"""DCN-V2's layers and their kin, each with its options and operands, for the tests of what they have in common."""

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Case:
    """An operator with options; the shapes of its operands, x0's first, in letters."""

    operator: str
    shapes: tuple[str | None, ...]
    options: dict = field(default_factory=dict)


LOW_RANK = ("d", "Ldr", "Lrd", "Ld")
MIXTURE = ("d", "LKdr", "LKrr", "LKrd", "Ld")
CASES = {
    "matrix": Case("cross_matrix", ("d", "Ldd", "Ld")),
    "matrix, no bias": Case("cross_matrix", ("d", "Ldd", None)),
    "low rank": Case("cross_low_rank", LOW_RANK),
    "low rank, no bias": Case("cross_low_rank", (*LOW_RANK[:3], None), {"diag_scale": 0.5}),
    "low rank, tanh": Case("cross_low_rank", LOW_RANK, {"activation": "tanh"}),
    "low rank, relu, diagonal": Case("cross_low_rank", LOW_RANK, {"activation": "relu", "diag_scale": -0.7}),
    "mixture": Case("cross_mixture", (*MIXTURE, "Kd")),
    "mixture, all biases": Case("cross_mixture", (*MIXTURE, "LKd", "LK"), {"activation": "relu"}),
    "mixture, shared gate": Case("cross_mixture", (*MIXTURE[:4], None, "Kd", "K"), {"activation": None}),
    "mixture, one expert": Case("cross_mixture", (*(s.replace("K", "1") for s in MIXTURE), None)),
    "gated": Case("cross_gated", ("d", "Ldd", "Ldd", "Ld")),
    "gated, no bias": Case("cross_gated", ("d", "Ldd", "Ldd", None)),
    "fcn, linear": Case("cross_fcn", ("d", "Lhd", "Ld", "Lh", "Lh")),
    "fcn, exponential": Case("cross_fcn", ("d", "Lhd", "Ld", "Lh", "Lh"), {"exponential": True}),
}


def operands(case, rows, d, dtype=torch.float64, layers=3, rank=3, experts=2, seed=0):
    """Rows of unit variance, matrices that keep it; None where the case has none. ``rows`` may be a shape.

    FCN's d is even, and at least 6: a LayerNorm of one number or two has gradients that cancel to nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    if case.operator == "cross_fcn":
        d = max(6, d + d % 2)
    sizes = {"L": layers, "K": experts, "d": d, "r": rank, "h": d // 2, "1": 1}

    def normal(shape, scale):
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)

    found = [normal((*rows, d) if isinstance(rows, tuple) else (rows, d), 1.0)]
    for letters in case.shapes[1:]:
        if letters is None:
            found.append(None)
            continue
        shape = tuple(sizes[letter] for letter in letters)
        is_matrix = (letters[-1] in "dr" and len(letters) > 2) or letters == "Kd"
        found.append(normal(shape, (shape[-1] * layers) ** -0.5 if is_matrix else 0.3))
    return found


def gradient(x0, seed=1):
    return torch.randn(x0.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
