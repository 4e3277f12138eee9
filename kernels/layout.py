"""The layout of rows in memory and the dtype of sums, for all backends and shape rules."""

import torch
from torch import Tensor

# A row stride within this many elements of d is padding for aligned loads. Outputs keep it.
MAX_PADDING = 64


def accumulation_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The dtype of dots, the recurrence and weight gradients: float64 if any operand is, otherwise float32."""
    for t in tensors:
        if t is not None and t.dtype == torch.float64:
            return torch.float64
    return torch.float32


def stride_like(x: Tensor) -> int:
    """The row stride of a result like ``x``: that of ``x``, if it is only padding."""
    stride, d = x.stride(0), x.shape[1]
    return stride if d < stride <= d + MAX_PADDING else d


def empty_rows(x: Tensor) -> Tensor:
    """An uninitialised tensor like the rows ``x``, with the same padding between rows."""
    return x.new_empty_strided(x.shape, (stride_like(x), 1))


def kept_sizes(rows: int, M: int, d: int, packed: torch.dtype, accumulation: torch.dtype) -> tuple[int, int, int, int]:
    """Sizes of the Triton kernels' buffer, in elements: c, β_L, [W; V] with ``rows`` rows of dtype ``packed``, and
    dots.

    Rows of parameters are padded to a multiple of 16 elements, and c too, so that each part is aligned.
    """
    columns = -(-d // 16) * 16
    return -(-rows // 16) * 16, columns, rows * columns * packed.itemsize // accumulation.itemsize, rows * M


def kept_shape(rows: int, x0: Tensor, packed: torch.dtype, accumulation: torch.dtype) -> tuple[int, ...]:
    """The shape of the kept dots with ``rows`` rows of parameters; on a GPU, of Triton's buffer."""
    M, d = x0.shape
    return (sum(kept_sizes(rows, M, d, packed, accumulation)),) if x0.device.type == "cuda" else (rows, M)
