"""What the training loop adds to its steps: batches from the cache, the checks between steps, the progress.

``python -m benchmarks.loop`` trains one DCN on a cache of random rows. In turns, some steps of the loop with a thread
that reads ahead, some of the loop without, some steps alone on batches that lie in memory (forward, loss, backward,
clip, check, Adam), and some without clip and check. Printed is the time of each over that of the steps alone, the
median of its ratios within the rounds of a run, and their spread over the runs; at most 1.05 is wanted of the loop.
"""

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from fastcross import DCN
from fastcross.data import Batch, Cache, Columns
from fastcross.data.preparation import prepare
from fastcross.training.config import TrainingConfig
from fastcross.training.loop import Trainer

FEATURES, DENSE = 26, 13
THREAD, NO_THREAD, STEPS, PLAIN = "loop, read ahead", "loop", "steps alone", "steps without clip and check"


class Steps(Trainer):
    """The loop without evaluations and without an end: only what happens at every step."""

    def _evaluate(self, bar: Any) -> None:
        self.divergence.read()

    def _finish(self) -> dict[str, Any]:
        return {}


def make_cache(folder: Path, rows: int, ids: int) -> Cache:
    """Rows of random features: a few frequent ids and a long tail, hashed, so that every table has ids + 1."""
    generator = np.random.default_rng(0)
    columns: dict[str, Any] = {f"I{i}": generator.normal(size=rows).astype(np.float32) for i in range(DENSE)}
    columns |= {f"C{i}": (ids ** generator.random(rows)).astype(np.int64).astype(str) for i in range(FEATURES)}
    columns["clicked"] = generator.integers(0, 2, rows)
    declared = Columns.declare(
        label="clicked", dense=[f"I{i}" for i in range(DENSE)], categorical=[f"C{i}" for i in range(FEATURES)]
    )
    return prepare([pa.table(columns)], folder / "cache", split="random:1,0,0", hash_buckets=ids, columns=declared)


def make_trainer(cache: Cache, batch: int, deep: tuple[int, ...]) -> Steps:
    torch.manual_seed(0)
    model = DCN(cache.schema.cardinalities, DENSE, 16, cross_layers=6, deep_layers=deep)
    return Steps(model, cache, TrainingConfig(batch_size=batch, epochs=1_000_000))


def contestants(trainer: Steps, steps: int) -> dict[str, Callable[[], object]]:
    """Each takes so many steps, on batches that it has not seen in its last turn."""
    ready = list(itertools.islice(trainer.cache.batches("train", trainer.config.batch_size, shuffle=True), 4 * steps))
    unseen = itertools.cycle(ready)

    def loop(ahead: bool) -> None:
        trainer.read_ahead, trainer.total_steps = ahead, trainer.step + steps
        trainer.fit()

    def each(step: Callable[[Batch], object]) -> None:
        for batch in itertools.islice(unseen, steps):
            step(batch)

    return {
        THREAD: lambda: loop(True),
        NO_THREAD: lambda: loop(False),
        STEPS: lambda: each(trainer._train),
        PLAIN: lambda: each(lambda batch: plain_step(trainer, batch)),
    }


def plain_step(trainer: Steps, batch: Batch) -> None:
    assert batch.label is not None
    trainer.optimizer.zero_grad()
    trainer.model.loss(trainer.model(batch.dense, batch.categorical), batch.label).backward()
    trainer.optimizer.step()


def measure(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each in every round, after one that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if i:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--ids", type=int, default=1_000_000, help="of each feature (default: %(default)s)")
    parser.add_argument("--deep", type=int, nargs="+", default=[400, 400, 400])
    parser.add_argument("--rows", type=int, default=200_000, help="of the cache (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="of a contestant in a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="of a run (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        cache = make_cache(Path(folder), args.rows, args.ids)
        calls = contestants(make_trainer(cache, args.batch, tuple(args.deep)), args.steps)
        runs = [measure(calls, args.rounds) for _ in range(args.runs)]
    print(
        f"B = {args.batch}, {FEATURES} features of {args.ids:,} ids, n_e = 16, L = 6, deep {args.deep}, "
        f"{torch.get_num_threads()} threads, {args.runs} runs of {args.rounds} rounds of {args.steps} steps"
    )
    for name in calls:
        milliseconds = median(median(run[name]) for run in runs) / args.steps * 1e3
        ratios = [median(a / b for a, b in zip(run[name], run[STEPS], strict=True)) for run in runs]
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        print(f"{name:30} {milliseconds:8.2f} ms per step   {median(ratios):.3f}x   ({spread})")


if __name__ == "__main__":
    main()
