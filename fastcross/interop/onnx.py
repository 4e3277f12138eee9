"""An exported program as ONNX, with bags of embeddings in operators that ONNX has.

    start_j = how many rows begin at value j;   row_n = Σ_{j ≤ n} start_j - 1          (a scatter, a cumulative sum)
    pooled_m = Σ_{n: row_n = m} weight_n table[values_n]                               (a gather, a scatter)

torch.onnx's own translation of embedding_bag is a loop over the rows: 200 times as slow at 512 rows of 4 values.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastcross.interop.trace import first_dimensions

MODES = ("sum", "mean", "max")  # as aten numbers them


def to_onnx(program: torch.export.ExportedProgram, opset: int | None = None) -> Any:
    """A ``torch.onnx.ONNXProgram`` that takes what the program takes, with ``batch`` as its first dimension.

    opset: the version of ONNX's operators; None for the one that this version of PyTorch writes best.
    """
    names = first_dimensions(program.example_inputs[0], batch="batch", other=None)
    program = program.run_decompositions({torch.ops.aten.embedding_bag.padding_idx: embedding_bag})
    with _quiet():
        return torch.onnx.export(program, (), dynamo=True, dynamic_shapes=names, verbose=False, opset_version=opset)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the converter's remarks about packages that no cross network needs, and about its own names."""
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
    """aten's embedding_bag, of whose four results only the first is used in evaluation."""
    if MODES[mode] == "max" or include_last_offset or (padding_idx is not None and padding_idx >= 0):
        return NotImplemented
    starts = offsets.new_zeros(indices.shape[0] + 1).scatter_add(0, offsets, torch.ones_like(offsets))
    row = starts.cumsum(0)[:-1] - 1
    values = F.embedding(indices, weight)
    if per_sample_weights is not None:
        values = values * per_sample_weights.unsqueeze(1)
    pooled = values.new_zeros(offsets.shape[0], weight.shape[1])
    pooled = pooled.scatter_add(0, row.unsqueeze(1).expand_as(values), values)
    if MODES[mode] == "mean":
        count = pooled.new_zeros(offsets.shape).scatter_add(0, row, values.new_ones(indices.shape))
        pooled = pooled / count.clamp(min=1).unsqueeze(1)
    return pooled, offsets, offsets, offsets
