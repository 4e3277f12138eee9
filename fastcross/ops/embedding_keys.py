"""The embedding stack on a GPU: nothing in it waits for the device, neither the ids' check nor the tables' gradients.

The forward pass writes a key for each id beside x0; the backward pass sorts the keys of all tables at once. A table's
gradient has an entry for each id of the batch (``kernels/fixed_rows.py``), and what is wrong with ids is recorded
(``kernels/faults.py``).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastcross.kernels import embedding as plain
from fastcross.kernels import faults as faults_of
from fastcross.kernels import fixed_rows
from fastcross.kernels.rows import accumulation_dtype, as_rows
from fastcross.ops import dispatch, internals
from fastcross.ops.embedding_gradients import Bags, sparse_gradient, split, tables_bwd, weights_bwd
from fastcross.ops.rows_gradient import ANCHOR, RowsGradient
from fastcross.ops.sparse_gradients import announce, watch_optimizers


def stack(
    dense: Tensor,
    ids: Tensor,
    bags: Bags,
    tables: Sequence[Tensor],
    faults: Tensor | None,
    *,
    pooling: str,
    sparse: bool,
    backend: str,
) -> Tensor:
    """x0. Without ``faults`` to record them in, wrong ids are raised here, which waits for the device."""
    values, offsets, weights = bags
    if faults is not None and faults.device != dense.device:
        faults = None  # of a layer that was called with tables from elsewhere
    recorded = faults_of.new_faults(ids.shape[1], len(values), dense.device) if faults is None else faults
    _check_faults(recorded, ids.shape[1], len(values))
    if dispatch.differentiates(dense, *weights, *tables):
        needs = tuple(table.requires_grad for table in tables)
        options = pooling, needs, sparse, backend
        operands = (dense, ids, recorded, len(values), options, *values, *offsets, *weights, *tables)
        if sparse and any(needs) and torch.compiler.is_compiling():
            if _is_let_into_graphs():
                x0 = _in_graph(ANCHOR, *operands)
            else:
                x0 = torch.compiler.disable(_apart)(tables, operands)
        else:
            if sparse and any(needs):
                announce(tables)
            x0 = internals.apply(KeyedStackFunction, *operands)[0]
    else:
        needs = (False,) * len(tables)
        flat = [*values, *offsets, *weights]
        x0 = embedding_stack_keyed_fwd(dense, ids, flat, list(tables), recorded, pooling, list(needs), backend)[0]
    if faults is None and not torch.compiler.is_compiling():
        faults_of.raise_faults(recorded, ids.shape[1], [table.shape[0] for table in tables])
    return x0


def _in_graph(anchor: Tensor, *operands: Any) -> Tensor:
    """What TorchDynamo puts into its graph unseen, for it refuses sparse tensors, which what follows it does not."""
    *others, (pooling, needs, _, backend) = operands[:5]
    options = pooling, needs, "in graphs" if internals.WRAPS_GRADIENTS else True, backend
    return KeyedStackFunction.apply(*others, options, *operands[5:])[0]


@internals.called_while_compiling
def _is_let_into_graphs() -> bool:
    watch_optimizers()
    takes = ("eager", "aot_eager", "inductor") if internals.WRAPS_GRADIENTS else ("eager", "aot_eager")
    if internals.compiler_name() not in takes or internals.is_within_ddp():  # which may have the tables as its own
        return False
    torch.compiler.allow_in_graph(_in_graph)
    return True


def _apart(tables: Sequence[Tensor], operands: tuple[Any, ...]) -> Tensor:
    announce(tables)
    return KeyedStackFunction.apply(*operands)[0]


def _check_faults(faults: Tensor, single: int, bags: int) -> None:
    wanted, found = (faults_of.size(single, bags), torch.int64), (faults.numel(), faults.dtype)
    if found != wanted or not faults.is_contiguous():
        raise ValueError(f"faults must be contiguous, {' '.join(map(str, wanted))}; got {' '.join(map(str, found))}")


class KeyedStackFunction(torch.autograd.Function):
    """(dense, weights of bags, tables) -> x0, and what the backward pass reads: keys, rows and coefficients.

    The operands are all bags' values, all their offsets, all their weights (None for a bag that has none), the tables.
    """

    @staticmethod
    def forward(
        dense: Tensor, ids: Tensor, faults: Tensor, bags: int, options: tuple[Any, ...], *operands: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        (pooling, needs, _, backend), flat, tables = options, operands[: 3 * bags], operands[3 * bags :]
        return embedding_stack_keyed_fwd(dense, ids, list(flat), list(tables), faults, pooling, list(needs), backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        dense, ids, _, ctx.bags, ctx.options, *operands = inputs
        values, offsets, weights, tables = split(operands, ctx.bags)
        ctx.dense_dtype, ctx.dtype = dense.dtype, output[0].dtype
        ctx.sizes = [size for table in tables for size in table.shape]
        needed = ctx.needs_input_grad[5 + 2 * ctx.bags : 5 + 3 * ctx.bags]
        read = [table if need else None for table, need in zip(tables[ids.shape[1] :], needed, strict=True)]
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(ids, *output[1:], *values, *offsets, *weights, *read)

    @staticmethod
    def backward(ctx: Any, dx0: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        ids, keys, rows, coefficients, *operands = ctx.saved_tensors
        values, offsets, weights, read = split(operands, ctx.bags)
        pooling, kept, sparse, backend = ctx.options
        needs, sizes = ctx.needs_input_grad[5 + 3 * ctx.bags :], ctx.sizes
        if dx0 is None:
            return (None,) * (5 + 3 * ctx.bags + len(needs))
        # Wrong ids and offsets are recorded by now; here they only must not lead out of a tensor.
        fit = [value.clamp(0, height - 1) for value, height in zip(values, sizes[2 * ids.shape[1] :: 2], strict=True)]
        bags = fit, [F.pad(offset[1:], (1, 0)) for offset in offsets], weights
        dweights = weights_bwd(dx0, bags, read, sizes, pooling)
        dtables: list[Tensor | None] = [None] * len(needs)
        if any(needs) and torch.is_grad_enabled():
            bwd = plain.embedding_stack_bwd if sparse else plain.embedding_stack_bwd_dense
            dtables = tables_bwd(bwd, (dx0, ids, bags, pooling), (sizes, [ctx.dtype] * len(needs), needs), sparse)
        elif any(needs):
            counts = fixed_rows.entries(ids, values, kept)
            found, numbers = embedding_stack_keyed_bwd(
                as_rows(dx0), keys, rows, coefficients, sizes, counts, ctx.bags, backend
            )
            parts = fixed_rows.split(found, numbers.to(ctx.dtype), counts, sizes[1::2])
            to_gradient = RowsGradient if sparse == "in graphs" else _sparse if sparse else _dense
            dtables = [
                to_gradient(*part, sizes[2 * k : 2 * k + 2]) if needs[k] else None for k, part in enumerate(parts)
            ]
        ddense = dx0[:, sum(sizes[1::2]) :].to(ctx.dense_dtype) if ctx.needs_input_grad[0] else None
        return ddense, *(None,) * (4 + 2 * ctx.bags), *dweights, *dtables


def _sparse(rows: Tensor, values: Tensor, size: list[int]) -> Tensor:
    return sparse_gradient(rows, values, size, is_coalesced=False)


def _dense(rows: Tensor, values: Tensor, size: list[int]) -> Tensor:
    return values.new_zeros(size).index_add_(0, rows, values)  # all but one of the values of a row are 0


def _fake_fwd(
    dense: Tensor,
    ids: Tensor,
    bags: list[Any],
    tables: list[Tensor],
    faults: Tensor,
    pooling: str,
    needs: list[bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x0, counts = plain.empty_x0(dense, tables), fixed_rows.entries(ids, bags[: len(bags) // 3], needs)
    keys = ids.new_empty(sum(counts), dtype=fixed_rows.key_dtype([table.shape[0] for table in tables], counts))
    of_bags = sum(counts[ids.shape[1] :])
    return x0, keys, ids.new_empty(of_bags, dtype=torch.int32), dense.new_empty(of_bags, dtype=accumulation_dtype(x0))


def _fake_bwd(
    dx0: Tensor,
    keys: Tensor,
    rows: Tensor,
    coefficients: Tensor,
    sizes: list[int],
    counts: list[int],
    bags: int,
    backend: str,
) -> tuple[Tensor, Tensor]:
    numbers = sum(count * width for count, width in zip(counts, sizes[1::2], strict=True))
    return keys.new_empty(keys.shape, dtype=torch.int64), dx0.new_empty(numbers, dtype=accumulation_dtype(dx0))


embedding_stack_keyed_fwd = dispatch.define(
    "embedding_stack_keyed",
    "embedding_stack_keyed_fwd",
    """(Tensor dense, Tensor ids, Tensor?[] bags, Tensor[] tables, Tensor(a!) faults, str pooling, bool[] needs,
    str backend) -> (Tensor x0, Tensor keys, Tensor rows, Tensor coefficients)""",
    _fake_fwd,
)
embedding_stack_keyed_bwd = dispatch.define(
    "embedding_stack_keyed",
    "embedding_stack_keyed_bwd",
    """(Tensor dx0, Tensor keys, Tensor rows, Tensor coefficients, SymInt[] sizes, SymInt[] counts, int bags,
    str backend) -> (Tensor rows_of_tables, Tensor values_of_tables)""",
    _fake_bwd,
)
