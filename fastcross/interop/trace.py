"""``torch.export`` of a model for any batch size, and for bags of any length."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


def trace(model: nn.Module, example_inputs: Any) -> torch.export.ExportedProgram:
    """``torch.export`` of the model in evaluation mode, for any batch size from 1.

    The first tensor's first dimension is the batch, and that of every input as long; others vary on their own. A bag, a
    tuple (values, offsets) or (values, offsets, weights), has one offset per row and any number of values, even none.
    """
    inputs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    rows = _rows(inputs)
    if not rows:
        raise ValueError("example_inputs must begin with a tensor of at least one row")
    if rows == 1:  # torch.export would take it for a constant
        inputs = pytree.tree_map_only(Tensor, lambda x: torch.cat((x, x)) if x.dim() and len(x) == 1 else x, inputs)
        rows = 2
    inputs = _map(inputs, rows, lambda x: x, _with_two_values)
    # Copies: torch.export would give two inputs that are the same tensor the same length ever after.
    inputs = pytree.tree_map_only(Tensor, torch.clone, inputs)
    shapes = first_dimensions(inputs, batch=torch.export.Dim("batch", min=1), other=torch.export.Dim.DYNAMIC)
    with _evaluating(model), torch.no_grad():
        return torch.export.export(model, inputs, dynamic_shapes=shapes)


def first_dimensions(inputs: tuple, batch: Any, other: Any) -> Any:
    """For each input what its first dimension is: ``batch``, or ``other`` if it is not as long."""
    rows = _rows(inputs)

    def of_tensor(x: Any) -> dict[int, Any] | None:
        return {0: batch if len(x) == rows else other} if isinstance(x, Tensor) and x.dim() else None

    return _map(inputs, rows, of_tensor, lambda bag: ({0: other}, {0: batch}, {0: other})[: len(bag)])


def _rows(inputs: tuple) -> int:
    return next((len(x) for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor) and x.dim()), 0)


def _map(value: Any, rows: int, leaf: Callable[[Any], Any], bag: Callable[[tuple], Any]) -> Any:
    """The same structure, with ``leaf`` of each tensor and ``bag`` of each bag of ``rows`` rows."""
    if isinstance(value, dict):
        return {key: _map(each, rows, leaf, bag) for key, each in value.items()}
    if not isinstance(value, list | tuple):
        return leaf(value)
    if _is_bag(value, rows):
        return bag(value)  # type: ignore[arg-type]
    return type(value)(_map(each, rows, leaf, bag) for each in value)


def _is_bag(value: Any, rows: int) -> bool:
    tensors = isinstance(value, tuple) and len(value) in (2, 3) and all(isinstance(x, Tensor) for x in value)
    if not tensors or any(x.dim() != 1 for x in value):
        return False
    integers = all(x.dtype in (torch.int64, torch.int32) for x in value[:2])
    return integers and len(value[1]) == rows and all(len(x) == len(value[0]) for x in value[2:])


def _with_two_values(bag: tuple) -> tuple:
    """No value and a single one would be taken for constants, too."""
    values, offsets, *weights = bag
    if len(values) > 1:
        return bag
    return values.new_zeros(2), offsets, *(w.new_ones(2) for w in weights)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
