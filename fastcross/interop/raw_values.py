"""Put the encoder before a model's ONNX graph, so that raw values go in and probabilities come out.

The encoder in ONNX's operators:

    dense         x -> (f(clip(x, low, high)) - mean) · scale, float32; NaN -> 0, and 1 in its flag (data/numbers.py)
    categorical   text -> id                     LabelEncoder; 0 for texts that training did not see
    date-time     Unix time -> hour, weekday, month -> ids; day, year, days since 1970 -> as dense
    bag           text -> its values -> ids      StringSplit, LabelEncoder; values and offsets, as for EmbeddingBag

A text in ONNX cannot be null. A missing value is "", or a mark of the run's file format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pyarrow as pa

from fastcross._version import __version__
from fastcross.data.blocks import WEEKDAYS
from fastcross.data.encoder import Encoder, Vocabulary
from fastcross.data.formats.reading import get_format
from fastcross.interop.export import PREDICTION, Port, encoded_output

# onnxruntime converts None, NaN and pandas' NA and NaT in an array of objects to the last five.
MISSING = ("", "None", "nan", "NaN", "<NA>", "NaT")
NOT_A_TIME = -9.2e18  # above NumPy's NaT as a number
LARGEST_UNIX_SECONDS = 1e11  # larger times are in ms, times a thousand times larger in µs, …
OUTPUT = "probability"
PREFIX = "fastcross/"  # of the names inside a graph, so that columns may have any
LARGEST_TEXTS = 2**30  # bytes of all vocabularies: they must lie in the protobuf, which holds 2 GiB
INSTEAD = "--encoded exports the graph that takes ids, with the encoder beside it"


def check_expressible(encoder: Encoder) -> None:
    """Raise ValueError if ONNX has no operator for a step of the encoder."""
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
    """Put the encoder before the graph and the probabilities after it; returns the new inputs and output."""
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
    model.opset_imports["ai.onnx.ml"] = 4
    output = _give_probabilities(graph, encoder)
    model.metadata_props.update(_metadata(encoder, before.ports))
    return before.ports, output


def _take_columns(graph: ir.Graph, categorical: ir.Value, columns: list[ir.Value]) -> None:
    """Replace each selection of a column from the matrix of ids by the column itself. Building the matrix only to
    divide it again costs as much as half of the look-ups."""
    for node, _ in list(categorical.uses()):
        index = node.inputs[1].const_value if node.op_type == "Gather" and node.inputs[1] is not None else None
        if index is not None and not index.shape.rank() and node.attributes["axis"].as_int() == 1:
            ir.convenience.replace_all_uses_with(node.outputs[0], columns[int(index.numpy())])
            graph.remove(node, safe=True)
        elif node.op_type == "Shape" and "end" in node.attributes and node.attributes["end"].as_int() == 1 and columns:
            node.replace_input_with(0, columns[0])  # the number of rows


def _metadata(encoder: Encoder, inputs: list[Port]) -> dict[str, str]:
    """The file's metadata, in onnxruntime session.get_modelmeta().custom_metadata_map."""
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
    """Add a prefix to every name inside the graph, because the inputs have the names of the columns."""
    for name, value in [*graph.initializers.items()]:
        del graph.initializers[name]
        value.name = f"{PREFIX}{name}"
        graph.initializers[value.name] = value
    for node in graph:
        for value in node.outputs:
            value.name = f"{PREFIX}{value.name}"


