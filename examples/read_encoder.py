"""Raw rows to the arrays of an exported graph that takes ids, from model.encoder/; needs numpy and pyarrow alone."""

import hashlib
import json
from functools import reduce
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

TEXTS = {"hour": pc.hour, "weekday": lambda time: pc.strftime(time, "%A", locale="C"), "month": pc.month}
NUMBERS = {"day": pc.day, "year": pc.year, "days": lambda time: time.cast("date32").cast("int32")}
level = lambda x: None if x != x else f"{x:.0f}" if x.is_integer() else repr(x)  # noqa: E731


def load(folder: str) -> tuple[dict, dict]:
    about = json.loads((Path(folder) / "encoder.json").read_bytes())
    files, stated = {name: (Path(folder) / name).read_bytes() for name in about["files"]}, about.pop("sha256")
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    if sums != about["files"] or stated != hashlib.sha256(json.dumps(about, indent=1).encode()).hexdigest():
        raise ValueError(f"{folder} is damaged")
    return about, {name[:-6]: pa.ipc.open_file(data).read_all()["value"] for name, data in files.items()}


def hashed(text: str, buckets: int) -> int:
    h = reduce(lambda h, byte: (h ^ byte) * 0x100000001B3 % 2**64, text.encode(), 0xCBF29CE484222325)
    return (h ^ h >> 32) % buckets + 1


def encode(about: dict, texts: dict, rows: pa.Table) -> dict[str, np.ndarray]:
    """Of numbers, texts, texts with separators, and date-times, by the columns' names; null is a missing value."""
    columns, buckets, numbers = about["columns"], about["hash_buckets"], about["numbers"]

    def ids(name: str, values: pa.Array) -> np.ndarray:
        if buckets:
            return np.array([0 if text is None else hashed(text, buckets) for text in values.to_pylist()], np.int64)
        return pc.fill_null(pc.index_in(values, value_set=texts[name]), -1).to_numpy().astype(np.int64) + 1

    dates = [(rows[name], part) for name, _, part in (feature.rpartition(".") for feature in columns.get("parts", ()))]
    x = [*(rows[n] for n in columns["dense"]), *(NUMBERS[p](t).cast("float64") for t, p in dates if p in NUMBERS)]
    x = np.array([column.to_numpy() for column in x], float).reshape(-1, len(rows)).T
    log, unit, mean, scale, low, high, flag = np.array([[*number.values()] for number in numbers]).reshape(-1, 7).T
    clipped, gaps = np.clip(x, low, high), np.isnan(x)
    scaled = (np.where(log, np.copysign(np.log1p(np.abs(clipped) / unit), x), clipped) - mean) * scale
    dense = np.concatenate([np.where(gaps, 0, scaled), gaps[:, flag > 0]], axis=1).astype(np.float32)
    parts = [rows[name] for name in columns["categorical"]]
    parts += [TEXTS[part](time).cast("string") for time, part in dates if part in TEXTS]
    for x_of in (x[:, columns["dense"].index(name)].tolist() for name in columns.get("levels", ())):
        parts.append(pa.array([level(value) for value in x_of], "string"))
    found = np.array([ids(f"categorical{i}", part) for i, part in enumerate(parts)], np.int64)
    arrays = {"dense": dense, "categorical": found.reshape(-1, len(rows)).T}
    for i, name in enumerate(columns["bags"] or ()):
        separator = columns["separators"].get(name, columns["separator"])
        bag, *weights = (pc.split_pattern(rows[n], separator) for n in (name, columns["weights"].get(name)) if n)
        counts = pc.fill_null(pc.list_value_length(bag), 0).to_numpy().astype(np.int64)
        arrays |= {f"bags_{i}_0": ids(f"bag{i}", pc.list_flatten(bag)), f"bags_{i}_1": counts.cumsum() - counts}
        arrays |= {f"bags_{i}_2": pc.cast(pc.list_flatten(w), pa.float32()).to_numpy() for w in weights}
    return arrays
