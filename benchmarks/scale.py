"""docs/scale.md's measurements: scale_model's figures beside those of 1, 2 and 4 processes on this machine.

python -m benchmarks.scale              memory, traffic and time per step, measured and predicted
python -m benchmarks.scale embedding    fastcross's tables against fbgemm's, one process, interleaved
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.scale_model import NUM_DENSE, Setting, rows_per_rank, traffic

if TYPE_CHECKING:
    from fastcross.distributed.process_group import ProcessGroup

CARDINALITIES = (1_000_000, 300_000, 100_000, 30_000, 10_000, *(1_000,) * 10, *(100,) * 11)
STEPS, WARM_UP = 30, 5


def batches(setting: Setting, rank: int, count: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Ids with a heavy head, as clicks have; the same for any number of ranks."""
    generator = torch.Generator().manual_seed(1)
    share = slice(setting.batch * rank // setting.ranks, setting.batch * (rank + 1) // setting.ranks)
    sizes = torch.tensor(setting.cardinalities)
    for _ in range(count):
        ids = (torch.rand(setting.batch, len(sizes), generator=generator) ** 3 * sizes).long()
        dense = torch.randn(setting.batch, NUM_DENSE, generator=generator)
        label = (torch.rand(setting.batch, generator=generator) < 0.3).float()
        yield dense[share], ids[share], label[share]


def step(model: Any, optimizer: Any, batch: tuple[Tensor, Tensor, Tensor]) -> float:
    began = time.perf_counter()
    optimizer.zero_grad()
    loss = model.loss(model(*batch[:2]), batch[2])
    loss.backward()
    optimizer.step()
    return time.perf_counter() - began


def build(setting: Setting, processes: "ProcessGroup | None", embedding: str = "auto") -> tuple[Any, Any]:
    """A model and its optimiser: without ``processes`` fastcross's own, else TorchRec's."""
    from fastcross.distributed.model import shard
    from fastcross.models.dcn import DCN
    from fastcross.optim import configure
    from fastcross.training.config import TrainingConfig

    options: dict[str, Any] = {"cross_layers": setting.cross, "deep_layers": setting.deep}
    torch.manual_seed(0)
    if processes is None:
        model = DCN(setting.cardinalities, NUM_DENSE, setting.dim, **options)
        return model, configure(model, lr=0.01, name=setting.optimizer)
    with torch.device("meta"):
        model = DCN(setting.cardinalities, NUM_DENSE, setting.dim, **options)
    config = TrainingConfig(batch_size=setting.batch, optimizer=setting.optimizer, lr=0.01)
    return shard(model, processes, config, setting.sharding, embedding)


def loopback() -> int:
    """Bytes that have been sent between processes of this machine."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def worker(output: str, settings: list[Setting]) -> None:
    """One of the processes: measures each setting, and how long it takes to add up 16 MB."""
    import torch.distributed as dist

    from fastcross.distributed.process_group import ProcessGroup, start

    torch.set_num_threads(1)
    found = []
    with start(torch.device("cpu"), ProcessGroup) as processes:
        value, times = torch.zeros(1 << 22), []
        for _ in range(12):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(value)
            times.append(time.perf_counter() - began)
        seconds = statistics.median(times[2:])
        for setting in settings:
            model, optimizer = build(setting, processes)
            model.train()
            held = sum(shard.tensor.nbytes for table in model.tables() for shard in table.local_shards())
            times = [step(model, optimizer, batch) for batch in batches(setting, processes.rank, WARM_UP)]
            dist.barrier()
            sent, times = loopback(), []
            for batch in batches(setting, processes.rank, STEPS):
                dist.barrier()
                times.append(step(model, optimizer, batch))
            dist.barrier()
            each = processes.collect(held)
            found.append(
                {
                    "step": processes.collect(statistics.median(times)),
                    "sent": (loopback() - sent) / STEPS / setting.ranks,
                    "tables": each,
                    "16 MB": seconds,
                }
            )
            del model, optimizer
        if processes.rank == 0:
            Path(output).write_text(json.dumps(found))


def measure(ranks: int, settings: list[Setting]) -> list[dict]:
    """What ``ranks`` processes find: together, or, where a setting has but one, each by itself at the same time."""
    launcher = [sys.executable, "-m"]
    if settings[0].ranks > 1:
        launcher += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "--"]
    chosen = json.dumps([vars(setting) for setting in settings])
    with tempfile.TemporaryDirectory() as folder:
        outputs = [f"{folder}/{i}.json" for i in range(ranks if settings[0].ranks == 1 else 1)]
        processes = [
            subprocess.Popen(
                [*launcher, "benchmarks.scale", "worker", output, chosen],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stderr=subprocess.DEVNULL,
            )
            for output in outputs
        ]
        if any([process.wait() for process in processes]):
            raise RuntimeError(f"a process of {ranks} failed")
        return json.loads(Path(outputs[0]).read_text())


def report() -> None:
    """Time = computing + traffic / bandwidth + a fixed part, that of TorchRec's many small messages.

    Computing is that of processes that train a rank's share of the batch beside each other, each by itself, so that
    cores and caches are as busy. The fixed part is what two ranks need more than one for a batch of 64 rows; where
    more ranks share the cores, as many times more.
    """
    rows: list[tuple[Setting, dict, float | None]] = []
    sizes, tiny, fixed = (1024, 4096), 64, 0.0
    shape: dict[str, Any] = {"cardinalities": CARDINALITIES, "dim": 16, "deep": (256, 128), "cross": 4}
    for ranks in (1, 2, 4):
        alone = [Setting(**shape, batch=batch // ranks, ranks=1) for batch in (tiny, *sizes)]
        shares = measure(ranks, alone)
        if ranks == 1:
            rows += [(setting, found, None) for setting, found in zip(alone[1:], shares[1:], strict=True)]
            continue
        computing = {batch: found["step"][0] for batch, found in zip((tiny, *sizes), shares, strict=True)}
        settings = [Setting(**shape, batch=tiny, ranks=ranks)] + [
            Setting(**shape, batch=batch, ranks=ranks, sharding=sharding)
            for batch in sizes
            for sharding in ("table", "row")
        ]
        for setting, found in zip(settings, measure(ranks, settings), strict=True):
            if setting.batch == tiny:
                fixed = fixed or max(found["step"]) - computing[tiny]
                continue
            # 4 million float32 in a ring: each rank sends twice their size, less a part.
            bandwidth = 2 * (ranks - 1) / ranks * (4 << 22) / found["16 MB"]
            waiting = fixed * max(1, ranks / (os.cpu_count() or 1))
            rows.append((setting, found, computing[setting.batch] + traffic(setting) / bandwidth + waiting))
    print(f"fixed part: {1e3 * fixed:.1f} ms\n")
    print(
        "| ranks | batch | sharding | MB of tables per rank | predicted | MB sent per step and rank | predicted ",
        end="",
    )
    print("| ms per step | predicted |\n|" + "---|" * 9)
    for setting, found, seconds in rows:
        tables = 4 * rows_per_rank(setting) * setting.dim
        cells = [setting.ranks, setting.batch, setting.sharding if setting.ranks > 1 else "—"]
        cells += [" ".join(f"{held / 1e6:.1f}" for held in found["tables"]), f"{tables / 1e6:.1f}"]
        cells += [f"{found['sent'] / 1e6:.2f}", f"{traffic(setting) / 1e6:.2f}"]
        cells += [f"{1e3 * max(found['step']):.1f}", f"{1e3 * seconds:.1f}" if seconds else "—"]
        print("| " + " | ".join(map(str, cells)) + " |")


def compare_embeddings() -> None:
    """The same model and batches on each, interleaved in one process; times relative to fastcross's tables."""
    from fastcross.distributed.process_group import ProcessGroup, start

    torch.set_num_threads(os.cpu_count() or 1)
    print("| optimiser | n_e | batch | fastcross | fbgemm through TorchRec | fastcross through TorchRec |")
    print("|---|---|---|---|---|---|")
    with start(torch.device("cpu"), ProcessGroup) as processes:
        for optimizer, dim, batch in (
            ("sgd", 16, 512), ("sgd", 16, 4096), ("sgd", 16, 16384), ("sgd", 64, 4096), ("adam", 16, 4096),
        ):  # fmt: skip
            setting = Setting(CARDINALITIES, dim, (256,), 4, batch, 1, optimizer=optimizer)
            models = {"fastcross": build(setting, None)}
            models |= {"fbgemm": build(setting, processes, "fbgemm")} if optimizer == "sgd" else {}
            models |= {"inside": build(setting, processes, "fastcross")}
            times: dict[str, list[float]] = {name: [] for name in models}
            losses = {}
            for data in batches(setting, 0, WARM_UP + STEPS):
                for name, (model, made) in models.items():
                    times[name].append(step(model, made, data))
                    with torch.no_grad():
                        losses[name] = float(model.loss(model(*data[:2]), data[2]))
            assert max(losses.values()) - min(losses.values()) < 1e-4, losses
            ratios = {
                name: statistics.quantiles(
                    [a / b for a, b in zip(found[WARM_UP:], times["fastcross"][WARM_UP:], strict=True)], n=5
                )
                for name, found in times.items()
            }
            cells = [
                f"{statistics.median(ratios[name]):.2f} ({ratios[name][0]:.2f}–{ratios[name][3]:.2f})"
                if name in ratios
                else "has no Adam on a CPU"
                for name in ("fbgemm", "inside")
            ]
            base = 1e3 * statistics.median(times["fastcross"][WARM_UP:])
            print(f"| {optimizer} | {dim} | {batch} | 1 ({base:.1f} ms) | {cells[0]} | {cells[1]} |")
            del models


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2], [Setting(**setting) for setting in json.loads(sys.argv[3])])
    elif sys.argv[1:2] == ["embedding"]:
        compare_embeddings()
    else:
        report()


if __name__ == "__main__":
    main()
