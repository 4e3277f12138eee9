"""The Open Inference Protocol (KServe v2): tensors of a request to rows, answers to tensors.

An input is a column, of shape (n,) or (n, 1), typed as in the ONNX file: FP64 for numbers and date-times (Unix times),
BYTES for texts. Its values stand in the JSON, or behind it in binary (Triton's extension): little-endian numbers; texts
as their length in 4 bytes, then UTF-8.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastcross.data.columns import DataError
from fastcross.serving.served import Served

NUMBERS = {f"{kind}{bits}": f"<{kind[0].lower()}{bits // 8}" for kind in ("INT", "UINT") for bits in (8, 16, 32, 64)}
NUMBERS |= {"FP16": "<f2", "FP32": "<f4", "FP64": "<f8"}
HEADER_LENGTH = "inference-header-content-length"
Row = Mapping[str, Any]


def describe(served: Served) -> dict[str, Any]:
    """A model's metadata."""
    shape = [-1] if len(served.classes) <= 2 else [-1, len(served.classes)]
    types = {column.name: "FP64" if column.kind in ("dense", "date-time") else "BYTES" for column in served.columns}
    return {
        "name": served.name,
        "versions": ["1"],
        "platform": "fastcross",
        "inputs": [{"name": name, "datatype": kind, "shape": [-1]} for name, kind in types.items()],
        "outputs": [{"name": served.output, "datatype": "FP32", "shape": shape}],
    }


def read_rows(request: Any, binary: bytes, columns: Sequence[str]) -> list[Row]:
    """The rows of a request, whose binary tensors lie in ``binary``, one after the other."""
    if not isinstance(request, dict) or not isinstance(request.get("inputs"), list):
        raise DataError('the request must be an object with "inputs", a list of tensors')
    found: dict[str, Sequence[Any]] = {}
    at, first = 0, ""
    for tensor in request["inputs"]:
        name, count, datatype, parameters = _head(tensor)
        if name not in columns or name in found:
            what = "is there twice" if name in found else f"is none of the model's: {', '.join(columns)}"
            raise DataError(f"the input {_cited(name)} {what}")
        if "shared_memory_region" in parameters:
            raise DataError(f"the input {name}: shared memory is not supported")
        size = parameters.get("binary_data_size")
        values: Sequence[Any]
        if size is None:
            values = _listed(name, tensor.get("data"), count)
        else:
            if type(size) is not int or not 0 <= size <= len(binary) - at or "data" in tensor:
                raise DataError(
                    f"the input {name} must have its data, or a binary_data_size of at most the {len(binary) - at} "
                    f"bytes that are left; got {_cited(size)}"
                )
            values = _decoded(name, datatype, binary[at : at + size], count)
            at += size
        first = first or name
        if count != len(found.get(first, values)):
            raise DataError(f"all inputs must have the same rows; got {len(found[first])} {first} and {count} {name}")
        found[name] = values
    if missing := [name for name in columns if name not in found]:
        raise DataError(f"the input {missing[0]} is missing; the model reads {', '.join(columns)}")
    if at != len(binary):
        raise DataError(f"the inputs take {at} bytes of binary data; got {len(binary)}")
    return [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]


def wants_binary(request: Mapping[str, Any], name: str) -> bool:
    """Whether the output shall be binary; a DataError where another one is asked for."""
    parameters, wanted = request.get("parameters"), request.get("outputs")
    binary = _parameters(parameters).get("binary_data_output", False)
    for output in wanted if isinstance(wanted, list) else ():
        if not isinstance(output, dict) or output.get("name") != name:
            raise DataError(f"the model's output is {name}; got {_cited(output)}")
        binary = _parameters(output.get("parameters")).get("binary_data", binary)
    return bool(binary)


def write_answer(
    request: Mapping[str, Any], served: Served, answer: npt.NDArray[Any], binary: bool
) -> tuple[bytes, dict[str, str]]:
    """The body and its headers."""
    values = answer.astype("<f4")
    tensor: dict[str, Any] = {"name": served.output, "datatype": "FP32", "shape": list(values.shape)}
    tail = values.tobytes() if binary else b""
    tensor |= {"parameters": {"binary_data_size": len(tail)}} if binary else {"data": values.ravel().tolist()}
    told = {"id": request["id"]} if isinstance(request.get("id"), str) else {}
    head = json.dumps({"model_name": served.name, "model_version": "1", **told, "outputs": [tensor]}).encode()
    if not binary:
        return head, {"content-type": "application/json"}
    return head + tail, {"content-type": "application/octet-stream", HEADER_LENGTH: str(len(head))}


def _head(tensor: Any) -> tuple[str, int, str, Mapping[str, Any]]:
    if not isinstance(tensor, dict) or not isinstance(tensor.get("name"), str):
        raise DataError(f"each input must be an object with a name; got {_cited(tensor)}")
    name, shape, datatype = tensor["name"], tensor.get("shape"), tensor.get("datatype")
    sizes = shape if isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape) else []
    if len(sizes) not in (1, 2) or sizes[1:] not in ([], [1]):
        raise DataError(f"the input {_cited(name)} must have the shape [n] or [n, 1]; got {_cited(shape)}")
    if not isinstance(datatype, str) or datatype not in ("BYTES", *NUMBERS):
        raise DataError(f"the input {_cited(name)} must be BYTES, {', '.join(NUMBERS)}; got {_cited(datatype)}")
    return name, sizes[0], datatype, _parameters(tensor.get("parameters"))


def _parameters(given: Any) -> Mapping[str, Any]:
    if given is not None and not isinstance(given, dict):
        raise DataError(f"parameters must be an object; got {_cited(given)}")
    return given or {}


def _listed(name: str, data: Any, count: int) -> list[Any]:
    """A list of values, or of lists with one each."""
    values = data if isinstance(data, list) else []
    if all(isinstance(value, list) and len(value) == 1 for value in values):
        values = [value[0] for value in values]
    if not isinstance(data, list) or len(values) != count:
        raise DataError(f"the input {name} must have a list of {count} values as its data; got {_cited(data)}")
    return values


def _decoded(name: str, datatype: str, data: bytes, count: int) -> Sequence[Any]:
    if datatype in NUMBERS:
        kind = np.dtype(NUMBERS[datatype])
        if len(data) != count * kind.itemsize:
            raise DataError(f"the input {name}: {count} {datatype} take {count * kind.itemsize} bytes; got {len(data)}")
        return np.frombuffer(data, kind).tolist()
    try:
        texts = [*_texts(data)]
    except UnicodeDecodeError:
        raise DataError(f"the input {name} holds a text that is not UTF-8") from None
    except struct.error:
        raise DataError(f"the input {name}: its {len(data)} bytes end inside a text") from None
    if len(texts) != count:
        raise DataError(f"the input {name} must have {count} texts; got {len(texts)}")
    return texts


def _texts(data: bytes) -> Iterator[str]:
    at = 0
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        at += 4 + size
        if at > len(data):
            raise struct.error
        yield data[at - size : at].decode()


def _cited(value: Any) -> str:
    """A value as an error cites it, never the whole of a long one."""
    text = f"{type(value).__name__} of {len(value)}" if isinstance(value, list | dict) else ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
