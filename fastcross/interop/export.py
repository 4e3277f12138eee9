"""Export a model for serving: a compiled AOTInductor package (``.pt2``) or ONNX.

While a model is exported the operators are the closed form in PyTorch's own operators: two passes over x0 whatever the
depth, and nothing of fastcross is needed where the file runs.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fastcross.extras import needs

TARGETS = {"pt2": (), "onnx": ("onnx", "onnxscript")}


def export(model: nn.Module, path: str | Path, example_inputs: Any, to: str = "pt2") -> Path:
    """Write ``model``, in evaluation mode, to a file that takes any batch size.

    Args:
        model: any module whose inputs are tensors with the batch first; our DCN, or another package's after ``swap``.
        path: the file to write.
        example_inputs: a tensor or a tuple of what the model's forward takes; only shapes and dtypes matter.
        to: "pt2", compiled machine code for this kind of machine: load it with
            ``torch._inductor.aoti_load_package(path)``; or "onnx", for onnxruntime and others.

    Returns:
        The path.
    """
    if to not in TARGETS:
        raise ValueError(f"to must be one of {', '.join(TARGETS)}; got {to!r}")
    missing = [package for package in TARGETS[to] if importlib.util.find_spec(package) is None]
    if missing:
        raise ModuleNotFoundError(needs(f"exporting to {to}", *missing))
    path = Path(path)
    if path.suffix != f".{to}":
        raise ValueError(f'a file for to="{to}" must be named *.{to}; got {path.name}')
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} to")
    program = trace(model, example_inputs)
    if to == "pt2":
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    else:
        # A protobuf holds 2 GiB: larger tables go into a second file beside it.
        size = sum(value.nbytes for value in program.state_dict.values())
        names = _first_dimensions(_at_least_two_rows(example_inputs), batch="batch", other=None)
        torch.onnx.export(
            program, (), str(path), dynamo=True, dynamic_shapes=names, external_data=size > 2**30, verbose=False
        )
    return path


def trace(model: nn.Module, example_inputs: Any) -> torch.export.ExportedProgram:
    """``torch.export`` of the model in evaluation mode, for any batch size from 1.

    The first tensor's first dimension is the batch, and that of every input as long; others vary on their own.
    """
    inputs = _at_least_two_rows(example_inputs)
    shapes = _first_dimensions(inputs, batch=torch.export.Dim("batch", min=1), other=torch.export.Dim.DYNAMIC)
    with _evaluating(model), torch.no_grad():
        return torch.export.export(model, inputs, dynamic_shapes=shapes)


def _at_least_two_rows(example_inputs: Any) -> tuple:
    """The inputs as a tuple; a batch of one twice, since torch.export would take it for a constant."""
    inputs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    rows = _rows(inputs)
    if not rows:
        raise ValueError("example_inputs must begin with a tensor of at least one row")
    if rows > 1:
        return inputs
    return pytree.tree_map_only(Tensor, lambda x: torch.cat((x, x)) if x.dim() and len(x) == 1 else x, inputs)


def _first_dimensions(inputs: tuple, batch: Any, other: Any) -> Any:
    """What torch.export wants to know of each input: its first dimension is ``batch``, or ``other`` if not as long."""
    rows = _rows(inputs)

    def describe(value: Any) -> dict[int, Any] | None:
        if not isinstance(value, Tensor) or not value.dim():
            return None
        return {0: batch if len(value) == rows else other}

    return pytree.tree_map(describe, inputs)


def _rows(inputs: tuple) -> int:
    return next((len(value) for value in pytree.tree_leaves(inputs) if isinstance(value, Tensor) and value.dim()), 0)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
