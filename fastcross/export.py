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
    program = trace(model, example_inputs)
    if to == "pt2":
        if path.suffix != ".pt2":
            raise ValueError(f'a package for to="pt2" must be named *.pt2; got {path.name}')
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    else:
        torch.onnx.export(program, (), str(path), dynamo=True, external_data=False, verbose=False)
    return path


def trace(model: nn.Module, example_inputs: Any) -> torch.export.ExportedProgram:
    """``torch.export`` of the model in evaluation mode, with one symbol for the batch size of all inputs."""
    inputs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    # torch.export takes a batch of one for a constant.
    inputs = pytree.tree_map_only(Tensor, _at_least_two_rows, inputs)
    batch = torch.export.Dim("batch", min=1)
    shapes = pytree.tree_map(lambda value: {0: batch} if isinstance(value, Tensor) else None, inputs)
    with _evaluating(model), torch.no_grad():
        return torch.export.export(model, inputs, dynamic_shapes=shapes)


def _at_least_two_rows(x: Tensor) -> Tensor:
    return torch.cat((x, x)) if len(x) == 1 else x


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
