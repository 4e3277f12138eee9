"""The embedding and stacking layer (section 2.1): every feature is written directly into one x0."""

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from fastcross.batch import Bag
from fastcross.defaults import paper_dim
from fastcross.kernels.embedding import new_faults, raise_faults
from fastcross.ops.embedding import Bags, check_batch, embedding_stack


class EmbeddingStack(nn.Module):
    """Equations 1 and 2: ``x0 = [W_1 x_1, …, W_k x_k, x_dense]``, an embedding per categorical feature, dense last.

    The result is a (B, d) view of a buffer whose rows are padded to a multiple of 16 elements. Features are numbered in
    the order of x0: single-valued features, then multi-valued ones (bags).

    The tables have dense gradients, like :class:`torch.nn.Embedding`, for any optimiser, DDP and torch.compile.
    :func:`fastcross.optim.configure` makes them sparse: its step reads only the rows of the batch, so its cost does not
    depend on the tables' number of rows. ``fastcross/ops/embedding.py`` describes sparse gradients.

    On a GPU, an id out of range makes x0 NaN and is recorded; :meth:`raise_faults` raises the error.

    Initialisation: N(0, 1/n_e) for a table of n_e columns, so that every feature has the same weight in the dots
    x0ᵀw_l, whatever its n_e.

    Args:
        cardinalities: number of ids of each single-valued feature: 0 … cardinality - 1.
        num_dense: number of dense features.
        embedding_dim: n_e, one for all or one per feature (bags last); None is the paper's 6 · cardinality^(1/4).
        bag_cardinalities: number of ids of each multi-valued feature.
        bag_pooling: "mean" (Σ weight · row / Σ weight) or "sum" (Σ weight · row); a row without values gives 0.
        sparse_gradients: True for sparse gradients, which SGD, Adagrad and SparseAdam accept too.
        backend: "auto" uses the kernels of the tensors' device if they can run, otherwise PyTorch's operators; "torch"
            uses PyTorch's operators.
    """

    # See kernels/embedding.py. The record belongs to this layer object, so it is not a buffer: buffers are averaged,
    # broadcast, cast, copied and left uninitialised together with the model's weights.
    faults: Tensor

    def __init__(
        self,
        cardinalities: Sequence[int],
        num_dense: int = 0,
        embedding_dim: int | Sequence[int] | None = None,
        *,
        bag_cardinalities: Sequence[int] = (),
        bag_pooling: str = "mean",
        sparse_gradients: bool = False,
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
        self.faults = self._new_faults()
        self.register_load_state_dict_post_hook(_move_faults)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for table in self.tables:
            nn.init.normal_(table, std=table.shape[1] ** -0.5)

    def raise_faults(self) -> None:
        """Raises ValueError if a GPU found an id or offset out of range since the last call, as a CPU does at once.

        The message names the lowest such row, of any batch since then, of the first such feature. The record is then
        cleared. This synchronises with the device. Ids beyond 32 bits are named by their bound.
        """
        raise_faults(self.faults, self.num_single, self.cardinalities)

    def _new_faults(self) -> Tensor:
        """An empty record, on the tables' device."""
        place = self.tables[0].device if len(self.tables) else None
        with torch.inference_mode(False):  # tensors made in that mode can be written to only in it
            return new_faults(self.num_single, len(self.cardinalities) - self.num_single, place)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        _move_faults(self)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """For copies and pickles: they start with an empty record, also those of older versions."""
        super().__setstate__(state)
        self._buffers.pop("faults", None)  # a buffer in older versions
        self._non_persistent_buffers_set.discard("faults")
        self.faults = self._new_faults()

    def load_pretrained(self, feature: int, weight: Tensor) -> None:
        """Copies ``weight`` (cardinality, n_e) to a table; ``tables[feature].requires_grad_(False)`` freezes it."""
        if weight.shape != self.tables[feature].shape:
            raise ValueError(
                f"feature {feature} needs a weight of {tuple(self.tables[feature].shape)}; got {tuple(weight.shape)}"
            )
        with torch.no_grad():
            self.tables[feature].copy_(weight)

    def columns(self) -> list[slice]:
        """The columns of x0 of each feature: the embeddings, then each dense feature."""
        widths = (*self.dims, *(1,) * self.num_dense)
        return [slice(sum(widths[:i]), sum(widths[: i + 1])) for i in range(len(widths))]

    def forward(self, dense: Tensor, categorical: Tensor, bags: Bags = ()) -> Tensor:
        """(B, num_dense), (B, k) ids and a bag for each multi-valued feature -> x0, (B, d)."""
        self._check_features(dense, categorical, bags)
        return embedding_stack(
            dense if self.cardinalities else dense.to(torch.get_default_dtype()),
            categorical,
            tuple(self.tables),
            bags,
            pooling=self.bag_pooling,
            sparse_gradients=self.sparse_gradients,
            backend=self.backend,
            faults=self.faults,
        )

    def check(self, dense: Tensor, categorical: Tensor, bags: Sequence[Bag]) -> None:
        """Raises if the tensors are not a batch with this layer's features."""
        check_batch(dense, categorical, bags)
        self._check_features(dense, categorical, bags)

    def _check_features(self, dense: Tensor, categorical: Tensor, bags: Bags) -> None:
        """Raises if the number of features differs from this layer's; embedding_stack checks the rest."""
        for name, t, count in (("dense", dense, self.num_dense), ("categorical", categorical, self.num_single)):
            if isinstance(t, Tensor) and (t.dim() != 2 or t.shape[1] != count):
                raise ValueError(f"{name} must be (B, {count}); got {tuple(t.shape)}")
        if len(bags) != len(self.cardinalities) - self.num_single:
            raise ValueError(f"there must be {len(self.cardinalities) - self.num_single} bags; got {len(bags)}")

    def extra_repr(self) -> str:
        return f"cardinalities={self.cardinalities}, dims={self.dims}, num_dense={self.num_dense}"


def _move_faults(stack: EmbeddingStack, *_: Any) -> None:
    """Move the record to the tables' device. One that is there already stays, because a CUDA graph may write to it."""
    before, after = stack.faults, stack._new_faults()
    if before.device != after.device:
        stack.faults = after if before.is_meta or after.is_meta else after.copy_(before)


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
