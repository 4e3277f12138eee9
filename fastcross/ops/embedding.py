"""Embedding and stacking (section 2.1): ``x0 = [W_1 x_1, …, W_k x_k, x_dense]``, with all features written to one
buffer.

The forward pass saves the ids, and the offsets and weights of bags. A table's gradient is the sum of dx0 over the rows
with the same id and does not depend on the table. Only the gradient of a bag's weights reads its table, which is then
saved.

A table's gradient is dense, or sparse with ids in ascending order. On the CPU each id occurs once. On a GPU, where
counting distinct ids would synchronise, an id occurs as often as in the batch: its sum is at the first entry, and the
others are zero (``kernels/embedding.py``).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastcross import reference
from fastcross.batch import Bag
from fastcross.kernels import embedding as plain
from fastcross.kernels.layout import accumulation_dtype
from fastcross.ops import backends
from fastcross.ops.row_updates import mark_heads

# A bag may also be a tuple (values, offsets) or (values, offsets, weights), as torch.export needs it.
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
        sparse_gradients: whether the tables' gradients are sparse, with the rows of the batch's ids in ascending order:
            on the CPU each once, on a GPU as often as in the batch, its sum at the first entry and zeros at the others.
        backend: as for :func:`cross_layer`.
        faults: where the Triton kernel records wrong ids and offsets, as ``EmbeddingStack.faults`` is, which x0 is NaN
            for; without it they are raised here, which waits for the device. Others raise them at once.

    Returns:
        (B, d) in the dtype that all tables can be promoted to (that of ``dense`` where there are none): a view of a
        buffer whose rows are padded to a multiple of 16 elements.
    """
    given = as_bags(bags)
    _check_stack(dense, categorical, tables, given, pooling)
    chosen = _choose(backend, dense, categorical, tables)
    # The Triton kernels read ids of 32 bits as they are.
    same = (torch.int32, torch.int64) if chosen == "triton" else (torch.int64,)

    def integers(t: Tensor) -> Tensor:
        return t if t.dtype in same else t.long()

    ids, weights = integers(categorical), [bag.weights for bag in given]
    values, offsets = [integers(bag.values) for bag in given], [integers(bag.offsets) for bag in given]
    of_bags = values, offsets, weights
    if chosen in ("torch", "reference") and _is_traced():
        return plain.embedding_stack(dense, ids, *of_bags, tables, pooling)
    if chosen == "reference" and not sparse_gradients:
        check_ids(ids, given, [table.shape[0] for table in tables])
        return reference.embedding_stack(dense, ids, tables, list(zip(*of_bags, strict=True)), pooling)
    stack = _keyed_stack if chosen == "triton" else _stack
    if sparse_gradients and torch.compiler.is_compiling() and backends.differentiates(*tables):
        stack = torch.compiler.disable(stack)  # a graph has no sparse tensors
    return stack(dense, ids, of_bags, tables, faults, pooling, sparse_gradients, chosen)


def _check_stack(
    dense: Tensor, categorical: Tensor, tables: Sequence[Tensor], bags: Sequence[Bag], pooling: str
) -> None:
    """The operands of an embedding stack: a table for each column of ids and for each bag, all of one device."""
    if pooling not in ("mean", "sum"):
        raise ValueError(f'pooling must be "mean" or "sum"; got {pooling!r}')
    check_batch(dense, categorical, bags)
    if len(tables) != categorical.shape[1] + len(bags):
        raise ValueError(
            f"there must be a table for each of {categorical.shape[1]} features and {len(bags)} bags; got {len(tables)}"
        )
    for k, table in enumerate(tables):
        if not isinstance(table, Tensor) or table.dim() != 2 or not table.is_floating_point():
            found = f"{tuple(table.shape)} {table.dtype}" if isinstance(table, Tensor) else type(table).__name__
            raise TypeError(f"feature {k}'s table must be floating point, (cardinality, n_e); got {found}")
        if table.device != dense.device:
            raise ValueError(f"feature {k}'s table must be on the device of dense, {dense.device}; got {table.device}")


