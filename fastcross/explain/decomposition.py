"""The logit of a cross network by field: an exact split into main effects, pairs and higher crosses.

With x0 = [e_1, …, e_k] a field f enters the network only through L + 1 numbers, t_{l,f} = w_l[f]·e_f and, for the head,
t_{L,f} = v[f]·e_f. Their sums over the fields are all that the closed form needs:

    p_l = Σ_f t_{l,f},   q = Σ_f t_{L,f},   α_{l+1} = α_l (1 + p_l) + c_l,   z = α_L q + β_L·v

So z(F), the logit with the fields of a set F at their values and all others at a baseline, costs O(L), and the parts of
z follow by inclusion and exclusion:

    constant  z(∅)          main effect of f  z({f}) - z(∅)          pair f, g  z({f, g}) - z({f}) - z({g}) + z(∅)

They add up to z exactly, whatever the baseline. At the baseline 0 a part is the sum of the polynomial's monomials in
just those fields. At the fields' means over the data a pair is what the two fields do together beyond what each does on
average: for independent fields the functional ANOVA of all terms that are linear in each field.

A matrix cross network of DCN-V2 has no such numbers per field: its logit is split by degree (:func:`matrix_degrees`).
"""

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from fastcross.batch import Batch
from fastcross.layers.cross import CrossMatrix, CrossNetwork
from fastcross.models.dcn import DCN
from fastcross.ops.embedding import pooling_coefficients


class CrossLogit:
    """One output's cross logit of a DCN as a function of the fields' t: (…, k, L + 1) in float64.

    Args:
        model: a DCN whose logits layer reads the cross output (``structure="parallel"``).
        output: which of its outputs.
    """

    def __init__(self, model: DCN, output: int = 0) -> None:
        if not model.parallel:
            raise ValueError(
                "a cross logit needs a logits layer that reads the cross network; "
                f"got cross_layers = {model.config.cross_layers} and structure = {model.config.structure!r}"
            )
        if not isinstance(model.cross, CrossNetwork):
            kind = type(model.cross).__name__
            raise ValueError(f"only a CrossNetwork (cross_type vector) splits into fields exactly; got {kind}")
        if not 0 <= output < model.config.num_outputs:
            raise ValueError(f"output must be one of {model.config.num_outputs}, from 0; got {output}")
        self.embedding, self.output = model.embedding, output
        weight, head = model.cross.weight.detach(), model.logits.weight.detach()[output, : model.cross.in_features]
        vectors = torch.cat((weight, head[None])).double()  # (L + 1, d)
        bias = torch.zeros_like(vectors[:-1]) if model.cross.bias is None else model.cross.bias.detach().double()
        beta = torch.cat((torch.zeros_like(bias[:1]), bias.cumsum(0)))
        self.c = (beta[:-1] * vectors[:-1]).sum(1)  # (L,)
        self.constant = beta[-1] @ vectors[-1]  # β_L·v
        if model.logits.bias is not None:
            self.constant = self.constant + model.logits.bias.detach()[output].double()
        self.vectors = vectors

    @cached_property
    def tables(self) -> list[Tensor]:
        """The L + 1 numbers of every id, in place of its n_e."""
        pieces = zip(self.embedding.tables, self.embedding.columns(), strict=False)
        return [table.detach().double() @ self.vectors[:, at].T for table, at in pieces]

    @property
    def fields(self) -> int:
        return len(self.embedding.columns())

    def of_x0(self, x0: Tensor) -> Tensor:
        """(B, k, L + 1): the t of rows of x0 in float64; for a few rows, without the tables."""
        return torch.stack([x0[:, at] @ self.vectors[:, at].T for at in self.embedding.columns()], 1)

    def projections(self, batch: Batch) -> Tensor:
        """(B, k, L + 1): the t of a batch's rows, fields in the order of x0."""
        single = self.embedding.num_single
        parts = [F.embedding(batch.categorical[:, f], self.tables[f]) for f in range(single)]
        for bag, table in zip(batch.bags, self.tables[single:], strict=True):
            share = pooling_coefficients(bag, self.embedding.bag_pooling).double()
            parts.append(F.embedding_bag(bag.values, table, bag.offsets, mode="sum", per_sample_weights=share))
        dense = self.vectors[:, self.vectors.shape[1] - self.embedding.num_dense :]  # (L + 1, num_dense)
        stacked = torch.stack(parts, 1) if parts else dense.new_empty((len(batch), 0, len(dense)))
        return torch.cat((stacked, batch.dense.double().unsqueeze(2) * dense.T), dim=1)

    def __call__(self, sums: Tensor) -> Tensor:
        """z for (…, L + 1) sums over the fields: p_0, …, p_{L-1}, q."""
        alpha = torch.ones_like(sums[..., 0])
        for layer, c in enumerate(self.c):
            alpha = torch.addcmul(alpha + c, alpha, sums[..., layer])
        return torch.addcmul(self.constant, alpha, sums[..., -1])

    def degrees(self, t: Tensor, baseline: Tensor) -> Tensor:
        """(B, L + 2): the parts of z of degree 0 to L + 1 in the fields' deviations from the baseline; they sum to z.

        z(baseline + s · deviation) is a polynomial in s; these are its coefficients.
        """
        at, deviation = baseline.sum(0), (t - baseline).sum(1)  # (L + 1,), (B, L + 1)
        alpha = t.new_zeros((len(t), len(self.c) + 2))
        alpha[:, 0] = 1
        for layer, c in enumerate(self.c):
            raised = alpha * (1 + at[layer])
            raised[:, 1:] += alpha[:, :-1] * deviation[:, layer, None]
            raised[:, 0] += c
            alpha = raised
        z = alpha * at[-1]
        z[:, 1:] += alpha[:, :-1] * deviation[:, -1, None]
        z[:, 0] += self.constant
        return z


