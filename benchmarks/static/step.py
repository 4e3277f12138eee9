"""A whole training step as a GPU would run it, counted: launches, waits of the host, bytes that our kernels move.

``python -m benchmarks.static.step`` prints them for a DCN of the paper's size. The tensors are the CPU's, the code is
that of the Triton path, and a launch does nothing but be counted: what memory holds is zero, and shapes are right. Any
operator whose result the host would have to wait for raises :class:`HostSync`.

Ours are launches of Triton kernels and the sort of the keys. All are these and PyTorch's operators, without views,
allocations and what only changes a tensor's description; each counts as one launch, though the library's sort, norm of
many tensors and batch normalisation are several kernels. Bytes are those of the buffers that our kernels are given,
each once per launch, and of the rows of tables and moments, if no two rows of the batch share an id; the sort passes
over its buffers several times. What is beyond the floor are mostly the tables' gradients, which are written and read
again: their norm is known, for clipping, only when all of them are.
"""

import contextlib
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

from benchmarks.static.cases import FLOOR
from fastcross import DCN, optim
from fastcross.batch import Bag
from fastcross.data import Batch
from fastcross.kernels.gpu.launch import Hardware
from fastcross.ops import backends
from fastcross.training.config import TrainingConfig
from fastcross.training.step import ALONE, Step

OURS, ALL = 16, 90  # launches of a step, at most
FEATURES, DENSE, IDS = 26, 13, 1000
DIMS = (39,) * 25 + (38,)  # with the dense features d = 1026

WAITS = {  # operators whose result, or its size, depends on what is in a tensor
    "_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "nonzero_numpy", "argwhere", "masked_select",
    "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "coalesce", "_coalesce",
    "bincount", "repeat_interleave", "to_dense", "_to_dense",
}  # fmt: skip
READS = {"item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "__array__", "__complex__"}
ALLOCATIONS = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}
DESCRIPTIONS = {  # operators that launch nothing
    "detach", "alias", "lift_fresh", "_indices", "_values", "_nnz", "sparse_dim", "dense_dim", "is_coalesced",
    "_sparse_coo_tensor_unsafe", "_sparse_coo_tensor_with_dims_and_tensors", "_coalesced_", "set_", "resize_",
    "_unsafe_view", "is_same_size", "_has_same_storage_numel", "sym_size", "result_type",
}  # fmt: skip


UNTOUCHED = {"_runs_kernel": {"values_ptr"}}  # where no two rows share an id: there is no run to put together


class HostSync(RuntimeError):
    """A step on a GPU would wait for the device here."""


class Counted(TorchDispatchMode):
    """Counts the operators that launch a kernel, and raises at those that wait; fresh memory is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()  # of our kernels' operands

    @property
    def ours(self) -> int:
        return self.kernels.total() + self.operators["sort"]

    @property
    def all(self) -> int:
        return self.kernels.total() + self.operators.total()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        if name in WAITS or (name in ("index", "index_put", "index_put_") and any(map(_is_mask, args[1]))):
            raise HostSync(f"the host would wait for {function}")
        if name == "clone" and args[0].is_sparse:
            return _taken_over(args[0])
        found = function(*args, **kwargs)
        if name in ALLOCATIONS:
            found.zero_()
        elif function.namespace == "aten" and name not in DESCRIPTIONS and not _is_view(function):
            self.operators[name] += 1
            if name == "sort":
                self.bytes[name] += _storage_bytes((args, found))
        return found

    def launch(self, kernel: JITFunction, *args: Any, **options: Any) -> None:
        name = kernel.fn.__name__
        self.kernels[name] += 1
        named = zip(kernel.arg_names, args, strict=False)
        self.bytes[name] += _storage_bytes([value for key, value in named if key not in UNTOUCHED.get(name, ())])


class NoReads(TorchFunctionMode):
    """Raises where Python reads a tensor, which of a CPU tensor goes past every operator."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        to_host = name == "to" and "cpu" in [value for value in (*args[1:], *(kwargs or {}).values())]
        if name in READS or to_host:
            raise HostSync(f"the host would wait for Tensor.{name}")
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def counted() -> Iterator[Counted]:
    """Within it tensors on the CPU go the way of a GPU's, and their launches are counted."""
    mode = Counted()

    def launch(kernel: JITFunction, *args: Any, **options: Any) -> None:
        mode.launch(kernel, *args, **options)

    with (
        mock.patch.object(JITFunction, "run", launch),
        mock.patch("fastcross.kernels.gpu.launch.hardware_of", return_value=Hardware(132, 32)),
        mock.patch.object(backends, "is_interpreting", return_value=True),
        mock.patch.object(backends, "kernel", lambda name, backend, x: backends.launcher(name)),  # in plain sight
        NoReads(),
        mode,
    ):
        yield mode


