"""Serve what `fastcross export RUN --output model.onnx` wrote: raw values in, probabilities out.

    python serve_onnx.py model.onnx rows.csv            one line of probabilities for each row; rows.csv has a header

Needs onnxruntime and numpy, nothing else: not fastcross, not PyTorch.
"""

import csv
import json
import sys

import numpy as np
import onnxruntime

MISSING = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "?")


def number(text: str) -> float:
    return float("nan") if text in MISSING else float(text)


def unix_time(text: str) -> float:
    """Of 2024-01-31 12:30:00, in UTC; a Unix time is one already."""
    if text in MISSING or text.replace(".", "", 1).isdigit():
        return number(text)
    return np.datetime64(text, "us").astype(np.int64) / 1e6


def inputs(session: onnxruntime.InferenceSession, rows: list[dict[str, str]]) -> dict[str, np.ndarray]:
    """An array for each input of the model, of the column that it stands for."""
    convert = {"dense": number, "date-time": unix_time}
    columns = json.loads(session.get_modelmeta().custom_metadata_map["fastcross.columns"])
    return {
        column["input"]: np.array([convert[column["kind"]](row[column["column"]]) for row in rows], np.float64)
        if column["kind"] in convert
        else np.array([row[column["column"]] for row in rows], object)
        for column in columns
    }


def main(model: str, path: str) -> None:
    session = onnxruntime.InferenceSession(model)
    with open(path, newline="") as file:
        delimiter = max(",;\t", key=file.readline().count)
        file.seek(0)
        rows = list(csv.DictReader(file, delimiter=delimiter))
    for start in range(0, len(rows), 512):
        (probability,) = session.run(["probability"], inputs(session, rows[start : start + 512]))
        for values in probability.reshape(len(probability), -1).tolist():
            print(*values)


if __name__ == "__main__":
    main(*sys.argv[1:])
