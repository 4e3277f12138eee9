"""Export a trained model for serving: one file from raw values to probabilities, or a graph with the encoder beside it.

    model.onnx                         raw values -> probability, in onnxruntime alone
    model.onnx, model.encoder/         encoded=True: ids -> logits
    model.pt2, model.encoder/          the same, compiled for this kind of machine

docs/serving.md describes the folder, and a reader for it that needs neither fastcross nor PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastcross.data.encoder import Encoder
from fastcross.files import building, naming
from fastcross.interop.export import (
    Port,
    check_target,
    encoded_inputs,
    encoded_output,
    export,
    to_onnx,
    trace,
    write_onnx,
)
from fastcross.models.base import Model

STRING_SPLIT = 20  # its first opset


@dataclass(frozen=True)
class Exported:
    """The files that were written, and the graph's inputs and output."""

    path: Path
    encoder: Path | None  # its folder, if the graph takes ids
    inputs: tuple[Port, ...]
    output: Port


def export_run(model: Model, encoder: Encoder, path: str | Path, *, encoded: bool = False) -> Exported:
    """Write a trained model and its encoder for serving.

    Args:
        model: on the CPU, in any mode.
        encoder: the encoder of the run that trained it.
        path: *.onnx or *.pt2.
        encoded: write an ONNX graph that takes encoded ids, with the encoder in a folder beside it. *.pt2 always does.

    Raises:
        ValueError: if ONNX has no operator for the encoder (a hash), or the path ends otherwise.
    """
    path = Path(path)
    to = path.suffix.removeprefix(".")
    check_target(path, to)
    if to == "pt2" or encoded:
        return _export_encoded(model, encoder, path, to)
    from fastcross.interop.raw_values import check_expressible, take_raw_values

    check_expressible(encoder)
    program = trace(model, example_inputs(encoder))
    converted = to_onnx(program, STRING_SPLIT if encoder.bags else None)
    inputs, output = take_raw_values(converted.model, encoder)
    with naming(path):
        write_onnx(converted, program, path)
    return Exported(path, None, tuple(inputs), output)


def example_inputs(encoder: Encoder) -> tuple[Any, ...]:
    """Example inputs of a model with these columns."""
    schema = encoder.schema
    dense = torch.zeros(2, len(schema.dense_names))
    categorical = torch.zeros(2, len(schema.cardinalities), dtype=torch.int64)
    ids, offsets = torch.zeros(3, dtype=torch.int64), torch.tensor([0, 1])
    weighted = encoder.columns.weights
    bags = tuple((ids, offsets, torch.ones(3)) if name in weighted else (ids, offsets) for name in schema.bag_names)
    return (dense, categorical, bags) if bags else (dense, categorical)


def _export_encoded(model: Model, encoder: Encoder, path: Path, to: str) -> Exported:
    folder = path.with_suffix(".encoder")
    if folder.exists() and not (folder / "encoder.json").is_file():
        raise ValueError(f"{folder} is there and is no encoder; it would be replaced: remove it, or name another file")
    # The model is renamed first, then the folder: a failure before that leaves both unchanged.
    with building(folder) as temporary:
        encoder.save(temporary)
        export(model, path, example_inputs(encoder), to)
    return Exported(path, folder, tuple(encoded_inputs(encoder)), encoded_output(encoder))
