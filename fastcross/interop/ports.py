"""Descriptions of an exported graph's inputs and outputs."""

from __future__ import annotations

from dataclasses import dataclass

from fastcross.data.encoder import Encoder

PREDICTION = "prediction"  # of a quantity


@dataclass(frozen=True)
class Port:
    """An input or an output of an exported graph."""

    name: str
    type: str  # of its elements, as onnxruntime calls it: string, double, float, int64
    shape: str
    meaning: str


def encoded_inputs(encoder: Encoder) -> list[Port]:
    """The inputs of a graph that takes ids. A bag is two or three inputs, named by torch.export."""
    schema = encoder.schema
    ports = [
        Port("dense", "float", f"(batch, {len(schema.dense_names)})", _listed(schema.dense_names)),
        Port("categorical", "int64", f"(batch, {len(schema.cardinalities)})", _listed(schema.categorical_names)),
    ]
    for i, name in enumerate(schema.bag_names):
        ports.append(Port(f"bags_{i}_0", "int64", "(values,)", f"the ids of {name}, row after row"))
        ports.append(Port(f"bags_{i}_1", "int64", "(batch,)", f"where the ids of {name} begin in each row"))
        if name in encoder.columns.weights:
            ports.append(Port(f"bags_{i}_2", "float", "(values,)", f"the weights of {name}'s ids"))
    return ports


def encoded_output(encoder: Encoder) -> Port:
    classes = encoder.classes
    if not classes:
        return Port(PREDICTION, "float", "(batch,)", f"of {encoder.columns.label}, a quantity")
    if len(classes) == 2:
        return Port("logit", "float", "(batch,)", f"sigmoid of it is the probability of the class {classes[1]}")
    return Port("logits", "float", f"(batch, {len(classes)})", f"softmax of them: the classes {', '.join(classes)}")


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names[:6]) + (f" … {names[-1]}" if len(names) > 6 else "")
