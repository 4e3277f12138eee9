"""Export a model for serving: a compiled AOTInductor package (``.pt2``) or ONNX.

Exported operators are the closed form in PyTorch's own operators: two passes over x0 at any depth. The file runs
without fastcross.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fastcross.extras import needs
from fastcross.files import atomic, naming

if TYPE_CHECKING:
    from fastcross.data.encoder import Encoder

TARGETS = {"pt2": (), "onnx": ("onnx", "onnxscript")}
# A protobuf is limited to 2 GiB. Larger tables go into a second file beside it.
PROTOBUF_BYTES = 2**30
PREDICTION = "prediction"  # the output of a regression
POOLING = ("sum", "mean", "max")  # as aten numbers them


def export(model: nn.Module, path: str | Path, example_inputs: Any, to: str = "pt2") -> Path:
    """Write ``model``, in evaluation mode, to a file that takes any batch size.

    Args:
        model: any module whose inputs are tensors with the batch first: a DCN, or another package's after ``swap``.
        path: the file to write.
        example_inputs: a tensor or a tuple of the arguments of forward; only shapes and dtypes matter. A multi-valued
            feature is a tuple (values, offsets) or (values, offsets, weights).
        to: "pt2", machine code for this kind of machine, loaded by ``torch._inductor.aoti_load_package(path)``; or
            "onnx", for onnxruntime and others.

    Returns:
        The path. Tables of more than 1 GiB are in a second file beside an ONNX file, named ``*.onnx.data``.
    """
    path = check_target(path, to)
    program = trace(model, example_inputs)
    with naming(path):
        if to == "pt2":
            _write_package(program, path)
        else:
            write_onnx(to_onnx(program), program, path)
    return path


def check_target(path: str | Path, to: str) -> Path:
    """The path; raises if ``to`` cannot be written there, or a package for it is missing."""
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
    return path


def trace(model: nn.Module, example_inputs: Any) -> torch.export.ExportedProgram:
    """``torch.export`` of the model in evaluation mode, for any batch size from 1.

    The first tensor's first dimension is the batch, and so is that of every input of the same length. Other first
    dimensions vary independently. A bag, a tuple (values, offsets) or (values, offsets, weights), has one offset per
    row and any number of values, also none.
    """
    inputs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    rows = _rows(inputs)
    if not rows:
        raise ValueError("example_inputs must begin with a tensor of at least one row")
    if rows == 1:  # torch.export would treat it as a constant
        inputs = pytree.tree_map_only(Tensor, lambda x: torch.cat((x, x)) if x.dim() and len(x) == 1 else x, inputs)
        rows = 2
    inputs = _map(inputs, rows, lambda x: x, _with_two_values)
    # Copies: torch.export would tie the lengths of two inputs that are the same tensor.
    inputs = pytree.tree_map_only(Tensor, torch.clone, inputs)
    shapes = _first_dimensions(inputs, batch=torch.export.Dim("batch", min=1), other=torch.export.Dim.DYNAMIC)
    with _evaluating(model), torch.no_grad():
        return torch.export.export(model, inputs, dynamic_shapes=shapes)


def _first_dimensions(inputs: tuple, batch: Any, other: Any) -> Any:
    """For each input its first dimension: ``batch``, or ``other`` if its length differs."""
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
    """The bag with two values: torch.export would treat none or one as a constant."""
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


def _write_package(program: torch.export.ExportedProgram, path: Path) -> None:
    with atomic(path) as temporary, open(temporary, "wb") as file:
        sink = _Sink(file)
        try:
            torch._inductor.aoti_compile_and_package(program, package_path=sink)  # type: ignore[arg-type]
        except RuntimeError as error:
            raise RuntimeError(f"{path}: PyTorch's compiler failed{_summary(error)}") from error
        if sink.error is not None:
            raise sink.error


class _Sink(io.RawIOBase):
    """A file that keeps its first error for later: PyTorch's archive writer aborts the process when a write fails."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        if self.error is None:
            try:
                self.file.write(data)
                self.file.flush()
            except OSError as error:
                self.error = error
        return len(data)

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """PyTorch writes from the start to the end, then goes back as if to read."""
        return 0