def check_batch(dense: Tensor, categorical: Tensor, bags: Sequence[Bag]) -> None:
    """Dense (B, num_dense), ids (B, k), and for each bag B offsets into its values, with one weight each, or none."""
    _check_ids("categorical", categorical, dim=2)
    if not isinstance(dense, Tensor) or not dense.is_floating_point():
        raise TypeError(f"dense must be floating point; got {_kind(dense)}")
    if dense.dim() != 2:
        raise ValueError(f"dense must be (B, num_dense); got {tuple(dense.shape)}")
    if dense.shape[0] != categorical.shape[0]:
        raise ValueError(
            f"dense and categorical must have as many rows; got {tuple(dense.shape)} and {tuple(categorical.shape)}"
        )
    found = {"categorical": categorical}
    for k, bag in enumerate(bags, start=categorical.shape[1]):
        name, weights = f"feature {k}'s", bag.weights
        _check_ids(f"{name} values", bag.values, dim=1)
        _check_ids(f"{name} offsets", bag.offsets, dim=1)
        if bag.offsets.shape != dense.shape[:1]:
            raise ValueError(
                f"feature {k} must have one offset per row, {dense.shape[0]}; got {tuple(bag.offsets.shape)}"
            )
        found |= {f"{name} values": bag.values, f"{name} offsets": bag.offsets}
        if weights is None:
            continue
        if not isinstance(weights, Tensor) or not weights.is_floating_point():
            raise TypeError(f"{name} weights must be floating point; got {_kind(weights)}")
        if weights.shape != bag.values.shape:
            raise ValueError(
                f"feature {k} must have one weight per value; "
                f"got weights {tuple(weights.shape)} and values {tuple(bag.values.shape)}"
            )
        found[f"{name} weights"] = weights
    for name, t in found.items():
        if t.device != dense.device:
            raise ValueError(f"{name} must be on the device of dense, {dense.device}; got {t.device}")


def _check_ids(name: str, t: Tensor, dim: int) -> None:
    if not isinstance(t, Tensor) or t.is_floating_point() or t.is_complex() or t.dtype == torch.bool:
        raise TypeError(f"{name} must hold integer ids; got {_kind(t)}")
    if t.dim() != dim:
        raise ValueError(f"{name} must be {'(B, k)' if dim == 2 else 'of one dimension'}; got {tuple(t.shape)}")


def _kind(value: object) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__


OfBags = tuple[list[Tensor], list[Tensor], list[Any]]  # all bags' values, all their offsets, all their weights or None


def _is_traced() -> bool:
    """Whether something looks on that knows PyTorch's own operators only."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or backends.is_transformed()


def as_bags(bags: Bags) -> list[Bag]:
    return [Bag(*bag) if isinstance(bag, tuple) else bag for bag in bags]


def check_ids(categorical: Tensor, bags: Sequence[Bag], cardinalities: Sequence[int]) -> None:
    """Raises for the first id outside its table, and for the first invalid offset."""
    values = [bag.values for bag in bags]
    plain.check_offsets(values, [bag.offsets for bag in bags], categorical.shape[1])
    plain.check_ids(categorical, values, cardinalities)


def pooling_coefficients(bag: Bag, pooling: str) -> Tensor:
    """(n,): the factor of each value's row in the sum; for "mean" the factors of a row sum to 1."""
    dtype = torch.float32 if bag.weights is None else bag.weights.dtype
    return plain.pooling_coefficients(bag.values, bag.offsets, bag.weights, pooling, dtype)


