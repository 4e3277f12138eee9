"""The embedding and stacking layer (section 2.1): every feature written straight into one x0."""

import functools
import importlib.util
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fastcross.batch import Bag
from fastcross.ops.internals import apply

# Rows of x0 start on a boundary of this many elements: 64 bytes in float32, a cache line and the widest load.
ALIGNMENT = 16


# A bag may also be a tuple (values, offsets) or (values, offsets, weights), as torch.export wants its inputs.
Bags = Sequence[Bag | tuple[Tensor, ...]]


def paper_dim(cardinality: int) -> int:
    """Section 4.2: 6 · cardinality^(1/4), rounded to the nearest integer."""
    return max(1, round(6 * cardinality**0.25))


class EmbeddingStack(nn.Module):
    """Equations 1 and 2: ``x0 = [W_1 x_1, …, W_k x_k, x_dense]``, an embedding per categorical feature, dense last.

    The result is a (B, d) view of a buffer whose rows are padded to a multiple of 16 elements. The features are
    numbered in the order of x0: the single-valued ones, then the bags.

    Gradients of the tables are sparse and coalesced: one row for each distinct id of the batch. With an optimiser that
    uses them so (:func:`fastcross.optim.configure`), a step costs the same whatever the tables' height.

    Initialisation: N(0, 1/n_e) for a table of n_e columns, so that every feature enters the dots x0ᵀw_l with the same
    weight, however wide its embedding is.

    Args:
        cardinalities: how many ids each single-valued feature has: 0 … cardinality - 1.
        num_dense: how many dense features there are.
        embedding_dim: n_e, one for all or one per feature (bags last); None is the paper's 6 · cardinality^(1/4).
        bag_cardinalities: how many ids each multi-valued feature has.
        bag_pooling: "mean" (Σ weight · row / Σ weight) or "sum" (Σ weight · row); a row without values gives 0.
        sparse_gradients: False for dense gradients, which any optimiser takes and torch.compile can trace in training.
        backend: "auto" takes the CPU kernels where they run, else PyTorch's operators; "torch" asks for the latter.
    """

    def __init__(
        self,
        cardinalities: Sequence[int],
        num_dense: int = 0,
        embedding_dim: int | Sequence[int] | None = None,
        *,
        bag_cardinalities: Sequence[int] = (),
        bag_pooling: str = "mean",
        sparse_gradients: bool = True,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.cardinalities = (*cardinalities, *bag_cardinalities)
        self.num_single, self.num_dense = len(cardinalities), num_dense
        self.bag_pooling, self.sparse_gradients, self.backend = bag_pooling, sparse_gradients, backend
        self.dims = _dims(self.cardinalities, embedding_dim)
        if bag_pooling not in ("mean", "sum"):
            raise ValueError(f'bag_pooling must be "mean" or "sum"; got {bag_pooling!r}')
        if num_dense < 0 or any(cardinality < 1 for cardinality in self.cardinalities):
            raise ValueError(
                f"num_dense must be at least 0 and every cardinality at least 1; "
                f"got num_dense = {num_dense} and cardinalities {self.cardinalities}"
            )
        self.out_features = sum(self.dims) + num_dense
        if self.out_features == 0:
            raise ValueError("there must be a feature; got no cardinalities, no bag_cardinalities and num_dense = 0")
        sizes = zip(self.cardinalities, self.dims, strict=True)
        self.tables = nn.ParameterList(nn.Parameter(torch.empty(size)) for size in sizes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for table in self.tables:
            nn.init.normal_(table, std=table.shape[1] ** -0.5)

    def load_pretrained(self, feature: int, weight: Tensor) -> None:
        """Copies (cardinality, n_e) into a feature's table; ``tables[feature].requires_grad_(False)`` fixes them."""
        if weight.shape != self.tables[feature].shape:
            raise ValueError(
                f"feature {feature} needs a weight of {tuple(self.tables[feature].shape)}; got {tuple(weight.shape)}"
            )
        with torch.no_grad():
            self.tables[feature].copy_(weight)

    def columns(self) -> list[slice]:
        """Where each feature lies in x0: the embeddings, then each dense feature."""
        widths = (*self.dims, *(1,) * self.num_dense)
        return [slice(sum(widths[:i]), sum(widths[: i + 1])) for i in range(len(widths))]

    def forward(self, dense: Tensor, categorical: Tensor, bags: Bags = ()) -> Tensor:
        """(B, num_dense), (B, k) ids and a bag for each multi-valued feature -> x0, (B, d)."""
        given = [Bag(*bag) if isinstance(bag, tuple) else bag for bag in bags]
        self.check(dense, categorical, given)
        if not torch.compiler.is_compiling():
            check_offsets(self, given)
        categorical = categorical.long()
        coefficients = [pooling_coefficients(bag, self.bag_pooling) for bag in given]
        tables = tuple(self.tables)
        # What is traced must be plain operators, whose gradients are dense.
        trace = torch.compiler.is_compiling() and not (self.sparse_gradients and torch.is_grad_enabled())
        if trace or torch.compiler.is_exporting() or not self.sparse_gradients:
            pooled = [
                F.embedding_bag(bag.values, table, bag.offsets, mode="sum", per_sample_weights=weights.to(table.dtype))
                for bag, weights, table in zip(given, coefficients, tables[self.num_single :], strict=True)
            ]
            single = [F.embedding(categorical[:, k], tables[k]) for k in range(self.num_single)]
            return torch.cat((*single, *pooled, dense.to(self._dtype())), dim=1)
        stack = functools.partial(apply, _StackFunction)
        if torch.compiler.is_compiling():  # imported here only: the compiler is slow to import
            stack = torch.compiler.disable(stack)
        return stack(self, categorical, given, coefficients, dense, *tables)

    def _dtype(self) -> torch.dtype:
        return self.tables[0].dtype if len(self.tables) else torch.get_default_dtype()

    def _kernels(self, dense: Tensor) -> ModuleType | None:
        """The CPU kernels, where they can run."""
        on_cpu = dense.device.type == "cpu" and self._dtype() in (torch.float32, torch.float64)
        return _load_kernels() if on_cpu and self.backend in ("auto", "numba") else None

    def check(self, dense: Tensor, categorical: Tensor, bags: list[Bag]) -> None:
        if categorical.is_floating_point() or categorical.dtype == torch.bool:
            raise TypeError(f"categorical must hold integer ids; got {categorical.dtype}")
        if not dense.is_floating_point():
            raise TypeError(f"dense must be floating point; got {dense.dtype}")
        if dense.dim() != 2 or dense.shape[1] != self.num_dense:
            raise ValueError(f"dense must be (B, {self.num_dense}); got {tuple(dense.shape)}")
        if categorical.dim() != 2 or categorical.shape[1] != self.num_single:
            raise ValueError(f"categorical must be (B, {self.num_single}); got {tuple(categorical.shape)}")
        if dense.shape[0] != categorical.shape[0]:
            raise ValueError(
                f"dense and categorical must have as many rows; got {tuple(dense.shape)} and {tuple(categorical.shape)}"
            )
        if len(bags) != len(self.tables) - self.num_single:
            raise ValueError(f"there must be {len(self.tables) - self.num_single} bags; got {len(bags)}")
        for i, bag in enumerate(bags, start=self.num_single):
            if bag.offsets.shape != dense.shape[:1]:
                raise ValueError(
                    f"feature {i} must have one offset per row, {dense.shape[0]}; got {tuple(bag.offsets.shape)}"
                )
            if bag.weights is not None and bag.weights.shape != bag.values.shape:
                raise ValueError(
                    f"feature {i} must have one weight per value; "
                    f"got weights {tuple(bag.weights.shape)} and values {tuple(bag.values.shape)}"
                )

    def extra_repr(self) -> str:
        return f"cardinalities={self.cardinalities}, dims={self.dims}, num_dense={self.num_dense}"


class _StackFunction(torch.autograd.Function):
    """(dense, tables) -> x0; backward: columns of dx0 to dense, and to each table the sum of dx0 over each id."""

    @staticmethod
    def forward(
        ctx: Any,
        stack: EmbeddingStack,
        categorical: Tensor,
        bags: Sequence[Bag],
        coefficients: list[Tensor],
        dense: Tensor,
        *tables: Tensor,
    ) -> Tensor:
        kernels, columns = stack._kernels(dense), stack.columns()
        rows, d = dense.shape[0], stack.out_features
        stride = -(-d // ALIGNMENT) * ALIGNMENT
        x0 = torch.empty((rows, stride), dtype=stack._dtype(), device=dense.device)[:, :d]
        single, K = tables[: stack.num_single], stack.num_single
        if kernels is None:
            check_ids(stack, categorical, bags)
            for k, table in enumerate(single):
                x0[:, columns[k]] = table[categorical[:, k]]
        elif (bad := kernels.stack_fwd(single, categorical, x0)) >= 0:
            raise _out_of_range(bad % K, int(categorical[bad // K, bad % K]), stack, f"row {bad // K}")
        for k, (bag, weights) in enumerate(zip(bags, coefficients, strict=True), start=K):
            out = x0[:, columns[k]]
            if kernels is None:
                weights = weights.to(out.dtype)
                out.copy_(F.embedding_bag(bag.values, tables[k], bag.offsets, mode="sum", per_sample_weights=weights))
            elif (bad := kernels.pool_fwd(tables[k], bag.values, bag.offsets, weights, out)) >= 0:
                raise _out_of_range(k, int(bag.values[bad]), stack, f"value {bad}")
        x0[:, d - stack.num_dense :] = dense
        ctx.stack, ctx.bags, ctx.coefficients = stack, bags, coefficients
        ctx.save_for_backward(categorical)
        return x0

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx0: Tensor) -> tuple[Tensor | None, ...]:
        stack, (categorical,), columns = ctx.stack, ctx.saved_tensors, ctx.stack.columns()
        tables, K, needs = tuple(stack.tables), stack.num_single, ctx.needs_input_grad[5:]
        kernels = stack._kernels(dx0)
        gradients: list[Tensor | None] = [None] * len(tables)
        if kernels is not None and K and any(needs[:K]):
            dx0 = dx0 if dx0.stride(1) == 1 else dx0.contiguous()
            for k, (rows, values) in enumerate(kernels.stack_bwd(tables[:K], categorical, dx0)):
                gradients[k] = _sparse(rows, values, tables[k], coalesced=True) if needs[k] else None
        for k in range(len(tables)):
            if gradients[k] is None and needs[k]:
                g = dx0[:, columns[k]]
                if k < K:
                    rows = categorical[:, k]
                else:
                    rows = ctx.bags[k - K].values
                    g = g[_row_of_value(ctx.bags[k - K])] * ctx.coefficients[k - K].to(g.dtype).unsqueeze(1)
                # A copy, because PyTorch's sparse operators overrun a single row that is a view of a wider one.
                g = g.clone(memory_format=torch.contiguous_format)
                gradients[k] = _sparse(rows, g, tables[k]).coalesce()
        ddense = dx0[:, dx0.shape[1] - stack.num_dense :] if ctx.needs_input_grad[4] else None
        return None, None, None, None, ddense, *gradients


def _sparse(rows: Tensor, values: Tensor, table: Tensor, coalesced: bool | None = None) -> Tensor:
    arguments = rows.unsqueeze(0), values, table.shape
    return torch.sparse_coo_tensor(*arguments, check_invariants=False, is_coalesced=coalesced)


def _row_of_value(bag: Bag) -> Tensor:
    """(n,): the row of the batch each value belongs to."""
    positions = torch.arange(bag.values.shape[0], device=bag.offsets.device)
    return torch.searchsorted(bag.offsets, positions, right=True) - 1


def pooling_coefficients(bag: Bag, pooling: str) -> Tensor:
    """(n,): what each value's row is multiplied with before the sum; for "mean" the weights of a row sum to 1."""
    weights = bag.values.new_ones(bag.values.shape, dtype=torch.float32) if bag.weights is None else bag.weights
    if pooling == "sum":
        return weights
    row = _row_of_value(bag)
    total = weights.new_zeros(bag.offsets.shape).index_add(0, row, weights)[row]
    return torch.where(total == 0, 0, weights / total)


def check_offsets(stack: EmbeddingStack, bags: Sequence[Bag]) -> None:
    for k, bag in enumerate(bags, start=stack.num_single):
        if bag.offsets.device.type != "cpu" or not len(bag.offsets):
            continue
        n = bag.values.shape[0]
        if bag.offsets[0] != 0 or bag.offsets[-1] > n or bool((bag.offsets.diff() < 0).any()):
            raise ValueError(
                f"feature {k}'s offsets must start at 0 and rise to at most {n}; got {bag.offsets.tolist()}"
            )


def check_ids(stack: EmbeddingStack, categorical: Tensor, bags: Sequence[Bag]) -> None:
    """On a GPU the lookup itself reports a bad id; asking beforehand would wait for the device."""
    if categorical.device.type != "cpu":
        return
    single = ((k, categorical[:, k]) for k in range(stack.num_single))
    for k, ids in (*single, *enumerate((bag.values for bag in bags), start=stack.num_single)):
        bad = ((ids < 0) | (ids >= stack.cardinalities[k])).nonzero()
        if len(bad):
            where = f"{'row' if k < stack.num_single else 'value'} {int(bad[0])}"
            raise _out_of_range(k, int(ids[bad[0]]), stack, where)


def _out_of_range(k: int, found: int, stack: EmbeddingStack, where: str) -> ValueError:
    return ValueError(
        f"feature {k} has {stack.cardinalities[k]} ids, 0 to {stack.cardinalities[k] - 1}; got id {found} in {where}"
    )


def _dims(cardinalities: tuple[int, ...], embedding_dim: int | Sequence[int] | None) -> tuple[int, ...]:
    if embedding_dim is None:
        return tuple(paper_dim(max(1, cardinality)) for cardinality in cardinalities)
    dims = (embedding_dim,) * len(cardinalities) if isinstance(embedding_dim, int) else tuple(embedding_dim)
    if len(dims) != len(cardinalities) or any(dim < 1 for dim in dims):
        raise ValueError(
            f"embedding_dim must be a positive integer, or one for each of {len(cardinalities)} features; "
            f"got {embedding_dim}"
        )
    return dims


@functools.cache
def _load_kernels() -> ModuleType | None:
    """The CPU kernels, imported at their first use: Numba is slow to import."""
    if importlib.util.find_spec("numba") is None:
        return None
    from fastcross.kernels.cpu import embedding

    return embedding