def matrix_degrees(cross: CrossMatrix, x0: Tensor, mean: Tensor, head: Tensor) -> Tensor:
    """(B, L + 2): the parts of x_L·v of degree 0 to L + 1 in the deviations δ of x0 from its ``mean``; x_L·v in all.

    x_l at mean + s δ is a polynomial in s. Its coefficients X_n follow the layers: with H_n = W X_n (H_0 = W X_0 + b),
    X_n ← mean ⊙ H_n + δ ⊙ H_{n-1} + X_n.

    Args:
        cross: the network.
        x0: (B, d) in float64.
        mean, head: (d,) each; ``head`` is v.
    """
    deviation, layers = x0 - mean, cross.num_layers
    coefficients = x0.new_zeros(layers + 2, *x0.shape)
    coefficients[0], coefficients[1] = mean, deviation
    for layer in range(layers):
        h = coefficients @ cross.weight[layer].double().T
        if cross.bias is not None:
            h[0] += cross.bias[layer].double()
        coefficients = coefficients + mean * h
        coefficients[1:] += deviation * h[:-1]
    return (coefficients @ head).T


def main_effects(logit: CrossLogit, t: Tensor, baseline: Tensor) -> tuple[Tensor, Tensor]:
    """The constant z(∅) and z({f}) - z(∅) for each field, (B, k)."""
    at = baseline.sum(0)
    constant = logit(at)
    return constant, logit(at + t - baseline) - constant


def set_effects(logit: CrossLogit, t: Tensor, baseline: Tensor, sets: Tensor) -> Tensor:
    """(B, n): what each of n sets of fields, (n, size), does together beyond all of its subsets."""
    at, deviation = baseline.sum(0), t - baseline
    size = sets.shape[1]
    total = t.new_zeros((len(t), len(sets)))
    for members in range(1 << size):
        chosen = [i for i in range(size) if members >> i & 1]
        sums = at + sum((deviation[:, sets[:, i]] for i in chosen), start=t.new_zeros(1, 1, len(at)))
        total += (-1) ** (size - len(chosen)) * logit(sums)
    return total


def pairs_of(fields: int) -> Tensor:
    """(k (k - 1) / 2, 2): all pairs f < g."""
    return torch.combinations(torch.arange(fields), 2)


def pair_effects(logit: CrossLogit, t: Tensor, baseline: Tensor, main: Tensor, constant: Tensor) -> Tensor:
    """(pairs, B) as :func:`set_effects` gives them, from the known main effects: one logit for each pair."""
    rows, k, _ = t.shape
    at, deviation = baseline.sum(0), (t - baseline).permute(2, 1, 0).contiguous()  # (L + 1,), (L + 1, k, B)
    shifted, alone = deviation + at[:, None, None], (main + constant).T.contiguous()
    result = t.new_empty((k * (k - 1) // 2, rows))
    first = 0
    for f in range(k - 1):  # with all later fields at once
        alpha = result[first : first + k - f - 1]
        factor = torch.empty_like(alpha)
        alpha.fill_(1)
        for layer, c in enumerate(logit.c):
            torch.add(deviation[layer, f + 1 :], shifted[layer, f], out=factor)
            alpha.addcmul_(alpha, factor).add_(c)
        torch.add(deviation[-1, f + 1 :], shifted[-1, f], out=factor)
        alpha.mul_(factor).add_(logit.constant + constant).sub_(alone[f + 1 :]).sub_(alone[f])
        first += k - f - 1
    return result
