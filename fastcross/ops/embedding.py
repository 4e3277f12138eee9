"""Embedding and stacking (section 2.1): ``x0 = [W_1 x_1, …, W_k x_k, x_dense]``, every feature written into one buffer.

The forward pass keeps the ids, and of bags the offsets and weights: a table's gradient is the sum of dx0 over the rows
that share an id, whatever the table holds. Only the gradient of a bag's weights reads its table, which is then kept.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastcross import reference
from fastcross.batch import Bag
from fastcross.kernels import embedding as plain
from fastcross.kernels import fixed_rows
from fastcross.kernels.rows import accumulation_dtype
from fastcross.ops import backends, checks, dispatch, embedding_keys, internals
from fastcross.ops.embedding_gradients import split, tables_bwd, weights_bwd
from fastcross.ops.sparse_gradients import announce

# A bag may also be a tuple (values, offsets) or (values, offsets, weights), as torch.export wants its inputs.
Bags = Sequence[Bag | tuple[Tensor, ...]]


def embedding_stack(
    dense: Tensor,
    categorical: Tensor,
    tables: Sequence[Tensor],
    bags: Bags = (),
    *,
    pooling: str = "mean",
    sparse_gradients: bool = False,
    backend: str = "auto",
    faults: Tensor | None = None,
) -> Tensor:
    """Equations 1 and 2: ``x0 = [W_1 x_1, …, W_k x_k, x_dense]``, an embedding per categorical feature, dense last.

    Args:
        dense: (B, num_dense).
        categorical: (B, k) ids of the single-valued features.
        tables: a (cardinality, n_e) table for each of the k features, then one for each bag.
        bags: the multi-valued features.
        pooling: "mean" (Σ weight · row / Σ weight) or "sum" (Σ weight · row); a row without values gives 0.
        sparse_gradients: whether the tables' gradients are sparse: on the CPU with a row for each distinct id of the
            batch, else with one for each id, in ascending order: of equal ids the first has the sum, the others are 0,
            and nothing waits for the device.
        backend: as for :func:`cross_layer`.
        faults: where the Triton kernel records wrong ids and offsets, as ``EmbeddingStack.faults`` is, which x0 is NaN
            for; without it they are raised here, which waits for the device. Others raise them at once.

    Returns:
        (B, d) in the dtype that all tables can be promoted to (that of ``dense`` where there are none): a view of a
        buffer whose rows are padded to a multiple of 16 elements.
    """
    given = as_bags(bags)
    checks.check_stack(dense, categorical, tables, given, pooling)
    chosen = _choose(backend, dense, tables)
    ids, weights = categorical.long(), [bag.weights for bag in given]
    values, offsets = [bag.values.long() for bag in given], [bag.offsets.long() for bag in given]
    is_quiet = internals.may_call_kernels((dense, ids, *values, *offsets, *weights, *tables))
    if not is_quiet and _needs_plain_operators(dense, ids, *tables):
        return plain.embedding_stack(dense, ids, values, offsets, weights, tables, pooling)
    if chosen == "triton":
        options: Any = {"pooling": pooling, "sparse": sparse_gradients, "backend": chosen}
        return embedding_keys.stack(dense, ids, (values, offsets, weights), tables, faults, **options)
    if chosen == "reference" and not sparse_gradients and not torch.compiler.is_compiling():
        check_ids(ids, given, [table.shape[0] for table in tables])
        return reference.embedding_stack(dense, ids, tables, list(zip(values, offsets, weights, strict=True)), pooling)
    if not dispatch.differentiates(dense, *weights, *tables):
        return embedding_stack_fwd(dense, ids, values, offsets, weights, list(tables), pooling, chosen)
    operands = (dense, ids, len(given), pooling, sparse_gradients, chosen, *values, *offsets, *weights, *tables)
    apply = internals.direct_apply(EmbeddingStackFunction) if is_quiet else EmbeddingStackFunction.apply
    if not sparse_gradients:
        return apply(*operands)
    if torch.compiler.is_compiling():  # the compiler knows no sparse gradients
        return torch.compiler.disable(_with_sparse_gradients)(tables, operands)
    announce(tables)
    return apply(*operands)


def _with_sparse_gradients(tables: Sequence[Tensor], operands: tuple[Any, ...]) -> Tensor:
    announce(tables)
    return EmbeddingStackFunction.apply(*operands)


def _needs_plain_operators(*operands: Tensor) -> bool:
    """Whether something transforms PyTorch's operators that knows no others."""
    return (
        torch.compiler.is_exporting()
        or torch.jit.is_tracing()
        or internals.is_transformed()
        or any(internals.is_foreign(t) for t in operands)
    )


def as_bags(bags: Bags) -> list[Bag]:
    return [Bag(*bag) if isinstance(bag, tuple) else bag for bag in bags]


def check_ids(categorical: Tensor, bags: Sequence[Bag], cardinalities: Sequence[int]) -> None:
    """Raises for the first id that is not in its table and for the first offset that no row can begin at."""
    values = [bag.values for bag in bags]
    plain.check_offsets(values, [bag.offsets for bag in bags], categorical.shape[1])
    plain.check_ids(categorical, values, cardinalities)


def pooling_coefficients(bag: Bag, pooling: str) -> Tensor:
    """(n,): what each value's row is multiplied with before the sum; for "mean" the weights of a row sum to 1."""
    dtype = torch.float32 if bag.weights is None else bag.weights.dtype
    return plain.pooling_coefficients(bag.values, bag.offsets, bag.weights, pooling, dtype)


