"""A table in memory to a fitted model: the estimator, `fastcross train` on a prepared cache, DeepCTR-Torch's fit.

    python -m benchmarks.estimator                  # a million rows; writes benchmarks/results/estimator-DATE.json

Seconds are those of the whole call: fit prepares the table, too, `train` finds it prepared, DeepCTR-Torch is given
arrays of ids. The contestants take turns; a ratio is that of their medians. Memory is the peak that a process of its
own adds.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
import torch

from benchmarks.harness.machine import machine, versions
from benchmarks.harness.memory import peak_bytes

DENSE, CATEGORICAL = 13, 26
MODEL: dict[str, Any] = {"cross_layers": 3, "deep_layers": [256, 256], "embedding_dim": 8, "batch_norm": False}
BATCH = 4096


def make_table(rows: int, vocabulary: int = 10_000) -> pd.DataFrame:
    """Clicks that follow two of the columns; texts as a log would hold them."""
    generator = np.random.default_rng(0)
    dense = {f"I{i}": generator.normal(size=rows).astype(np.float32) for i in range(DENSE)}
    ids = {f"C{i}": (vocabulary * generator.random(rows) ** 3).astype(np.int64) for i in range(CATEGORICAL)}
    logit = dense["I0"] + (ids["C0"] % 2) - 0.5
    texts = {name: pd.Series(values.astype(str)) for name, values in ids.items()}
    clicked = (generator.random(rows) < 1 / (1 + np.exp(-logit))).astype(np.int64)
    return pd.DataFrame({**dense, **texts, "clicked": clicked})


def estimator(optimizer: str, epochs: int) -> Any:
    from fastcross import DCNClassifier

    columns: dict[str, Any] = {
        "dense": [f"I{i}" for i in range(DENSE)],
        "categorical": [f"C{i}" for i in range(CATEGORICAL)],
    }
    options: dict[str, Any] = {
        "batch_size": BATCH,
        "epochs": epochs,
        "patience": 0,
        "optimizer": optimizer,
        "random_state": 0,
    }
    return DCNClassifier(**MODEL, **options, columns=columns, split="random:1,0,0", min_frequency=1)


def contestants(table: pd.DataFrame, epochs: int, folder: Path) -> dict[str, Callable[[], object]]:
    """Each trains a DCN of the same sizes on the same rows for as many epochs."""
    from fastcross.data.preparation import prepare
    from fastcross.estimators.rows import to_table
    from fastcross.training.experiment import Dataset, Experiment

    chosen = estimator("adam", epochs)
    columns = chosen._columns(label="clicked", task="classification")
    cache = prepare([to_table(table)], folder / "cache", columns=columns, split="random:1,0,0", min_frequency=1)

    def train() -> None:
        plan = Experiment(Dataset((str(cache.path),)), "dcn", MODEL, chosen._training())
        plan.run(folder / f"run-{time.time_ns()}")

    calls: dict[str, Callable[[], object]] = {"fastcross train, adam": train}
    for optimizer in ("adam", "adagrad"):
        calls[f"estimator, {optimizer}"] = partial(_fit, table, optimizer, epochs)
        calls[f"DeepCTR-Torch, {optimizer}"] = _deepctr(table, optimizer, epochs)
    return calls


def _fit(table: pd.DataFrame, optimizer: str, epochs: int) -> None:
    estimator(optimizer, epochs).fit(table, "clicked")


def _deepctr(table: pd.DataFrame, optimizer: str, epochs: int) -> Callable[[], object]:
    from deepctr_torch.inputs import DenseFeat, SparseFeat
    from deepctr_torch.models.dcn import DCN

    inputs = {f"I{i}": table[f"I{i}"].to_numpy() for i in range(DENSE)}
    inputs |= {f"C{i}": table[f"C{i}"].to_numpy().astype(np.int64) for i in range(CATEGORICAL)}
    features = [DenseFeat(f"I{i}", 1) for i in range(DENSE)]
    features += [
        SparseFeat(f"C{i}", int(inputs[f"C{i}"].max()) + 1, MODEL["embedding_dim"]) for i in range(CATEGORICAL)
    ]
    label = table["clicked"].to_numpy()

    def fit() -> None:
        sizes = {"cross_num": MODEL["cross_layers"], "dnn_hidden_units": tuple(MODEL["deep_layers"])}
        model = DCN([], features, **sizes, l2_reg_embedding=0, l2_reg_linear=0, l2_reg_cross=0, device="cpu")
        model.compile(optimizer, "binary_crossentropy")
        model.fit(inputs, label, batch_size=BATCH, epochs=epochs, verbose=0)

    return fit


def added_memory(rows: int) -> dict[str, float]:
    """In this process: the peak that fit adds, over the table's own size."""
    table = make_table(rows)
    estimator("adam", 1).fit(table[: 2 * BATCH], "clicked")  # imports and compiled kernels are nobody's rows
    size = int(table.memory_usage(deep=True).sum())
    added = peak_bytes(lambda: estimator("adam", 1).fit(table, "clicked"), torch.device("cpu"))
    if added is None:
        raise OSError("the peak of a process cannot be set back here: /proc/self/clear_refs is missing")
    return {"table": size, "added": added, "ratio": added / size}


def measure(rows: int, epochs: int, repeats: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        calls = contestants(make_table(rows), epochs, Path(folder))
        for _ in range(repeats):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                seconds.setdefault(name, []).append(time.perf_counter() - start)
    command = [sys.executable, "-m", "benchmarks.estimator", "--memory", "--rows", str(rows)]
    memory = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    facts = {"rows": rows, "epochs": epochs, "batch": BATCH, "model": MODEL}
    return {**facts, "machine": {**machine(), **versions()}, "seconds": seconds, "memory": memory}


def markdown(result: dict[str, Any]) -> str:
    total = result["rows"] * result["epochs"]
    speed = {name: total / median(samples) for name, samples in result["seconds"].items()}
    lines = ["| | rows/s | the estimator with adam is faster by |", "|---|---:|---:|"]
    for name, rate in sorted(speed.items(), key=lambda pair: -pair[1]):
        lines.append(f"| {name} | {rate:,.0f} | {speed['estimator, adam'] / rate:.2f}× |")
    memory = result["memory"]
    sizes = f"{memory['added'] / 2**20:,.0f} MiB over a table of {memory['table'] / 2**20:,.0f} MiB"
    same = speed["estimator, adagrad"] / speed["DeepCTR-Torch, adagrad"]
    lines += ["", f"With adagrad in both: {same:.2f}×. Peak memory that fit adds: {sizes}, {memory['ratio']:.2f}×."]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--memory", action="store_true", help="measure the memory alone, in this process")
    args = parser.parse_args(argv)
    if args.memory:
        print(json.dumps(added_memory(args.rows)))
        return
    result = measure(args.rows, args.epochs, args.repeats)
    args.output.mkdir(parents=True, exist_ok=True)
    file = args.output / f"estimator-{time.strftime('%Y%m%d-%H%M%S')}.json"
    file.write_text(json.dumps(result, indent=2) + "\n")
    print(markdown(result) + f"\n{file}")


if __name__ == "__main__":
    main()
