"""A table's sparse gradient within a compiled graph, as its rows and values.

Inductor asks every result of a graph for its storage, which a sparse tensor has not. PyTorch's compilers take a tensor
of this class apart (``__tensor_flatten__``), so that graphs know of rows and values alone, and put it together again
outside. There it is a sparse tensor to whoever asks: what autograd puts into ``.grad`` is a usual one. They look for
such classes only where an operand of the graph has one: that is what ``ANCHOR`` is for.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastcross.ops.embedding_gradients import sparse_gradient


class RowsGradient(Tensor):
    """``kind``: "heads", the form that ``kernels/fixed_rows.py`` describes; "sum", rows in any order; "anchor"."""

    rows: Tensor
    numbers: Tensor
    kind: str

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: type, rows: Tensor, numbers: Tensor, size: Sequence[int], kind: str = "heads") -> "RowsGradient":
        is_sparse = kind != "anchor"  # of which TorchDynamo takes no operand
        layout = torch.sparse_coo if is_sparse else torch.strided
        options: Any = {"dtype": numbers.dtype, "device": numbers.device, "layout": layout}
        made: Any = Tensor._make_wrapper_subclass(cls, size, **options, dispatch_layout=is_sparse)
        made.rows, made.numbers, made.kind = rows, numbers, kind
        return made

    def __init__(self, *args: Any) -> None:
        super().__init__()

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"RowsGradient({self.kind}, {tuple(self.shape)})"  # compilers print their operands

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["rows", "numbers"], self.kind

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], kind: str, size: Any, stride: Any) -> "RowsGradient":
        return RowsGradient(parts["rows"], parts["numbers"], size, kind)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if function is torch.ops.prim.layout.default:
            return torch.sparse_coo
        gradients = [each for each in args if isinstance(each, RowsGradient)]
        if all(type(each.rows) is Tensor and each.kind != "anchor" for each in gradients):
            return function(*(each.sparse() if isinstance(each, cls) else each for each in args), **(kwargs or {}))
        return _in_graph(function, gradients, args)

    def sparse(self) -> Tensor:
        if self.kind == "heads":
            return sparse_gradient(self.rows, self.numbers, list(self.shape), is_coalesced=False)
        contents = self.rows.unsqueeze(0), self.numbers, self.shape
        return torch.sparse_coo_tensor(*contents, check_invariants=False, is_coalesced=False)


def _in_graph(function: Callable[..., Any], gradients: list[RowsGradient], args: Any) -> Tensor:
    """What autograd does with gradients while a compiler looks on: a table that is used twice has two to be added."""
    first = gradients[0]
    if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
        return RowsGradient(first.rows, first.numbers, first.shape, first.kind)
    if function is torch.ops.aten.add.Tensor and len(gradients) == 2:
        rows, numbers = (torch.cat(parts) for parts in zip(*((g.rows, g.numbers) for g in gradients), strict=True))
        return RowsGradient(rows, numbers, first.shape, "sum")
    if function is torch.ops.aten.add.Tensor:
        (dense,) = (each for each in args if each is not first)
        # Into memory of its own: Inductor would add to a gradient that was expanded in place.
        return dense + dense.new_zeros(first.shape).index_add(0, first.rows, first.numbers)
    raise NotImplementedError(f"within a compiled graph a table's sparse gradient has no {function}")


_NOTHING = torch.zeros(0, dtype=torch.int64, device="cpu"), torch.zeros(0, 1, dtype=torch.float32, device="cpu")
ANCHOR = RowsGradient(*_NOTHING, (1, 1), "anchor")