def _choose(backend: str, dense: Tensor, ids: Tensor, tables: Sequence[Tensor]) -> str:
    """The backend that will run. Kernels need contiguous tables of one dtype."""
    dtype = plain.x0_dtype(dense, tables)
    typical = next((table for table in tables if table.dtype == dtype), dense)
    chosen = backends.choose(backend, typical, dense, ids, *tables)
    if torch.jit.is_tracing() and chosen != "reference":
        return "torch"
    if chosen not in ("cpu", "triton"):
        return chosen
    odd = next((k for k, table in enumerate(tables) if table.dtype != dtype or not table.is_contiguous()), None)
    if odd is not None and backend == chosen:
        found = f"feature {odd}'s, {tables[odd].dtype} with strides {tables[odd].stride()}, and x0 of {dtype}"
        raise ValueError(f'backend "{chosen}" needs contiguous tables of one dtype; got {found}')
    return chosen if odd is None else "torch"


def _stack(
    dense: Tensor,
    ids: Tensor,
    bags: OfBags,
    tables: Sequence[Tensor],
    faults: Tensor | None,
    pooling: str,
    sparse: bool,
    backend: str,
) -> Tensor:
    values, offsets, weights = bags
    if backends.differentiates(dense, *weights, *tables):
        options = pooling, sparse, backend
        return EmbeddingStackFunction.apply(dense, ids, len(values), options, *values, *offsets, *weights, *tables)
    return _forward(dense, ids, bags, list(tables), pooling, backend)


def _forward(dense: Tensor, ids: Tensor, bags: OfBags, tables: list[Tensor], pooling: str, backend: str) -> Tensor:
    if backend != "cpu":
        return plain.embedding_stack_fwd(dense, ids, *bags, tables, pooling)
    try:
        return torch.ops.fastcross.embedding_stack_fwd(dense, ids, *bags, tables, pooling)
    except RuntimeError:
        if not torch.compiler.is_compiling():  # wrong ids and offsets are a ValueError
            plain.check_offsets(bags[0], bags[1], ids.shape[1])
            plain.check_ids(ids, bags[0], [table.shape[0] for table in tables])
        raise


class EmbeddingStackFunction(torch.autograd.Function):
    """(dense, weights of bags, tables) -> x0; backward: for each table the sum of dx0 over the rows with the same id.

    The operands are all bags' values, all their offsets, all their weights (None for a bag without), the tables.
    """

    @staticmethod
    def forward(ctx: Any, dense: Tensor, ids: Tensor, bags: int, options: tuple[Any, ...], *operands: Any) -> Tensor:
        values, offsets, weights, tables = _split(operands, bags)
        ctx.bags, ctx.options, ctx.dense_dtype = bags, options, dense.dtype
        ctx.dtypes = [table.dtype for table in tables]
        ctx.sizes = [size for table in tables for size in table.shape]
        needed = ctx.needs_input_grad[4 + 2 * bags : 4 + 3 * bags]
        read = [table if need else None for table, need in zip(tables[ids.shape[1] :], needed, strict=True)]
        ctx.save_for_backward(ids, *values, *offsets, *weights, *read)
        pooling, _, backend = options
        return _forward(dense, ids, (values, offsets, weights), tables, pooling, backend)

    @staticmethod
    def backward(ctx: Any, dx0: Tensor) -> tuple[Tensor | None, ...]:
        ids, *operands = ctx.saved_tensors
        values, offsets, weights, read = _split(operands, ctx.bags)
        bags, (pooling, sparse, backend) = (values, offsets, weights), ctx.options
        dweights = _weights_bwd(dx0, bags, read, ctx.sizes, pooling)
        needs = ctx.needs_input_grad[4 + 3 * ctx.bags :]
        dtables: list[Tensor | None] = [None] * len(needs)
        if any(needs):
            if backend != "cpu" or backends.is_differentiated():
                found = _plain_bwd(dx0, ids, bags, pooling, ctx.sizes, needs, sparse)
            else:
                bwd = torch.ops.fastcross.embedding_stack_bwd
                found = bwd(backends.as_rows(dx0), ids, *bags, ctx.sizes, needs, pooling, not sparse)
            dtables = _as_gradients(found, ctx.sizes, ctx.dtypes, needs, sparse and plain.is_compact(dx0), sparse)
        ddense = dx0[:, sum(ctx.sizes[1::2]) :].to(ctx.dense_dtype) if ctx.needs_input_grad[0] else None
        return ddense, *(None,) * (3 + 2 * ctx.bags), *dweights, *dtables


