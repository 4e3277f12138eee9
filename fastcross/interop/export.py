"""Export a model for serving: a compiled AOTInductor package (``.pt2``) or ONNX.

While a model is exported the operators are the closed form in PyTorch's own operators: two passes over x0 whatever the
depth, and nothing of fastcross is needed where the file runs.
"""

import importlib.util
import io
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastcross.extras import needs
from fastcross.files import atomic, naming
from fastcross.interop.trace import trace

TARGETS = {"pt2": (), "onnx": ("onnx", "onnxscript")}
# A protobuf holds 2 GiB: larger tables go into a second file beside it, which the first one names.
PROTOBUF_BYTES = 2**30


def export(model: nn.Module, path: str | Path, example_inputs: Any, to: str = "pt2") -> Path:
    """Write ``model``, in evaluation mode, to a file that takes any batch size.

    Args:
        model: any module whose inputs are tensors with the batch first; our DCN, or another package's after ``swap``.
        path: the file to write.
        example_inputs: a tensor or a tuple of what the model's forward takes; only shapes and dtypes matter. A bag is a
            tuple (values, offsets) or (values, offsets, weights).
        to: "pt2", compiled machine code for this kind of machine: load it with
            ``torch._inductor.aoti_load_package(path)``; or "onnx", for onnxruntime and others.

    Returns:
        The path. Tables of more than 1 GiB lie in a second file beside an ONNX file, named ``*.onnx.data``.
    """
    path = check_target(path, to)
    program = trace(model, example_inputs)
    with naming(path):
        if to == "pt2":
            _write_package(program, path)
        else:
            from fastcross.interop.onnx import to_onnx

            write_onnx(to_onnx(program), program, path)
    return path


def check_target(path: str | Path, to: str) -> Path:
    """The path; raises where ``to`` cannot be written there, or not here."""
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


def write_onnx(converted: Any, program: torch.export.ExportedProgram, path: Path) -> None:
    """Save the ``torch.onnx.ONNXProgram`` that the program was converted to."""
    size = sum(value.nbytes for value in program.state_dict.values())
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        converted.save(str(Path(folder) / path.name), external_data=size > PROTOBUF_BYTES)
        for name in sorted(os.listdir(folder), reverse=True):  # the first file last
            with atomic(path.with_name(name)) as temporary:
                os.replace(Path(folder) / name, temporary)


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
    """A file whose first error is kept for later: PyTorch's archive writer aborts the process when a write fails."""

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
    """What the compiler said first, and the room it had: its files go to the temporary folder."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    folder = tempfile.gettempdir()
    return f" ({shutil.disk_usage(folder).free / 2**20:,.0f} MiB are free in {folder}): {said}"
