"""Every private interface of TorchRec and of PyTorch's sharded tensors that fastcross uses.

TorchRec has no public access to the kernels that look up rows, or a way to replace them. PyTorch has the sharded
tensors that TorchRec returns under a private name. Each function here falls back on a public interface or names what is
missing. tests/distributed/test_internals.py tests each.
"""

from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

try:
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata
except ImportError as error:
    raise ImportError(
        f"sharded training was written for PyTorch 2.13 and TorchRec 1.8; PyTorch {torch.__version__} keeps its "
        f"sharded tensors elsewhere ({error})"
    ) from error

__all__ = ["Shard", "ShardMetadata", "ShardedTensor", "ShardedTensorMetadata", "lookup_kernels", "sharded_tensor"]


def sharded_tensor(shards: Sequence[Shard], metadata: ShardedTensorMetadata) -> ShardedTensor:
    """A sharded tensor of which this rank holds ``shards``; each rank calls this."""
    private = getattr(ShardedTensor, "_init_from_local_shards_and_global_metadata", None)
    if private is not None:
        return private(list(shards), metadata)
    from torch.distributed._shard.sharded_tensor import init_from_local_shards

    return init_from_local_shards(list(shards), *metadata.size)  # asks the other ranks for what metadata says


def lookup_kernels(collection: Any) -> Iterator[tuple[Any, nn.Module]]:
    """The kernels of a ShardedEmbeddingBagCollection, each with fbgemm's operator, whose rows it looks up."""
    found = 0
    for lookup in getattr(collection, "_lookups", ()):
        for kernel in getattr(lookup, "_emb_modules", ()):
            operator: Any = getattr(kernel, "_emb_module", None)
            if not hasattr(operator, "split_embedding_weights") or not hasattr(kernel, "config"):
                raise RuntimeError(_changed(f"a kernel {type(kernel).__name__} without fbgemm's operator"))
            found += 1
            yield kernel, operator
    # A rank may hold no shard at all, but then it has lookups without kernels.
    if not found and not hasattr(collection, "_lookups"):
        raise RuntimeError(_changed(f"no lookups in a {type(collection).__name__}"))


def replace_operator(kernel: Any, operator: nn.Module) -> None:
    """Make ``kernel`` look up rows with another operator."""
    kernel._emb_module = operator
    if kernel.emb_module is not operator:
        raise RuntimeError(_changed(f"a {type(kernel).__name__} that keeps its operator elsewhere"))


def _changed(found: str) -> str:
    try:
        installed = version("torchrec")
    except PackageNotFoundError:
        installed = "unknown"
    return (
        f"fastcross's rows inside TorchRec's tables were written for TorchRec 1.8; TorchRec {installed} has {found}. "
        "Train with the optimizer sgd and embedding fbgemm, or in one process"
    )
