"""What the operators require of their operands; every error names both values."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from fastcross.batch import Bag

ACTIVATIONS = (None, "relu", "tanh")


def check_layer(x0: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """The operands of a layer: ``x`` like ``x0``, and parameters of one dimension."""
    _check_x0(x0)
    _check_parameter("weight", weight, x0, ("d",))
    if bias is not None:
        _check_parameter("bias", bias, x0, ("d",))
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor like x0; got {type(x).__name__} and x0 {tuple(x0.shape)}")
    if x.shape != x0.shape:
        raise ValueError(f"x must have the shape of x0; got x {tuple(x.shape)} and x0 {tuple(x0.shape)}")
    _check_kind("x", x, x0)
    if x.dtype != x0.dtype:
        raise TypeError(f"x must have the dtype of x0; got x {x.dtype} and x0 {x0.dtype}")


def check_network(x0: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """The operands of a network: a weight and a bias (or none) with one row per layer."""
    _check_x0(x0)
    _check_parameter("weight", weight, x0, ("L", "d"))
    if bias is not None:
        _check_parameter("bias", bias, x0, ("L", "d"))
        if bias.shape[0] != weight.shape[0]:
            raise ValueError(
                f"bias must have one row per layer; got bias {tuple(bias.shape)} and {weight.shape[0]} rows of weight"
            )


def check_head(head: Tensor, x0: Tensor) -> None:
    _check_parameter("head", head, x0, ("C", "d"))


def check_multiplicative(
    x0: Tensor, optional: Collection[str] = (), **parameters: tuple[Tensor | None, tuple[str, ...]]
) -> None:
    """The operands of DCN-V2's layers: each parameter with the names of its dimensions, which are of one size each.

    d is x0's number of features; the other sizes are those of the parameter that has them first.
    """
    _check_x0(x0)
    d = x0.shape[-1]
    found = {"d": (d, "x0", x0), "d/2": (d // 2, "x0", x0)}
    for name, (t, names) in parameters.items():
        if t is None and name in optional:
            continue
        if t is None:
            raise TypeError(f"{name} is missing; x0 {tuple(x0.shape)} needs a {name} {_form(names)}")
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} must be a tensor; got {type(t).__name__} and x0 {tuple(x0.shape)}")
        if t.dim() != len(names) or 0 in t.shape:
            raise ValueError(
                f"{name} must be {_form(names)} with d = {d}, none of them 0; "
                f"got {name} {tuple(t.shape)} and x0 {tuple(x0.shape)}"
            )
        if "d/2" in names and d % 2:
            raise ValueError(
                f"x0 must have an even number of features; got x0 {tuple(x0.shape)} and {name} {tuple(t.shape)}"
            )
        for size, dimension in zip(t.shape, names, strict=True):
            expected, owner, of = found.setdefault(dimension, (size, name, t))
            if size != expected:
                raise ValueError(
                    f"{name} must be {_form(names)} with {dimension} = {expected}; "
                    f"got {name} {tuple(t.shape)} and {owner} {tuple(of.shape)}"
                )
        _check_kind(name, t, x0)


def check_activation(activation: str | None) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(map(repr, ACTIVATIONS))}; got {activation!r}")


def check_stack(
    dense: Tensor, categorical: Tensor, tables: Sequence[Tensor], bags: Sequence[Bag], pooling: str
) -> None:
    """The operands of an embedding stack: a table for each column of ids and for each bag, all of one device."""
    if pooling not in ("mean", "sum"):
        raise ValueError(f'pooling must be "mean" or "sum"; got {pooling!r}')
    check_batch(dense, categorical, bags)
    if len(tables) != categorical.shape[1] + len(bags):
        raise ValueError(
            f"there must be a table for each of {categorical.shape[1]} features and {len(bags)} bags; got {len(tables)}"
        )
    for k, table in enumerate(tables):
        if not isinstance(table, Tensor) or table.dim() != 2 or not table.is_floating_point():
            found = f"{tuple(table.shape)} {table.dtype}" if isinstance(table, Tensor) else type(table).__name__
            raise TypeError(f"feature {k}'s table must be floating point, (cardinality, n_e); got {found}")
        if table.device != dense.device:
            raise ValueError(f"feature {k}'s table must be on the device of dense, {dense.device}; got {table.device}")


def check_batch(dense: Tensor, categorical: Tensor, bags: Sequence[Bag]) -> None:
    """Dense (B, num_dense), ids (B, k), and for each bag B offsets into its values, with one weight each, or none."""
    _check_ids("categorical", categorical, dim=2)
    if not isinstance(dense, Tensor) or not dense.is_floating_point():
        raise TypeError(f"dense must be floating point; got {_kind(dense)}")
    if dense.dim() != 2:
        raise ValueError(f"dense must be (B, num_dense); got {tuple(dense.shape)}")
    if dense.shape[0] != categorical.shape[0]:
        raise ValueError(
            f"dense and categorical must have as many rows; got {tuple(dense.shape)} and {tuple(categorical.shape)}"
        )
    found = {"categorical": categorical}
    for k, bag in enumerate(bags, start=categorical.shape[1]):
        name, weights = f"feature {k}'s", bag.weights
        _check_ids(f"{name} values", bag.values, dim=1)
        _check_ids(f"{name} offsets", bag.offsets, dim=1)
        if bag.offsets.shape != dense.shape[:1]:
            raise ValueError(
                f"feature {k} must have one offset per row, {dense.shape[0]}; got {tuple(bag.offsets.shape)}"
            )
        found |= {f"{name} values": bag.values, f"{name} offsets": bag.offsets}
        if weights is None:
            continue
        if not isinstance(weights, Tensor) or not weights.is_floating_point():
            raise TypeError(f"{name} weights must be floating point; got {_kind(weights)}")
        if weights.shape != bag.values.shape:
            raise ValueError(
                f"feature {k} must have one weight per value; "
                f"got weights {tuple(weights.shape)} and values {tuple(bag.values.shape)}"
            )
        found[f"{name} weights"] = weights
    for name, t in found.items():
        if t.device != dense.device:
            raise ValueError(f"{name} must be on the device of dense, {dense.device}; got {t.device}")


def _check_x0(x0: Tensor) -> None:
    if not isinstance(x0, Tensor) or x0.dim() < 1:
        found = f"a tensor {tuple(x0.shape)}" if isinstance(x0, Tensor) else type(x0).__name__
        raise TypeError(f"x0 must be a tensor (..., d); got {found}")
    if x0.layout is not torch.strided:
        raise TypeError(f"x0 must be dense, {torch.strided}; got {x0.layout} of {tuple(x0.shape)}")


def _check_parameter(name: str, t: Tensor, x0: Tensor, names: tuple[str, ...]) -> None:
    """A parameter has one dimension for each of the ``names``; d is x0's number of features."""
    if t is None:
        raise TypeError(f"{name} is missing; x0 {tuple(x0.shape)} needs a {name} {_form(names)}")
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(t).__name__} and x0 {tuple(x0.shape)}")
    shape, d = t.shape, x0.shape[-1]
    if len(shape) != len(names) or shape[-1] != d or d == 0 or shape[0] == 0:
        raise ValueError(
            f"{name} must be {_form(names)} with d = {d}, none of them 0; "
            f"got {name} {tuple(shape)} and x0 {tuple(x0.shape)}"
        )
    _check_kind(name, t, x0)


def _check_kind(name: str, t: Tensor, x0: Tensor) -> None:
    if not (t.is_floating_point() and x0.is_floating_point()):
        raise TypeError(f"{name} and x0 must be floating point; got {name} {t.dtype} and x0 {x0.dtype}")
    if t.device != x0.device:
        raise ValueError(f"{name} must be on the device of x0; got {name} on {t.device} and x0 on {x0.device}")
    if t.layout is not torch.strided:
        raise TypeError(f"{name} must be dense, {torch.strided}; got {t.layout} of {tuple(t.shape)}")


def _form(names: tuple[str, ...]) -> str:
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


def _check_ids(name: str, t: Tensor, dim: int) -> None:
    if not isinstance(t, Tensor) or t.is_floating_point() or t.is_complex() or t.dtype == torch.bool:
        raise TypeError(f"{name} must hold integer ids; got {_kind(t)}")
    if t.dim() != dim:
        raise ValueError(f"{name} must be {'(B, k)' if dim == 2 else 'of one dimension'}; got {tuple(t.shape)}")


def _kind(value: object) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
