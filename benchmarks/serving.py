"""python -m benchmarks.serving: a request to the ONNX file that takes raw values, beside the one that takes ids.

Both hold the same model and are run in turns in onnxruntime, each time on other rows; they must agree before they are
timed. What the encoder takes of a request is 1 - (time with ids / time with raw values). Writes every sample's
percentiles to results/DEVICE/serving.json and prints a table.
"""

import argparse
import json
import os
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import pyarrow as pa
import torch

from benchmarks.harness import machine, results
from benchmarks.harness.measure import Refused
from fastcross.data.columns import Columns, numbered
from fastcross.data.encoder import Encoder, Vocabulary
from fastcross.data.numbers import Number, Numbers
from fastcross.interop.serving import export_run
from fastcross.models.dcn import DCN

Array = npt.NDArray[Any]
Inputs = dict[str, Array]
MEANT = 0.3  # what encoding should take at most of a request of 512 rows
BATCHES = (1, 512)
SETS = 32  # of rows, used in turns: no request finds its own texts in the processor's cache


@dataclass(frozen=True)
class Case:
    """A table as Criteo's (13 numbers, 26 categories), or with multi-valued columns, and a model."""

    title: str
    vocabularies: tuple[int, ...]  # of the categorical columns
    embedding_dim: int
    cross_layers: int
    deep_layers: tuple[int, ...]
    dense: int = 13
    bags: tuple[int, ...] = ()  # vocabularies of multi-valued columns, of 0 to 8 values per row


SMALL, PAPER = (16, 3, (256, 256)), (39, 6, (1024, 1024))
TEN_THOUSAND, MILLION = (10_000,) * 26, (1_000_000,) * 3 + (10_000,) * 23
CASES = (
    Case("26 × 10,000 texts, deep 256 × 256", TEN_THOUSAND, *SMALL),
    Case("26 × 10,000 texts, deep 1024 × 1024", TEN_THOUSAND, *PAPER),
    Case("3 × 1,000,000 + 23 × 10,000 texts, deep 256 × 256", MILLION, *SMALL),
    Case("3 × 1,000,000 + 23 × 10,000 texts, deep 1024 × 1024", MILLION, *PAPER),
    Case("3 columns and 2 bags of 10,000 texts, deep 256 × 256", (10_000,) * 3, *SMALL, dense=2, bags=(10_000,) * 2),
)


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.serving", description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each case and batch size (10)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of onnxruntime (all cores)")
    chosen = parser.parse_args()
    run(CASES, chosen.seconds, chosen.threads, results.folder() / "serving.json")


def run(cases: tuple[Case, ...], seconds: float, threads: int, file: Path) -> list[dict[str, Any]]:
    found = []
    for case in cases:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PyTorch's exporter, about its own code
            found.append(measure(case, seconds, threads, Path(folder)))
    place = machine.machine() | machine.versions() | {"onnxruntime": onnxruntime.__version__, "threads": str(threads)}
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps({"machine": place, "cases": found}, indent=1, ensure_ascii=False) + "\n")
    os.replace(temporary, file)
    print(table(found))
    print(", ".join(f"{name} {value}" for name, value in place.items()))
    return found


