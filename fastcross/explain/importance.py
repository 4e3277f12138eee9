"""How much each column matters to a whole model: how far the output moves when the column's values are permuted."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastcross.batch import Batch
from fastcross.data.cache import gather_ragged
from fastcross.data.encoder import Encoder

Array = npt.NDArray[Any]


def permutation_importances(
    predict: Callable[[Batch], Tensor], batches: Iterable[Batch], encoder: Encoder
) -> dict[str, float]:
    """By column, the mean absolute change of the output, as a share of all columns' changes.

    All features that are made of a column move together: its number and its category, the parts of a date.
    """
    generator, columns = np.random.default_rng(0), encoder.columns
    found = dict.fromkeys(columns.inputs, 0.0)
    for rows in batches:
        expected = predict(rows)
        for column in found:
            order = generator.permutation(len(rows))
            found[column] += float(
                (predict(_permuted(rows, column, order, encoder)).double() - expected.double()).abs().sum()
            )
    total = sum(found.values())
    return {name: value / total if total else 0.0 for name, value in found.items()}


def _permuted(rows: Batch, column: str, order: Array, encoder: Encoder) -> Batch:
    schema = encoder.schema

    def of_column(names: Sequence[str]) -> list[int]:
        return [i for i, name in enumerate(names) if encoder.columns.source_of(name) == column]

    dense, categorical, bags = rows.dense.clone(), rows.categorical.clone(), list(rows.bags)
    for i in of_column(schema.dense_names):
        dense[:, i] = dense[order, i]
    for i in of_column(schema.categorical_names):
        categorical[:, i] = categorical[order, i]
    for i in of_column(schema.bag_names):
        bag = bags[i]
        bounds = np.append(bag.offsets.numpy(), len(bag.values))
        places, offsets = gather_ragged(bounds, order)
        weights = None if bag.weights is None else bag.weights[places]
        bags[i] = replace(bag, values=bag.values[places], offsets=torch.from_numpy(offsets), weights=weights)
    return replace(rows, dense=dense, categorical=categorical, bags=tuple(bags))
