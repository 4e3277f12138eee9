"""A trained cross network without its embeddings: L + C numbers per id in place of n_e.

A feature f enters the cross network only by its dots with the weights, and an id's dots are known once it is trained:

    T_f[id] = (w_0·e, …, w_{L-1}·e, v_0·e, …)          e: the id's embedding, w and v cut to the columns of f
    (p, q)  = Σ_f T_f[id_f] + D x_dense                 a bag's rows of T_f are pooled as its embeddings were
    z       = α_L q + β_L Vᵀ                            the same recurrence as ever, see kernels/closed_form.py

Per row that reads k (L + C) numbers where the embeddings have k n_e. It is exact: the tables are computed in float64
and rounded once. A deep network beside the cross network still reads its embeddings.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcross.kernels.layout import accumulation_dtype
from fastcross.layers.cross import CrossNetwork
from fastcross.models.base import Model
from fastcross.models.dcn import DCN, DCNConfig
from fastcross.ops.cross_network import folded_logits
from fastcross.ops.embedding import Bags, embedding_stack

AT_ONCE = 1 << 16  # rows of an embedding table that are tabulated at once


def fold(model: nn.Module) -> "Folded":
    """A copy of a trained DCN for serving, whose cross logits read L + C numbers per id and no embedding.

    It takes what the model takes and gives what the model gives in evaluation, to rounding. Without a deep network it
    is smaller by n_e / (L + C). It is not trained further.

    Raises:
        ValueError: where the logits do not read a rank-one cross network (``cross_type="vector"``, parallel).
    """
    if not isinstance(model, DCN) or not (is_rank_one(model) and model.parallel):
        raise ValueError(f'a fold needs a parallel DCN with cross_type="vector"; got {describe(model)}')
    return Folded(model)


def is_rank_one(model: DCN) -> bool:
    """Whether its cross network is the paper's, and its logits linear."""
    return isinstance(model.cross, CrossNetwork) and isinstance(model.logits, nn.Linear)


def describe(model: nn.Module) -> str:
    """As in: a DCN, structure stacked, cross_type matrix."""
    if not isinstance(model, DCN):
        return type(model).__name__
    config = model.config
    network = f"cross_type {config.cross_type}" if config.cross_layers else "cross_layers 0"
    return f"a DCN, structure {config.structure}, {network}"


class Folded(Model):
    """What :func:`fold` makes."""

    Config = DCNConfig
    config: DCNConfig
    table: Tensor  # (ids of all single-valued features, L + C)
    starts: Tensor  # (k + 1,): where each feature begins in it
    dense_table: Tensor  # (num_dense, L + C); its name is not that of an input, or torch.onnx confuses them
    constants: Tensor  # β_l·w_l, then β_L·v_c and the logits' bias

    def __init__(self, model: DCN) -> None:
        super().__init__(model.config)
        stack, d = model.embedding, model.cross.in_features
        vectors, constants = dots_and_constants(model)
        kind = accumulation_dtype(*(parameter.detach() for parameter in model.parameters()))
        single, pieces = stack.num_single, [vectors[:, at] for at in stack.columns()]
        folded = [_tabulated(table, of, kind) for table, of in zip(stack.tables, pieces, strict=False)]
        heights = torch.tensor([0, *stack.cardinalities[:single]], device=vectors.device)
        empty = vectors.new_empty((0, len(vectors)), dtype=kind)
        self.register_buffer("table", torch.cat([*folded[:single], empty]))
        self.register_buffer("starts", heights.cumsum(0))
        self.register_buffer("dense_table", vectors[:, d - stack.num_dense :].T.to(kind).contiguous())
        self.register_buffer("constants", constants.to(kind))
        self.bag_tables = nn.ParameterList(nn.Parameter(table, requires_grad=False) for table in folded[single:])
        self.deep_head: Tensor
        self.has_deep = bool(self.config.deep_layers)
        if self.has_deep:
            self.embedding, self.deep = copy.deepcopy(stack), copy.deepcopy(model.deep)
            self.register_buffer("deep_head", model.logits.weight.detach()[:, d:].clone())
        self.requires_grad_(False).eval()

    def forward(self, dense: Tensor, categorical: Tensor, bags: Bags = ()) -> Tensor:
        """Logits as the model's: (B,) for one output and (B, C) for more."""
        self._check(dense, categorical, bags)
        base = dense.to(self.dense_table.dtype) @ self.dense_table
        if len(self.bag_tables):
            pooled = embedding_stack(
                dense[:, :0], categorical[:, :0], tuple(self.bag_tables), bags, pooling=self.config.bag_pooling
            )
            base = base + pooled.unflatten(1, (len(self.bag_tables), -1)).sum(1)
        layers, backend = self.config.cross_layers, self.config.backend
        z = folded_logits(self.table, base, self.constants, layers, categorical.long(), self.starts, backend=backend)
        if self.has_deep:
            h = self.deep(self.embedding(dense, categorical, bags))
            z = z + F.linear(h, self.deep_head)
        return self._squeeze(z)

    def _check(self, dense: Tensor, categorical: Tensor, bags: Bags) -> None:
        wanted = len(self.dense_table), len(self.starts) - 1
        for name, t, count in zip(("dense", "categorical"), (dense, categorical), wanted, strict=True):
            if t.dim() != 2 or t.shape[1] != count:
                raise ValueError(f"{name} must be (B, {count}); got {tuple(t.shape)}")
        if len(bags) != len(self.bag_tables):
            raise ValueError(f"there must be {len(self.bag_tables)} bags; got {len(bags)}")


def dots_and_constants(model: DCN) -> tuple[Tensor, Tensor]:
    """In float64: the vectors that x0 is multiplied with, (L + C, d), and what the recurrence adds, (L + C,).

    Of a stacked model, whose logits do not read x_L, one vector of zeros stands in place of the C.
    """
    weight, head = model.cross.weight.detach().double(), model.logits.weight.detach().double()
    vectors = torch.cat((weight, head[:, : weight.shape[1]] if model.parallel else torch.zeros_like(weight[:1])))
    bias = torch.zeros_like(weight) if model.cross.bias is None else model.cross.bias.detach().double()
    beta = torch.cat((torch.zeros_like(bias[:1]), bias.cumsum(0)))
    constants = torch.cat(((beta[:-1] * weight).sum(1), vectors[len(weight) :] @ beta[-1]))
    if model.parallel and model.logits.bias is not None:
        constants[len(weight) :] += model.logits.bias.detach().double()
    return vectors, constants


def _tabulated(table: Tensor, vectors: Tensor, kind: torch.dtype) -> Tensor:
    """(cardinality, L + C) of a table of embeddings, a piece at a time: float64 takes twice the memory."""
    parts = [(rows.double() @ vectors.T).to(kind) for rows in table.detach().split(AT_ONCE)]
    return torch.cat(parts)