def _split(operands: Sequence[Any], bags: int) -> list[list[Any]]:
    """A Function's operands, divided: values, offsets, weights, and the rest."""
    return [*(list(operands[i * bags : (i + 1) * bags]) for i in range(3)), list(operands[3 * bags :])]


def _plain_bwd(
    dx0: Tensor, ids: Tensor, bags: OfBags, pooling: str, sizes: list[int], needs: Sequence[bool], sparse: bool
) -> list[Tensor]:
    """The tables' gradients in PyTorch's operators, which are differentiable."""
    dtype = accumulation_dtype(dx0)
    coefficients = [plain.pooling_coefficients(*bag, pooling, dtype) for bag in zip(*bags, strict=True)]
    bwd = plain.embedding_stack_bwd if sparse else plain.embedding_stack_bwd_dense
    return bwd(backends.as_rows(dx0), ids, *bags[:2], coefficients, sizes, needs)


def _as_gradients(
    found: list[Tensor],
    sizes: list[int],
    dtypes: list[torch.dtype],
    needs: Sequence[bool],
    is_compact: bool,
    sparse: bool,
) -> list[Tensor | None]:
    """Gradients in the tables' dtypes, from alternating ids and values, or from dense gradients."""
    result: list[Tensor | None] = []
    for k, needed in enumerate(needs):
        if not needed:
            result.append(None)
        elif sparse:
            values = found[2 * k + 1].to(dtypes[k])
            result.append(_sparse_gradient(found[2 * k], values, sizes[2 * k : 2 * k + 2], is_compact))
        else:
            result.append(found[k].to(dtypes[k]))
    return result


def _sparse_gradient(rows: Tensor, values: Tensor, size: list[int], is_coalesced: bool) -> Tensor:
    if not is_coalesced:
        mark_heads(rows, values)
    options: Any = {"check_invariants": False, "is_coalesced": is_coalesced}
    return torch.sparse_coo_tensor(rows.unsqueeze(0), values, size, **options)


def _weights_bwd(
    dx0: Tensor, bags: OfBags, read: list[Tensor | None], sizes: list[int], pooling: str
) -> list[Tensor | None]:
    """The gradients of the bags' weights, for each bag with a table saved in ``read``; ``sizes``: of all tables."""
    single, dweights = len(sizes) // 2 - len(read), []
    for k, (table, value, offset, weight) in enumerate(zip(read, *bags, strict=True), start=single):
        column = sum(sizes[1 : 2 * k : 2])
        g = dx0[:, column : column + sizes[2 * k + 1]]
        if table is not None and list(table.shape) != (before := sizes[2 * k : 2 * k + 2]):
            # Autograd detects writes to a table, but not that another tensor replaced it.
            raise RuntimeError(
                f"feature {k}'s table was {tuple(before)} in the forward pass and is {tuple(table.shape)} now"
            )
        dweights.append(None if table is None else plain.weights_bwd(g, table, value, offset, weight, pooling))
    return dweights


