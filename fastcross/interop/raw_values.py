"""From a model's ONNX graph, which takes ids, to one that takes raw values and gives probabilities."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import onnx_ir as ir

from fastcross._version import __version__
from fastcross.data.encoder import Encoder, Vocabulary
from fastcross.interop.onnx_encoder import OUTPUT, PREFIX, OnnxEncoder
from fastcross.interop.ports import PREDICTION, Port, encoded_output

LARGEST_TEXTS = 2**30  # bytes of all vocabularies: they must lie in the protobuf, which holds 2 GiB
INSTEAD = "--encoded exports the graph that takes ids, with the encoder beside it"


def check_expressible(encoder: Encoder) -> None:
    """Raise ValueError where ONNX has no operator for what the encoder does."""
    columns, schema = encoder.columns, encoder.schema
    texts = 0
    named = zip((*schema.categorical_names, *schema.bag_names), (*encoder.categorical, *encoder.bags), strict=True)
    for name, ids in named:
        if not isinstance(ids, Vocabulary):
            raise ValueError(
                f"column {name} is hashed into {ids.buckets:,} buckets, and ONNX has no such operator; {INSTEAD}"
            )
        texts += ids.values.nbytes
        separator = columns.separator_of(name)
        inside = (text for text in ids.values.to_pylist() if text and separator in text)
        if name in schema.bag_names and (text := next(inside, None)):
            raise ValueError(
                f"column {name} has the value {text!r}, with the separator {separator!r} that takes texts apart in it; "
                f"{INSTEAD}"
            )
    if texts > LARGEST_TEXTS:
        size = f"{texts / 2**30:.1f} GiB, and an ONNX file has room for {LARGEST_TEXTS / 2**30:g} GiB of texts"
        raise ValueError(f"the vocabularies take {size}; {INSTEAD}")


def take_raw_values(model: ir.Model, encoder: Encoder) -> tuple[list[Port], Port]:
    """Put the encoder before the graph and the probabilities behind it; what the graph takes and gives then."""
    graph = model.graph
    _set_names_apart(graph)
    before = OnnxEncoder(encoder)
    dense, columns, bags = before.encode()
    old_dense, categorical, *old_bags = graph.inputs
    _take_columns(graph, categorical, columns)
    matrix = before.stack(columns, np.int64) if categorical.uses() else categorical
    for old, new in zip((old_dense, categorical, *old_bags), (dense, matrix, *bags), strict=True):
        ir.convenience.replace_all_uses_with(old, new)
    graph.inputs.clear()
    graph.inputs.extend(before.inputs)
    graph.insert_before(graph[0], before.nodes)
    for name in [name for name, value in graph.initializers.items() if not value.uses()]:
        del graph.initializers[name]  # onnxruntime would warn of each
    model.opset_imports["ai.onnx.ml"] = 3
    output = _give_probabilities(graph, encoder)
    model.metadata_props.update(describe(encoder, before.ports))
    return before.ports, output


def _take_columns(graph: ir.Graph, categorical: ir.Value, columns: list[ir.Value]) -> None:
    """Where the graph takes a single column out of the matrix of ids, give it the column itself: a matrix that is put
    together to be taken apart again costs as much as half of the look-ups."""
    for node, _ in list(categorical.uses()):
        index = node.inputs[1].const_value if node.op_type == "Gather" and node.inputs[1] is not None else None
        if index is not None and not index.shape.rank() and node.attributes["axis"].as_int() == 1:
            ir.convenience.replace_all_uses_with(node.outputs[0], columns[int(index.numpy())])
            graph.remove(node, safe=True)
        elif node.op_type == "Shape" and "end" in node.attributes and node.attributes["end"].as_int() == 1 and columns:
            node.replace_input_with(0, columns[0])  # the number of rows


def describe(encoder: Encoder, inputs: list[Port]) -> dict[str, str]:
    """What the file says of itself, in onnxruntime: session.get_modelmeta().custom_metadata_map."""
    columns = encoder.columns
    kinds = {"dense": columns.dense, "categorical": columns.categorical, "multi-valued": columns.bags}
    kinds |= {"date-time": columns.datetimes, "weights": tuple(columns.weights.values())}
    named = {name: kind for kind, names in kinds.items() for name in names or ()}
    listed = [
        {"input": port.name, "column": column, "kind": named[column], "type": port.type}
        | ({"separator": columns.separator_of(column)} if named[column] == "multi-valued" else {})
        for port in inputs
        for column in (port.name if port.name in named else port.name.removesuffix("_in"),)
    ]
    return {
        "fastcross.version": __version__,
        "fastcross.encoder": encoder.fingerprint,
        "fastcross.classes": json.dumps(encoder.classes),
        "fastcross.columns": json.dumps(listed),
    }


def _give_probabilities(graph: ir.Graph, encoder: Encoder) -> Port:
    (logits,) = graph.outputs
    classes = encoder.classes
    quantity, binary = not classes, len(classes) == 2
    shape: list[Any] = ["batch"] if quantity or binary else ["batch", len(classes)]
    output = ir.Value(
        name=PREDICTION if quantity else OUTPUT, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT)
    )
    kind, attributes = ("Identity" if quantity else "Sigmoid", {}) if quantity or binary else ("Softmax", {"axis": 1})
    graph.append(ir.node(kind, [logits], attributes, outputs=[output]))
    graph.outputs.clear()
    graph.outputs.append(output)
    if quantity:
        return encoded_output(encoder)
    if binary:
        return Port(OUTPUT, "float", "(batch,)", f"of the class {classes[1]}")
    return Port(OUTPUT, "float", f"(batch, {len(classes)})", f"of the classes {', '.join(classes)}")


def _set_names_apart(graph: ir.Graph) -> None:
    """Every name inside the graph gets a prefix: the inputs will be called as the columns are."""
    for name, value in [*graph.initializers.items()]:
        del graph.initializers[name]
        value.name = f"{PREFIX}{name}"
        graph.initializers[value.name] = value
    for node in graph:
        for value in node.outputs:
            value.name = f"{PREFIX}{value.name}"