def _summary(error: Exception) -> str:
    """The compiler's first message, and the free space in the temporary folder, where its files go."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    folder = tempfile.gettempdir()
    return f" ({shutil.disk_usage(folder).free / 2**20:,.0f} MiB are free in {folder}): {said}"


def to_onnx(program: torch.export.ExportedProgram, opset: int | None = None) -> Any:
    """A ``torch.onnx.ONNXProgram`` with the program's inputs and a first dimension named ``batch``.

    opset: the version of ONNX's operators; None for the default of this version of PyTorch.
    """
    names = _first_dimensions(program.example_inputs[0], batch="batch", other=None)
    program = program.run_decompositions({torch.ops.aten.embedding_bag.padding_idx: embedding_bag})
    with _quiet():
        return torch.onnx.export(program, (), dynamo=True, dynamic_shapes=names, verbose=False, opset_version=opset)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the converter's messages about packages that no cross network needs, and about its own names."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """aten's embedding_bag in ONNX's operators. Of its four results, evaluation uses only the first.

        start_j = number of rows that begin at value j;   row_n = Σ_{j ≤ n} start_j - 1    (a scatter, a cumulative sum)
        pooled_m = Σ_{n: row_n = m} weight_n table[values_n]                               (a gather, a scatter)

    torch.onnx's own translation loops over the rows and is 200 times slower at 512 rows of 4 values.
    """
    if POOLING[mode] == "max" or include_last_offset or (padding_idx is not None and padding_idx >= 0):
        return NotImplemented
    starts = offsets.new_zeros(indices.shape[0] + 1).scatter_add(0, offsets, torch.ones_like(offsets))
    row = starts.cumsum(0)[:-1] - 1
    values = F.embedding(indices, weight)
    if per_sample_weights is not None:
        values = values * per_sample_weights.unsqueeze(1)
    pooled = values.new_zeros(offsets.shape[0], weight.shape[1])
    pooled = pooled.scatter_add(0, row.unsqueeze(1).expand_as(values), values)
    if POOLING[mode] == "mean":
        count = pooled.new_zeros(offsets.shape).scatter_add(0, row, values.new_ones(indices.shape))
        pooled = pooled / count.clamp(min=1).unsqueeze(1)
    return pooled, offsets, offsets, offsets


def write_onnx(converted: Any, program: torch.export.ExportedProgram, path: Path) -> None:
    """Save a program that was converted to a ``torch.onnx.ONNXProgram``."""
    size = sum(value.nbytes for value in program.state_dict.values())
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        converted.save(str(Path(folder) / path.name), external_data=size > PROTOBUF_BYTES)
        for name in sorted(os.listdir(folder), reverse=True):  # the first file last
            with atomic(path.with_name(name)) as temporary:
                os.replace(Path(folder) / name, temporary)


@dataclass(frozen=True)
class Port:
    """An input or an output of an exported graph."""

    name: str
    type: str  # of its elements, as onnxruntime calls it: string, double, float, int64
    shape: str
    meaning: str


def encoded_inputs(encoder: Encoder) -> list[Port]:
    """The inputs of a graph that takes ids. A bag is two or three inputs, named by torch.export."""
    schema = encoder.schema
    ports = [
        Port("dense", "float", f"(batch, {len(schema.dense_names)})", _listed(schema.dense_names)),
        Port("categorical", "int64", f"(batch, {len(schema.cardinalities)})", _listed(schema.categorical_names)),
    ]
    for i, name in enumerate(schema.bag_names):
        ports.append(Port(f"bags_{i}_0", "int64", "(values,)", f"the ids of {name}, row after row"))
        ports.append(Port(f"bags_{i}_1", "int64", "(batch,)", f"where the ids of {name} begin in each row"))
        if name in encoder.columns.weights:
            ports.append(Port(f"bags_{i}_2", "float", "(values,)", f"the weights of {name}'s ids"))
    return ports


def encoded_output(encoder: Encoder) -> Port:
    classes = encoder.classes
    if not classes:
        return Port(PREDICTION, "float", "(batch,)", f"of {encoder.columns.label}, a quantity")
    if len(classes) == 2:
        return Port("logit", "float", "(batch,)", f"sigmoid of it is the probability of the class {classes[1]}")
    return Port("logits", "float", f"(batch, {len(classes)})", f"softmax of them: the classes {', '.join(classes)}")


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names[:6]) + (f" … {names[-1]}" if len(names) > 6 else "")