def measure(case: Case, seconds: float, threads: int, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    encoder = make_encoder(case)
    model = DCN(
        encoder.schema.cardinalities,
        case.dense,
        case.embedding_dim,
        bag_cardinalities=encoder.schema.bag_cardinalities,
        cross_layers=case.cross_layers,
        deep_layers=case.deep_layers,
    ).eval()
    sessions, loads, sizes = {}, {}, {}
    for name, encoded in (("raw", False), ("ids", True)):
        path = export_run(model, encoder, folder / f"{name}.onnx", encoded=encoded).path
        sessions[name], loads[name] = _open(path, threads)
        sizes[name] = sum(part.stat().st_size for part in folder.glob(f"{path.name}*"))
    case_result: dict[str, Any] = {"case": asdict(case), "load_seconds": loads, "bytes": sizes, "batches": {}}
    for rows in BATCHES:
        requests = [make_rows(case, encoder, rows, seed) for seed in range(SETS)]
        largest = max(_difference(sessions, request) for request in requests)
        if not largest < 1e-6:
            raise Refused(f"{case.title}: raw values and ids differ by {largest}")
        times = _alternate(sessions, requests, seconds)
        percentiles = {
            name: {f"p{q}": float(np.percentile(each, q)) for q in (20, 50, 80, 99)} for name, each in times.items()
        }
        share = 1 - percentiles["ids"]["p50"] / percentiles["raw"]["p50"]
        samples = {"requests": len(times["raw"]), "difference": largest, "share": share}
        case_result["batches"][str(rows)] = {**samples, "seconds": percentiles}
    return case_result


def _open(path: Path, threads: int) -> tuple[onnxruntime.InferenceSession, float]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    start = time.perf_counter()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return session, time.perf_counter() - start


def _difference(sessions: dict[str, Any], request: dict[str, Inputs]) -> float:
    (probability,), (logits,) = (sessions[name].run(None, request[name]) for name in ("raw", "ids"))
    return float(np.abs(probability - 1 / (1 + np.exp(-logits.astype(np.float64)))).max())


def _alternate(sessions: dict[str, Any], requests: list[dict[str, Inputs]], seconds: float) -> dict[str, list[float]]:
    """Seconds of each request, raw values and ids in turns."""
    times: dict[str, list[float]] = {name: [] for name in sessions}
    end, i = time.perf_counter() + seconds, 0
    while time.perf_counter() < end or i < 2 * len(requests):
        for name, session in sessions.items():
            start = time.perf_counter()
            session.run(None, requests[i % len(requests)][name])
            times[name].append(time.perf_counter() - start)
        i += 1
    return {name: each[len(requests) :] for name, each in times.items()}  # without the first round


def make_encoder(case: Case) -> Encoder:
    columns = Columns(
        "label",
        numbered("I", case.dense),
        numbered("C", len(case.vocabularies)),
        numbered("B", len(case.bags)),
        classes=("0", "1"),
        transform="log",
    )
    numbers = Numbers((Number(log=True),) * case.dense)
    categorical, bags = (tuple(map(_vocabulary, sizes)) for sizes in (case.vocabularies, case.bags))
    return Encoder("csv", columns, numbers, categorical, bags)


def _vocabulary(size: int) -> Vocabulary:
    """Texts as Criteo's: eight hexadecimal digits, in no order that helps."""
    return Vocabulary(pa.array([f"{i * 2654435761 % 2**32:08x}" for i in range(1, size + 1)]))


def make_rows(case: Case, encoder: Encoder, rows: int, seed: int) -> dict[str, Inputs]:
    """The same rows as raw values and as ids; ids as skewed as in click logs, a twentieth of the values missing."""
    rng = np.random.default_rng(seed)
    x = np.where(rng.random((rows, case.dense)) < 0.05, np.nan, np.floor(rng.lognormal(3, 2, (rows, case.dense))))
    raw: Inputs = {f"I{i + 1}": x[:, i].copy() for i in range(case.dense)}
    ids: Inputs = {"dense": encoder.numbers(x)}
    columns = []
    for i, known in enumerate(encoder.categorical):
        codes = np.where(rng.random(rows) < 0.05, 0, _skewed(rng, known.cardinality - 1, rows))
        raw[f"C{i + 1}"] = _texts(known, codes)
        columns.append(codes)
    ids["categorical"] = np.stack(columns, axis=1)
    for i, known in enumerate(encoder.bags):
        counts = rng.integers(0, 9, rows)
        codes = _skewed(rng, known.cardinality - 1, int(counts.sum()))
        ends = np.cumsum(counts)
        texts = np.split(_texts(known, codes), ends[:-1])
        raw[f"B{i + 1}"] = np.array(["|".join(each) for each in texts], object)
        ids |= {f"bags_{i}_0": codes, f"bags_{i}_1": ends - counts}
    return {"raw": raw, "ids": ids}


def _skewed(rng: np.random.Generator, size: int, count: int) -> Array:
    """Ids from 1 to size, evenly spread in their logarithm."""
    return np.minimum(np.exp(rng.random(count) * np.log(size + 1)).astype(np.int64), size)


def _texts(known: Any, codes: Array) -> Array:
    """New objects each time, as those of a request are; "" for the id 0."""
    return np.array([known.values[int(code) - 1].as_py() if code else "" for code in codes], object)


def table(found: list[dict[str, Any]]) -> str:
    lines = [
        "| model | batch | raw values: p50, p99 | ids: p50, p99 | encoding | file | loads in |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for each in found:
        for rows, result in each["batches"].items():
            raw, ids = ([f"{1e3 * result['seconds'][n][q]:.3g} ms" for q in ("p50", "p99")] for n in ("raw", "ids"))
            too_much = " (more than meant)" if rows == "512" and result["share"] > MEANT else ""
            encoding = f"{result['share']:.0%}{too_much}"
            file = f"{each['bytes']['raw'] / 1e6:,.0f} MB | {each['load_seconds']['raw']:.2g} s"
            lines.append(
                f"| {each['case']['title']} | {rows} | {', '.join(raw)} | {', '.join(ids)} | {encoding} | {file} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
