"""python -m benchmarks.ranking: folded cross logits, and a Ranker beside full rows and onnxruntime.

One thread. The contestants run in turns, each several times in a row, as a server asks one model again and again; their
processor time is compared, of the same turn. They must agree before they are timed. Writes every sample to
results/DEVICE/ranking.json and prints the ratios.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor

import fastcross
from benchmarks.harness import machine, results
from benchmarks.harness.measure import Refused
from fastcross.batch import Batch
from fastcross.interop.export import export
from fastcross.models.dcn import DCN

FEATURES, DENSE, VOCABULARY = 26, 13, 10_000
N_E, LAYERS = 39, 6
# Of the 39 features in the order of x0, categories and then numbers: 20 are the items'.
ITEM = [*range(13), *range(26, 33)]
CANDIDATES, AT_ONCE, MILLION = 100_000, 4096, 1_000_000
SETS = 16  # batches that are used in turns: no one finds its own ids in the cache


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.ranking", description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=5, help="(5)")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of PyTorch's exporter, about its own code
        found = {
            "folded cross logits, batch 512": folded(chosen.turns),
            "100,000 items, cross network alone": ranked((), chosen.turns, Path(folder)),
            "100,000 items, deep 1024 × 1024": ranked((1024, 1024), chosen.turns, Path(folder)),
            "1,000,000 items": million(),
        }
    facts = machine.machine() | machine.versions() | {"onnxruntime": onnxruntime.__version__}
    facts |= {"threads": "1", "load": f"{os.getloadavg()[0]:.1f}"}
    file = results.folder() / "ranking.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python -m benchmarks.ranking", *sys.argv[1:]])
    file.write_text(json.dumps({"machine": facts, "command": command, **found}, indent=1, ensure_ascii=False) + "\n")


def make(deep: tuple[int, ...]) -> DCN:
    torch.manual_seed(0)
    model = DCN((VOCABULARY,) * FEATURES, DENSE, N_E, cross_layers=LAYERS, deep_layers=deep).eval()
    for parameter in (model.cross.weight, model.cross.bias):  # as they are after training, and not at the start
        torch.nn.init.normal_(parameter, std=0.02)
    return model


def batch(rows: int, seed: int, features: list[int]) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    single = sum(f < FEATURES for f in features)
    ids = torch.randint(0, VOCABULARY, (rows, single), generator=generator)
    return Batch(torch.randn(rows, len(features) - single, generator=generator), ids)


def folded(turns: int) -> dict[str, Any]:
    model, every = make(()), [*range(FEATURES + DENSE)]
    fold, batches = fastcross.fold(model), [batch(512, seed, every) for seed in range(SETS)]

    def over(network: Any) -> Callable[[], Tensor]:
        return lambda: torch.cat([network(each.dense, each.categorical) for each in batches])

    return compare({"folded": over(fold), "cross_logits from embeddings": over(model)}, turns * 2, in_a_row=10)


def ranked(deep: tuple[int, ...], turns: int, folder: Path) -> dict[str, Any]:
    model, path = make(deep), folder / f"{len(deep)}.onnx"
    others = [f for f in range(FEATURES + DENSE) if f not in ITEM]
    items, context = batch(CANDIDATES, 0, ITEM), batch(1, 1, others)
    start = time.process_time()
    ranker = fastcross.Ranker(model, items, features=ITEM)
    tabulated = time.process_time() - start
    categorical = torch.cat((items.categorical, context.categorical.expand(CANDIDATES, -1)), 1)
    dense = torch.cat((items.dense, context.dense.expand(CANDIDATES, -1)), 1)
    export(model, path, (dense[:8], categorical[:8]), to="onnx")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def in_onnxruntime() -> Tensor:
        arrays = zip(dense.split(AT_ONCE), categorical.split(AT_ONCE), strict=True)
        parts = [session.run(None, dict(zip(names, (d.numpy(), c.numpy()), strict=True)))[0] for d, c in arrays]
        return torch.from_numpy(np.concatenate(parts))

    def in_full() -> Tensor:
        arrays = zip(dense.split(AT_ONCE), categorical.split(AT_ONCE), strict=True)
        return torch.cat([model(d, c) for d, c in arrays])

    contestants = {"Ranker": lambda: ranker.score(context), "full rows": in_full, "onnxruntime": in_onnxruntime}
    facts = {"tabulated in s": tabulated, "bytes per item": ranker.bytes_per_item}
    return {**facts, **compare(contestants, turns, in_a_row=1 if deep else 5)}


def million() -> dict[str, Any]:
    others = [f for f in range(FEATURES + DENSE) if f not in ITEM]
    model, items, context = make(()), batch(MILLION, 0, ITEM), batch(1, 1, others)
    start = time.process_time()
    ranker = fastcross.Ranker(model, items, features=ITEM)
    found: dict[str, Any] = {"tabulated in s": time.process_time() - start, "bytes per item": ranker.bytes_per_item}
    ranker.top(context, 10)
    samples = []
    for _ in range(20):
        start = time.process_time()
        ranker.top(context, 10)
        samples.append(time.process_time() - start)
    found["seconds of top 10"] = samples
    middle = 1e3 * statistics.median(samples)
    size = f"{found['tabulated in s']:.1f} s, {ranker.bytes_per_item} bytes each"
    print(f"1,000,000 items: {size}, top 10 in {middle:.1f} ms")
    return found


def compare(contestants: dict[str, Callable[[], Tensor]], turns: int, in_a_row: int) -> dict[str, Any]:
    answers = {name: call() for name, call in contestants.items()}
    first = next(iter(contestants))
    exact = answers[first]
    for name, answer in answers.items():
        if not (error := float((answer - exact).abs().max() / exact.abs().max())) < 1e-5:
            raise Refused(f"{name} differs from {first} by {error}")
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(turns):
        for name, call in contestants.items():
            if in_a_row > 1:
                call()
            start = time.process_time()
            for _ in range(in_a_row):
                call()
            seconds[name].append((time.process_time() - start) / in_a_row)
    for name, each in seconds.items():
        ratios = np.array(each) / np.array(seconds[first])
        low, middle, high = np.percentile(ratios, (20, 50, 80))
        ratio = f"{middle:7.2f} ({low:.2f} to {high:.2f})"
        print(f"{name:30} {1e3 * statistics.median(each):10.3f} ms   {ratio}", flush=True)
    return {"seconds": seconds}


if __name__ == "__main__":
    main()