def _keyed_stack(
    dense: Tensor,
    ids: Tensor,
    bags: OfBags,
    tables: Sequence[Tensor],
    faults: Tensor | None,
    pooling: str,
    sparse: bool,
    backend: str,
) -> Tensor:
    """x0 on a GPU. Nothing synchronises, neither the check of ids nor the tables' gradients.

    The forward pass also writes a key per id; the backward pass sorts the keys of all tables at once. Without
    ``faults``, the record of wrong ids, they are raised here, which synchronises.
    """
    values, offsets, weights = bags
    if faults is not None and faults.device != dense.device:
        faults = None  # the layer's, which was called with other tables
    recorded = plain.new_faults(ids.shape[1], len(values), dense.device) if faults is None else faults
    wanted, found = (plain.faults_size(ids.shape[1], len(values)), torch.int64), (recorded.numel(), recorded.dtype)
    if found != wanted or not recorded.is_contiguous():
        raise ValueError(f"faults must be contiguous, {' '.join(map(str, wanted))}; got {' '.join(map(str, found))}")
    if backends.differentiates(dense, *weights, *tables):
        options = pooling, tuple(table.requires_grad for table in tables), sparse, backend
        operands = (dense, ids, recorded, len(values), options, *values, *offsets, *weights, *tables)
        x0 = KeyedStackFunction.apply(*operands)
    else:
        fwd = backends.kernel("embedding_stack_keyed_fwd", backend, dense)
        needs = [False] * len(tables)
        x0 = fwd(dense, ids, [*values, *offsets, *weights], list(tables), recorded, pooling, needs)[0]
    if faults is None and not torch.compiler.is_compiling():
        plain.raise_faults(recorded, ids.shape[1], [table.shape[0] for table in tables])
    return x0


class KeyedStackFunction(torch.autograd.Function):
    """(dense, weights of bags, tables) -> x0; saves keys, and each bag value's row and coefficient.

    The operands are all bags' values, all their offsets, all their weights (None for a bag without), the tables.
    """

    @staticmethod
    def forward(
        ctx: Any, dense: Tensor, ids: Tensor, faults: Tensor, bags: int, options: tuple[Any, ...], *operands: Any
    ) -> Tensor:
        pooling, needs, _, backend = options
        values, offsets, weights, tables = _split(operands, bags)
        fwd = backends.kernel("embedding_stack_keyed_fwd", backend, dense)
        x0, *saved = fwd(dense, ids, list(operands[: 3 * bags]), tables, faults, pooling, list(needs))
        ctx.bags, ctx.options, ctx.dense_dtype, ctx.dtype = bags, options, dense.dtype, x0.dtype
        ctx.sizes = [size for table in tables for size in table.shape]
        needed = ctx.needs_input_grad[5 + 2 * bags : 5 + 3 * bags]
        read = [table if need else None for table, need in zip(tables[ids.shape[1] :], needed, strict=True)]
        ctx.save_for_backward(ids, *saved, *values, *offsets, *weights, *read)
        return x0

    @staticmethod
    def backward(ctx: Any, dx0: Tensor) -> tuple[Tensor | None, ...]:
        ids, keys, rows, coefficients, *operands = ctx.saved_tensors
        values, offsets, weights, read = _split(operands, ctx.bags)
        pooling, kept, sparse, backend = ctx.options
        needs, sizes = ctx.needs_input_grad[5 + 3 * ctx.bags :], ctx.sizes
        # Wrong ids and offsets are recorded already; here they only must not cause an access out of bounds.
        heights = sizes[2 * ids.shape[1] :: 2]
        fit = [value.long().clamp(0, height - 1) for value, height in zip(values, heights, strict=True)]
        bags = fit, [F.pad(offset[1:].long(), (1, 0)) for offset in offsets], weights
        dweights = _weights_bwd(dx0, bags, read, sizes, pooling)
        dtables: list[Tensor | None] = [None] * len(needs)
        if any(needs) and backends.is_differentiated():
            found = _plain_bwd(dx0, ids.long(), bags, pooling, sizes, needs, sparse)
            dtables = _as_gradients(found, sizes, [ctx.dtype] * len(needs), needs, plain.is_compact(dx0), sparse)
        elif any(needs):
            counts = plain.entries(ids, values, kept)
            bwd = backends.kernel("embedding_stack_keyed_bwd", backend, dx0)
            found, numbers = bwd(backends.as_rows(dx0), keys, rows, coefficients, sizes, counts, ctx.bags)
            parts = plain.split(found, numbers.to(ctx.dtype), counts, sizes[1::2])
            to_gradient: Callable[..., Tensor] = _heads_gradient if sparse else _dense_gradient
            dtables = [
                to_gradient(*part, sizes[2 * k : 2 * k + 2]) if needs[k] else None for k, part in enumerate(parts)
            ]
        ddense = dx0[:, sum(sizes[1::2]) :].to(ctx.dense_dtype) if ctx.needs_input_grad[0] else None
        return ddense, *(None,) * (4 + 2 * ctx.bags), *dweights, *dtables