def make_step(
    rows: int,
    dims: tuple[int, ...] = DIMS,
    deep: tuple[int, ...] = (1024, 1024),
    *,
    bf16: bool = False,
    bags: int = 0,
    name: str = "adam",
    clip_norm: float = 100.0,
) -> Callable[[], object]:
    """The training loop's step, of a DCN on the Triton path; its rate and its number are tensors, as for a capture.

    ``bags``: of the features these, the last ones, have two values in each row; every other one has weights.
    """
    single, of_bags = len(dims) - bags, [IDS] * bags
    with torch.random.fork_rng():
        model = DCN(
            [IDS] * single, DENSE, dims, bag_cardinalities=of_bags, cross_layers=6, deep_layers=deep, backend="triton"
        )
        values, offsets = torch.randint(IDS, (2 * rows,)), torch.arange(0, 2 * rows, 2)
        given = tuple(Bag(values, offsets, torch.ones(2 * rows) if i % 2 else None) for i in range(bags))
        batch = Batch(torch.randn(rows, DENSE), torch.randint(IDS, (rows, single)), given, torch.ones(rows))
    optimizer = optim.configure(model, name=name, capturable=True, backend="triton")
    no_cache: Any = None  # which knows how rows are weighted: these are not
    config = TrainingConfig(bf16=bf16, clip_norm=clip_norm)
    step = Step(model, optimizer, no_cache, config, rows, ALONE)

    def call() -> None:
        optimizer.set_lr(1e-3)
        step(batch)

    return call


def count(step: Callable[[], object]) -> Counted:
    """The second step: the first makes what is kept, descriptions of tables and moments."""
    with counted():
        step()
    with counted() as found:
        step()
    return found


def table_rows(rows: int, dims: tuple[int, ...]) -> int:
    """Bytes of tables and moments, which kernels know by their addresses: the rows read by the forward pass, and w, m
    and v read and written by Adam."""
    return 7 * 4 * rows * sum(dims)


def floor(rows: int, dims: tuple[int, ...]) -> int:
    """Bytes that no implementation of these operators can do without: ids, dense features, the tables' rows, x0 and its
    gradient written once and read once by what follows them, and the cross network's passes over x0."""
    width = sum(dims) + DENSE
    cross = sum(FLOOR["cross_logits_fwd"] + FLOOR["cross_logits_bwd"])
    return rows * (8 * len(dims) + 4 * (DENSE + width + cross * width + sum(dims))) + table_rows(rows, dims)


def main() -> int:
    failed = False
    for rows, bf16 in itertools.product((512, 4096), (False, True)):
        found = count(make_step(rows, bf16=bf16))
        failed |= found.ours > OURS or found.all > ALL
        kept, least = table_rows(rows, DIMS), floor(rows, DIMS)
        shape = f"B = {rows}, {FEATURES} features, d = {sum(DIMS) + DENSE}, L = 6, deep 1024 x 1024"
        print(f"{shape}, Adam, clipping{', bfloat16 autocast' if bf16 else ''}")
        print("  host waits      0")
        print(f"  launches, ours  {found.ours} (at most {OURS}): {_listed(found.kernels)}, the sort")
        print(f"  launches, all   {found.all} (at most {ALL}): ours, {_listed(found.operators - Counter(sort=1))}")
        print(f"  bytes, ours     {(found.bytes.total() + kept) / 1e6:.1f} MB; the floor is {least / 1e6:.1f} MB")
        by_kernel = ", ".join(f"{name} {size / 1e6:.1f}" for name, size in found.bytes.most_common())
        print(f"                  rows of tables and moments {kept / 1e6:.1f}, {by_kernel}")
    return 1 if failed else 0


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())


def _taken_over(gradient: Tensor) -> Tensor:
    """What autograd puts into ``.grad``: the same memory. It makes a copy only where a mode like this one looks on."""
    contents = gradient._indices(), gradient._values(), gradient.shape
    return torch.sparse_coo_tensor(*contents, check_invariants=False, is_coalesced=gradient.is_coalesced())


def _storage_bytes(operands: Any) -> int:
    """Of whole buffers: a slice stands for all slices that a kernel reaches from it."""
    storages = [leaf.untyped_storage() for leaf in tree_leaves(operands) if isinstance(leaf, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _is_view(function: Any) -> bool:
    returned = [value.alias_info for value in function._schema.returns]
    return bool(returned) and all(alias is not None and not alias.is_write for alias in returned)


if __name__ == "__main__":
    sys.exit(main())
