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
        raise ModuleNotFoundError(
            f"exporting to {to} needs {' and '.join(missing)}; install them with: pip install 'fastcross[export]'"
        )
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
        torch.onnx.export(program, (), str(path), dynamo=True, external_data=size > 2**30, verbose=False)
    return path


def trace(model: nn.Module, example_inputs: Any) -> torch.export.ExportedProgram:
    """``torch.export`` of the model in evaluation mode, for any batch size from 1.

    The first tensor's first dimension is the batch, and that of every input as long; others vary on their own.
    """
    inputs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    tensors = [value for value in pytree.tree_leaves(inputs) if isinstance(value, Tensor) and value.dim()]
    if not tensors or not len(tensors[0]):
        raise ValueError("example_inputs must begin with a tensor of at least one row")
    if len(tensors[0]) == 1:  # torch.export would take a batch of one for a constant
        inputs = pytree.tree_map_only(Tensor, lambda x: torch.cat((x, x)) if x.dim() and len(x) == 1 else x, inputs)
    batch, rows = torch.export.Dim("batch", min=1), max(len(tensors[0]), 2)

    def dynamic(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return None
        return {0: batch if len(value) == rows else torch.export.Dim.DYNAMIC}

    with _evaluating(model), torch.no_grad():
        return torch.export.export(model, inputs, dynamic_shapes=pytree.tree_map(dynamic, inputs))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
