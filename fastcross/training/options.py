"""A model by its name and its options, for the columns of a cache."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fastcross.batch import Schema
from fastcross.models import MODELS
from fastcross.models.base import Model

OF_DATA = (
    "cardinalities",
    "num_dense",
    "bag_cardinalities",
    "num_outputs",
    "regression",
    "label_mean",
    "label_deviation",
)


def model_options(name: str) -> tuple[str, ...]:
    """The options that a model takes beside what follows from the data."""
    if name not in MODELS:
        raise ValueError(f"there is no model {name!r}; there are {', '.join(MODELS)}")
    return tuple(entry.name for entry in fields(MODELS[name].Config) if entry.name not in OF_DATA)


def build(
    name: str, options: Mapping[str, Any], schema: Schema, label_scale: tuple[float, float] = (0.0, 1.0)
) -> Model:
    """The model for data with these columns; label_scale: mean and standard deviation of a label that is a quantity."""
    features: dict[str, Any] = {
        "cardinalities": schema.cardinalities,
        "num_dense": len(schema.dense_names),
        "bag_cardinalities": schema.bag_cardinalities,
        "num_outputs": schema.num_outputs,
    }
    if schema.task == "regression":
        features |= {"regression": True, "label_mean": label_scale[0], "label_deviation": label_scale[1]}
    return MODELS[name].from_config({**features, **resolve_options(options, schema)})


def resolve_options(options: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
    """The options, with crosses as positions among the categorical columns."""
    resolved = dict(options)
    if "crosses" in resolved:
        resolved["crosses"] = [[_position(schema, feature) for feature in cross] for cross in resolved["crosses"]]
    return resolved


def count(model: Model, *, embeddings: bool = True) -> int:
    """Parameters; without the embedding layer as the paper counts them in section 4.4."""
    named = model.named_parameters()
    return sum(p.numel() for name, p in named if embeddings or not name.startswith("embedding."))


def _position(schema: Schema, feature: str | int) -> int:
    if isinstance(feature, int):
        return feature
    if feature not in schema.categorical_names:
        raise ValueError(f"{feature!r} is not a categorical column; there are {', '.join(schema.categorical_names)}")
    return schema.categorical_names.index(feature)