def _heads_gradient(rows: Tensor, values: Tensor, size: list[int]) -> Tensor:
    return _sparse_gradient(rows, values, size, is_coalesced=False)


def _dense_gradient(rows: Tensor, values: Tensor, size: list[int]) -> Tensor:
    return values.new_zeros(size).index_add_(0, rows, values)  # all but one of the values of a row are 0


def _fake_fwd(
    dense: Tensor,
    ids: Tensor,
    values: list[Tensor],
    offsets: list[Tensor],
    weights: list[Tensor | None],
    tables: list[Tensor],
    pooling: str,
) -> Tensor:
    return plain.empty_x0(dense, tables)


def _fake_bwd(
    dx0: Tensor,
    ids: Tensor,
    values: list[Tensor],
    offsets: list[Tensor],
    weights: list[Tensor | None],
    sizes: list[int],
    needs: list[bool],
    pooling: str,
    dense: bool,
) -> list[Tensor]:
    result = []
    for k, needed in enumerate(needs):
        count: Any = sizes[2 * k]
        if not dense:
            count = torch.library.get_ctx().new_dynamic_size() if needed else 0
            result.append(ids.new_empty(count))
        result.append(dx0.new_empty((count, sizes[2 * k + 1]) if needed else (0,)))
    return result


def _fake_keyed_fwd(
    dense: Tensor,
    ids: Tensor,
    bags: list[Any],
    tables: list[Tensor],
    faults: Tensor,
    pooling: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x0, counts = plain.empty_x0(dense, tables), plain.entries(ids, bags[: len(bags) // 3], needs)
    keys = ids.new_empty(sum(counts), dtype=plain.key_dtype([table.shape[0] for table in tables], counts))
    of_bags = sum(counts[ids.shape[1] :])
    return x0, keys, ids.new_empty(of_bags, dtype=torch.int32), dense.new_empty(of_bags, dtype=accumulation_dtype(x0))


def _fake_keyed_bwd(
    dx0: Tensor,
    keys: Tensor,
    rows: Tensor,
    coefficients: Tensor,
    sizes: list[int],
    counts: list[int],
    bags: int,
) -> tuple[Tensor, Tensor]:
    numbers = sum(count * width for count, width in zip(counts, sizes[1::2], strict=True))
    return keys.new_empty(keys.shape, dtype=torch.int64), dx0.new_empty(numbers, dtype=accumulation_dtype(dx0))


backends.define(
    "embedding_stack_fwd",
    """(Tensor dense, Tensor ids, Tensor[] values, Tensor[] offsets, Tensor?[] weights, Tensor[] tables, str pooling)
    -> Tensor""",
    _fake_fwd,
)
backends.define(
    "embedding_stack_bwd",
    """(Tensor dx0, Tensor ids, Tensor[] values, Tensor[] offsets, Tensor?[] weights, SymInt[] sizes, bool[] needs,
    str pooling, bool dense) -> Tensor[]""",
    _fake_bwd,
)
backends.define(
    "embedding_stack_keyed_fwd",
    """(Tensor dense, Tensor ids, Tensor?[] bags, Tensor[] tables, Tensor(a!) faults, str pooling, bool[] needs)
    -> (Tensor x0, Tensor keys, Tensor rows, Tensor coefficients)""",
    _fake_keyed_fwd,
    "embedding",
)
backends.define(
    "embedding_stack_keyed_bwd",
    """(Tensor dx0, Tensor keys, Tensor rows, Tensor coefficients, SymInt[] sizes, SymInt[] counts, int bags)
    -> (Tensor rows_of_tables, Tensor values_of_tables)""",
    _fake_keyed_bwd,
    "embedding",
)