class OnnxEncoder:
    """Records the encoder's operators on a tape, with the inputs that they need."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder, self.columns = encoder, encoder.columns
        self.known = dict(zip(encoder.columns.categories, encoder.categorical, strict=True))
        self.nodes: list[ir.Node] = []
        self.inputs: list[ir.Value] = []
        self.ports: list[Port] = []
        self.spellings = dict.fromkeys((*get_format(encoder.format).missing, *MISSING))

    def encode(self) -> tuple[ir.Value, list[ir.Value], list[ir.Value]]:
        """dense (batch, num_dense) float32, the ids of each categorical column (batch,), the tensors of each bag."""
        dense = self._dense()
        categorical = [self._category(name) for name in self.columns.categorical or ()]
        times = {name: self._time(name) for name in self.columns.datetimes or ()}
        categorical += [
            self._category_of_date(times[name], name, part) for name, part in self.columns.categories_of_dates
        ]
        categorical += self._levels(dense)
        dense += [self._number_of_date(times[name], part) for name, part in self.columns.numbers_of_dates]
        bags = [self._bag(name, ids) for name, ids in zip(self.columns.bags or (), self.encoder.bags, strict=True)]
        return self._transform(self.stack(dense, np.float64)), categorical, [tensor for bag in bags for tensor in bag]

    def _dense(self) -> list[ir.Value]:
        what = "a number; missing: NaN"
        return [self._input(name, "double", what) for name in self.columns.dense or ()]

    def _transform(self, x: ir.Value) -> ir.Value:
        numbers = self.encoder.numbers
        missing = self._op("IsNaN", x)
        x = self._op("Min", self._op("Max", x, self._constant(numbers.low[None])), self._constant(numbers.high[None]))
        if numbers.log.any():
            size = self._op("Div", self._op("Abs", x), self._constant(numbers.unit[None]))
            log = self._op("Mul", self._op("Sign", x), self._op("Log", self._op("Add", size, self._constant(1.0))))
            x = log if numbers.log.all() else self._op("Where", self._constant(numbers.log[None]), log, x)
        x = self._op("Mul", self._op("Sub", x, self._constant(numbers.mean[None])), self._constant(numbers.scale[None]))
        x = self._op("Where", missing, self._constant(np.float32(0)), self._op("Cast", x, to=ir.DataType.FLOAT.value))
        if not len(numbers.flagged):
            return x
        flags = self._op("Gather", missing, self._constant(numbers.flagged), axis=1)
        return self._op("Concat", x, self._op("Cast", flags, to=ir.DataType.FLOAT.value), axis=1)

    def _category(self, name: str) -> ir.Value:
        keys = self._keys(_vocabulary(self.known[name]))
        return self._look_up(self._input(name, "string", 'a text; missing: ""'), keys)

    def _levels(self, dense: list[ir.Value]) -> list[ir.Value]:
        """The ids of numbers that are categories, too; a key of float64 is the number itself."""
        found = []
        names = self.columns.levels
        for name, ids in zip(
            names, self.encoder.categorical[len(self.encoder.categorical) - len(names) :], strict=True
        ):
            x = dense[(self.columns.dense or ()).index(name)]
            texts = _vocabulary(ids).values.to_pylist()
            pairs = {float(text): float(i) for i, text in enumerate(texts, 1) if text is not None}
            missing = texts.index(None) + 1 if None in texts else 0
            keys, values = (ir.tensor(np.array([*each], np.float64)) for each in (pairs, pairs.values()))
            table = {"keys_tensor": keys, "values_tensor": values, "default_tensor": ir.tensor(np.zeros(1))}
            id_ = (
                self._node("LabelEncoder", [x], table, domain="ai.onnx.ml")[0]
                if pairs
                else self._op("Mul", x, self._constant(0.0))
            )
            id_ = self._op("Where", self._op("IsNaN", x), self._constant(float(missing)), id_)
            found.append(self._op("Cast", id_, to=ir.DataType.INT64.value))
        return found

    def _time(self, name: str) -> dict[str, ir.Value]:
        """Whole hours and days since 1970, and what the calendar says of them; and whether the time is missing."""
        time = self._input(name, "double", "Unix time in s, ms, µs or ns (UTC); missing: NaN")
        missing = self._op("Or", self._op("IsNaN", time), self._op("LessOrEqual", time, self._constant(NOT_A_TIME)))
        seconds = self._op("Where", missing, self._constant(0.0), time)
        size = self._op("Abs", seconds)
        for power in range(3):
            larger = self._op("GreaterOrEqual", size, self._constant(LARGEST_UNIX_SECONDS * 1000.0**power))
            scaled = self._op("Div", time, self._constant(1000.0 ** (power + 1)))
            seconds = self._op("Where", larger, scaled, seconds)
        hours, days = (
            self._op("Cast", self._op("Floor", self._op("Div", seconds, self._constant(length))), to=7)
            for length in (3600.0, 86400.0)
        )
        return {"missing": missing, "hours": hours} | self._calendar(days)

    def _category_of_date(self, time: Mapping[str, ir.Value], name: str, part: str) -> ir.Value:
        """The id, from a table of the ids of all 24 hours, 7 weekdays or 12 months, and of the missing one."""
        texts, counted, shift = {
            "hour": ([str(hour) for hour in range(24)], "hours", 0),
            "weekday": (WEEKDAYS.to_pylist(), "days", 3),  # 1970-01-01 was a Thursday
            "month": ([str(month) for month in range(1, 13)], "month", -1),
        }[part]
        table = self.known[f"{name}.{part}"].ids(pa.array([*texts, None], pa.string())).astype(np.int64)
        shifted = self._op("Add", time[counted], self._constant(shift))
        place = self._op("Mod", shifted, self._constant(len(texts)))
        place = self._op("Where", time["missing"], self._constant(len(texts)), place)
        return self._op("Gather", self._constant(table), place, axis=0)

    def _number_of_date(self, time: Mapping[str, ir.Value], part: str) -> ir.Value:
        number = self._op("Cast", time[part], to=ir.DataType.DOUBLE.value)
        return self._op("Where", time["missing"], self._constant(np.nan), number)

    def _calendar(self, days: ir.Value) -> dict[str, ir.Value]:
        """Day, month and year from the days since 1970, in integers, for the years from 1 on.

        A year that begins in March has its leap day last. So the days of such a year become its months, 0 … 11, by the
        line (5 days + 2) / 153. 719468 days lie between 0000-03-01 and 1970-01-01, and 146097 in every 400 years.
        """

        def op(kind: str, a: ir.Value, b: ir.Value | int) -> ir.Value:
            return self._op(kind, a, self._constant(b) if isinstance(b, int) else b)

        since = op("Add", days, 719468)
        period = op("Div", since, 146097)
        of_period = op("Mod", since, 146097)
        leap_days = op("Sub", op("Div", of_period, 1460), op("Div", of_period, 36524))
        leap_days = op("Add", leap_days, op("Div", of_period, 146096))
        year = op("Div", op("Sub", of_period, leap_days), 365)
        before = op("Sub", op("Add", op("Mul", year, 365), op("Div", year, 4)), op("Div", year, 100))
        of_year = op("Sub", of_period, before)
        month = op("Div", op("Add", op("Mul", of_year, 5), 2), 153)
        of_months = op("Div", op("Add", op("Mul", month, 153), 2), 5)
        return {
            "day": op("Add", op("Sub", of_year, of_months), 1),
            "month": op("Add", op("Mod", op("Add", month, 2), 12), 1),
            "year": op("Add", op("Add", op("Mul", period, 400), year), op("Div", month, 10)),
            "days": days,
        }

    def _bag(self, name: str, ids: Any) -> list[ir.Value]:
        """Values and offsets, and weights if the bag has them."""
        separator = self.columns.separator_of(name)
        texts = self._input(name, "string", f'values with {separator!r} between them; none: ""')
        parts, counts = self._split(texts, separator)
        width = self._op("Shape", parts, start=1)
        places = self._op("Range", self._constant(0), self._op("Squeeze", width), self._constant(1))
        there = self._op("Less", places, self._op("Unsqueeze", counts, self._constant([1])))
        there = self._op("Reshape", there, self._constant([-1]))
        values = self._op("Compress", self._look_up(parts, self._keys(_vocabulary(ids))), there)
        bag = [values, self._op("CumSum", counts, self._constant(0), exclusive=1)]
        if name in self.columns.weights:
            bag.append(self._weights(name, separator, counts, parts, there))
        return bag

    def _weights(self, name: str, separator: str, counts: ir.Value, parts: ir.Value, there: ir.Value) -> ir.Value:
        """One weight per value. A row with another number of weights gets NaN; other rows are not affected."""
        column = self.columns.weights[name]
        texts = self._input(column, "string", f"the weights of {name}, with {separator!r} between them")
        given, number = self._split(texts, separator)
        padding = self._op("Expand", self._constant(np.array("nan", object)), self._op("Shape", parts))
        wide = self._op("Concat", given, padding, axis=1)
        wide = self._op("Slice", wide, self._constant([0]), self._op("Shape", parts, start=1), self._constant([1]))
        fits = self._op("Unsqueeze", self._op("Equal", counts, number), self._constant([1]))
        wide = self._op("Where", fits, wide, self._constant(np.array("nan", object)))
        return self._op("Cast", self._op("Compress", wide, there), to=ir.DataType.FLOAT.value)

    def _split(self, texts: ir.Value, separator: str) -> tuple[ir.Value, ir.Value]:
        """Texts (batch, largest count), and each row's count."""
        parts, counts = self._node("StringSplit", [texts], {"delimiter": separator}, outputs=2)
        missing = self._look_up(texts, dict.fromkeys(self.spellings, 1))
        counts = self._op("Mul", counts, self._op("Sub", self._constant(1), missing))
        # Fails if the number of rows differs from the first column's: missing rows would pass for empty bags.
        return parts, self._op("Reshape", counts, self._op("Shape", self.inputs[0]))

    def _keys(self, ids: Vocabulary) -> dict[str, int]:
        texts = ids.values.to_pylist()
        keys = {text: i for i, text in enumerate(texts, 1) if text is not None}
        missing = texts.index(None) + 1 if ids.values.null_count else 0
        return keys | {text: missing for text in self.spellings if text not in keys}

    def _look_up(self, texts: ir.Value, keys: Mapping[str, int]) -> ir.Value:
        table = {"keys_strings": [*keys], "values_int64s": [*keys.values()], "default_int64": 0}
        return self._node("LabelEncoder", [texts], table, domain="ai.onnx.ml")[0]

    def _input(self, name: str, kind: str, meaning: str) -> ir.Value:
        name = f"{name}_in" if name in (OUTPUT, PREDICTION) else name
        dtype = ir.DataType.STRING if kind == "string" else ir.DataType.DOUBLE
        self.inputs.append(ir.Value(name=name, shape=ir.Shape(["batch"]), type=ir.TensorType(dtype)))
        self.ports.append(Port(name, kind, "(batch,)", meaning))
        return self.inputs[-1]

    def stack(self, columns: Sequence[ir.Value], dtype: npt.DTypeLike) -> ir.Value:
        """n columns (batch,) -> (batch, n); fails if their lengths differ."""
        if not columns:
            shape = self._op("Concat", self._op("Shape", self.inputs[0]), self._constant([0]), axis=0)
            return self._op("ConstantOfShape", shape, value=ir.tensor(np.zeros(1, dtype)))
        axis = self._constant([1])
        return self._op("Concat", *(self._op("Unsqueeze", column, axis) for column in columns), axis=1)

    def _constant(self, value: Any) -> ir.Value:
        array = np.asarray(value)
        if array.dtype == object:
            tensor: Any = ir.StringTensor([str(text).encode() for text in array.ravel()], shape=ir.Shape(array.shape))
        else:
            tensor = ir.tensor(array)
        return self._op("Constant", value=tensor)

    def _op(self, kind: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        return self._node(kind, inputs, attributes)[0]

    def _node(
        self,
        kind: str,
        inputs: Sequence[ir.Value],
        attributes: Mapping[str, Any],
        *,
        outputs: int = 1,
        domain: str = "",
    ) -> Sequence[ir.Value]:
        made = [ir.Value(name=f"{PREFIX}encoder/{len(self.nodes)}/{i}") for i in range(outputs)]
        self.nodes.append(ir.node(kind, inputs, attributes, domain=domain, outputs=made))
        return made


def _vocabulary(ids: Any) -> Vocabulary:
    assert isinstance(ids, Vocabulary)
    return ids