def _choose(backend: str, dense: Tensor, tables: Sequence[Tensor]) -> str:
    """The backend that will run; the kernels need contiguous tables of one dtype."""
    dtype = plain.x0_dtype(dense, tables)
    chosen = backends.choose(backend, dense.device, dtype)
    if chosen not in ("numba", "triton"):
        return chosen
    odd = next((k for k, table in enumerate(tables) if table.dtype != dtype or not table.is_contiguous()), None)
    if odd is not None and backend == chosen:
        found = f"feature {odd}'s, {tables[odd].dtype} with strides {tables[odd].stride()}, and x0 of {dtype}"
        raise ValueError(f'backend "{chosen}" needs contiguous tables of one dtype; got {found}')
    return chosen if odd is None else "torch"


class EmbeddingStackFunction(torch.autograd.Function):
    """(dense, weights of bags, tables) -> x0; backward: to each table the sum of dx0 over the rows that share an id.

    The operands are all bags' values, all their offsets, all their weights (None for a bag that has none), the tables.
    """

    @staticmethod
    def forward(
        dense: Tensor, ids: Tensor, bags: int, pooling: str, sparse: bool, backend: str, *operands: Any
    ) -> Tensor:
        values, offsets, weights, tables = split(operands, bags)
        return embedding_stack_fwd(dense, ids, values, offsets, weights, tables, pooling, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        dense, ids, ctx.bags, ctx.pooling, ctx.sparse, ctx.backend, *operands = inputs
        values, offsets, weights, tables = split(operands, ctx.bags)
        ctx.dense_dtype, ctx.dtypes = dense.dtype, [table.dtype for table in tables]
        ctx.sizes = [size for table in tables for size in table.shape]
        needed = ctx.needs_input_grad[6 + 2 * ctx.bags : 6 + 3 * ctx.bags]
        read = [table if need else None for table, need in zip(tables[ids.shape[1] :], needed, strict=True)]
        ctx.save_for_backward(ids, *values, *offsets, *weights, *read)

    @staticmethod
    def backward(ctx: Any, dx0: Tensor) -> tuple[Tensor | None, ...]:
        ids, *operands = ctx.saved_tensors
        values, offsets, weights, read = split(operands, ctx.bags)
        bags = values, offsets, weights
        dweights = weights_bwd(dx0, bags, read, ctx.sizes, ctx.pooling)
        needs = ctx.needs_input_grad[6 + 3 * ctx.bags :]
        dtables: list[Tensor | None] = [None] * len(needs)
        if any(needs):
            described = ctx.sizes, ctx.dtypes, needs
            bwd = _rows_bwd(ctx.sparse, ctx.backend)
            dtables = tables_bwd(bwd, (dx0, ids, bags, ctx.pooling), described, ctx.sparse)
        ddense = dx0[:, sum(ctx.sizes[1::2]) :].to(ctx.dense_dtype) if ctx.needs_input_grad[0] else None
        return ddense, *(None,) * (5 + 2 * ctx.bags), *dweights, *dtables


def _rows_bwd(sparse: bool, backend: str) -> Callable[..., list[Tensor]]:
    """The backward function of the tables: PyTorch's operators where the gradient is differentiated itself."""
    if torch.is_grad_enabled():
        return plain.embedding_stack_bwd if sparse else plain.embedding_stack_bwd_dense
    bwd = embedding_stack_bwd if sparse else embedding_stack_bwd_dense
    return lambda *operands: bwd(*operands, backend)


def _fake_fwd(
    dense: Tensor,
    ids: Tensor,
    values: list[Tensor],
    offsets: list[Tensor],
    weights: list[Tensor | None],
    tables: list[Tensor],
    pooling: str,
    backend: str,
) -> Tensor:
    return plain.empty_x0(dense, tables)


def _fake_bwd(
    dx0: Tensor,
    ids: Tensor,
    values: list[Tensor],
    offsets: list[Tensor],
    coefficients: list[Tensor],
    sizes: list[int],
    needs: list[bool],
    backend: str,
) -> list[Tensor]:
    result, counts = [], fixed_rows.entries(ids, values, needs)
    for k, needed in enumerate(needs):
        count = counts[k] if not needed or not plain.is_compact(dx0) else torch.library.get_ctx().new_dynamic_size()
        shape = (count, sizes[2 * k + 1]) if needed else (0,)
        result += [ids.new_empty(count), dx0.new_empty(shape, dtype=accumulation_dtype(dx0))]
    return result


def _fake_bwd_dense(
    dx0: Tensor,
    ids: Tensor,
    values: list[Tensor],
    offsets: list[Tensor],
    coefficients: list[Tensor],
    sizes: list[int],
    needs: list[bool],
    backend: str,
) -> list[Tensor]:
    shapes = [sizes[2 * k : 2 * k + 2] if needed else [0] for k, needed in enumerate(needs)]
    return [dx0.new_empty(shape, dtype=accumulation_dtype(dx0)) for shape in shapes]


_BACKWARD_SCHEMA = """(Tensor dx0, Tensor ids, Tensor[] values, Tensor[] offsets, Tensor[] coefficients, SymInt[] sizes,
    bool[] needs, str backend) -> Tensor[]"""
embedding_stack_fwd = dispatch.define(
    "embedding_stack",
    "embedding_stack_fwd",
    """(Tensor dense, Tensor ids, Tensor[] values, Tensor[] offsets, Tensor?[] weights, Tensor[] tables, str pooling,
    str backend) -> Tensor""",
    _fake_fwd,
)
embedding_stack_bwd = dispatch.define("embedding_stack", "embedding_stack_bwd", _BACKWARD_SCHEMA, _fake_bwd)
embedding_stack_bwd_dense = dispatch.define(
    "embedding_stack", "embedding_stack_bwd_dense", _BACKWARD_SCHEMA, _fake_bwd_dense
)
