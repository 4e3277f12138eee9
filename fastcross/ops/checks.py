"""What the operators require of their operands; every error names both values."""

from torch import Tensor


def check_x0(x0: object) -> None:
    if not isinstance(x0, Tensor) or x0.dim() < 1:
        found = f"a tensor {tuple(x0.shape)}" if isinstance(x0, Tensor) else type(x0).__name__
        raise TypeError(f"x0 must be a tensor (..., d); got {found}")


def check_x(x: Tensor, x0: Tensor) -> None:
    """A previous layer's output has the shape, dtype and device of x0."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor like x0; got {type(x).__name__} and x0 {tuple(x0.shape)}")
    if x.shape != x0.shape:
        raise ValueError(f"x must have the shape of x0; got x {tuple(x.shape)} and x0 {tuple(x0.shape)}")
    _check_kind("x", x, x0)
    if x.dtype != x0.dtype:
        raise TypeError(f"x must have the dtype of x0; got x {x.dtype} and x0 {x0.dtype}")


def check_parameter(name: str, t: Tensor | None, x0: Tensor, shape: str) -> None:
    """A parameter is shaped as ``shape`` says, "(d,)", "(L, d)" or "(C, d)", with x0's number of features as d."""
    if t is None:
        if name == "bias":
            return
        raise TypeError(f"{name} is missing; x0 {tuple(x0.shape)} needs a {name} {shape}")
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(t).__name__} and x0 {tuple(x0.shape)}")
    if t.dim() != len(shape.strip("(,)").split(",")) or t.shape[-1] != x0.shape[-1] or t.numel() == 0:
        raise ValueError(
            f"{name} must be {shape} with d = {x0.shape[-1]}, none of them 0; "
            f"got {name} {tuple(t.shape)} and x0 {tuple(x0.shape)}"
        )
    _check_kind(name, t, x0)


def check_network(x0: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """The operands of a network: a weight and a bias (or none) with one row per layer."""
    check_x0(x0)
    check_parameter("weight", weight, x0, "(L, d)")
    check_parameter("bias", bias, x0, "(L, d)")
    if bias is not None and bias.shape[0] != weight.shape[0]:
        raise ValueError(
            f"bias must have one row per layer; got bias {tuple(bias.shape)} and {weight.shape[0]} rows of weight"
        )


def _check_kind(name: str, t: Tensor, x0: Tensor) -> None:
    if not (t.is_floating_point() and x0.is_floating_point()):
        raise TypeError(f"{name} and x0 must be floating point; got {name} {t.dtype} and x0 {x0.dtype}")
    if t.device != x0.device:
        raise ValueError(f"{name} must be on the device of x0; got {name} on {t.device} and x0 on {x0.device}")
