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
from pathlib import Path

import torch

from benchmarks.scale_model import NUM_DENSE, Setting, collectives, rows_per_rank, traffic

CARDINALITIES = (1_000_000, 300_000, 100_000, 30_000, 10_000, *(1_000,) * 10, *(100,) * 11)
STEPS, WARM_UP = 40, 8


def batches(setting: Setting, rank: int, count: int):
    """Ids with a heavy head, as clicks have; the same for any number of ranks."""
    generator = torch.Generator().manual_seed(1)
    share = slice(setting.batch * rank // setting.ranks, setting.batch * (rank + 1) // setting.ranks)
    sizes = torch.tensor(setting.cardinalities)
    for _ in range(count):
        ids = (torch.rand(setting.batch, len(sizes), generator=generator) ** 3 * sizes).long()
        dense = torch.randn(setting.batch, NUM_DENSE, generator=generator)
        label = (torch.rand(setting.batch, generator=generator) < 0.3).float()
        yield dense[share], ids[share], label[share]


def step(model, optimizer, batch) -> float:
    began = time.perf_counter()
    optimizer.zero_grad()
    loss = model.loss(model(*batch[:2]), batch[2])
    loss.backward()
    optimizer.step()
    return time.perf_counter() - began


def build(setting: Setting, processes, embedding: str = "auto"):
    """A model and its optimiser: without ``processes`` fastcross's own, else TorchRec's."""
    from fastcross.distributed.model import shard
    from fastcross.model import DCN
    from fastcross.optim import configure
    from fastcross.schedule import TrainingConfig

    options = {"cross_layers": setting.cross, "deep_layers": setting.deep}
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


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def worker(output: str, settings: list[Setting]) -> None:
    """One of the processes: measures each setting, and what a collective costs."""
    import torch.distributed as dist

    from fastcross.distributed.processes import start

    torch.set_num_threads(1)
    found = []
    with start(torch.device("cpu")) as processes:
        costs = {}
        for name, size in (("latency", 2), ("bandwidth", 1 << 22)):
            value, times = torch.zeros(size), []
            for _ in range(12):
                dist.barrier()
                began = time.perf_counter()
                dist.all_reduce(value)
                times.append(time.perf_counter() - began)
            costs[name] = statistics.median(times[2:])
        for setting in settings:
            before = resident()
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
            each = processes.collect({"tables": held, "resident": resident() - before})
            found.append(
                {
                    "step": processes.collect(statistics.median(times)),
                    "sent": (loopback() - sent) / STEPS / setting.ranks,
                    "tables": [rank["tables"] for rank in each],
                    "resident": [rank["resident"] for rank in each],
                    **costs,
                }
            )
            del model, optimizer
        if processes.rank == 0:
            Path(output).write_text(json.dumps(found))


def measure(ranks: int, settings: list[Setting]) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        output = f"{folder}/found.json"
        chosen = json.dumps([vars(setting) for setting in settings])
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
        command = [*torchrun, "--", "benchmarks.scale", "worker", output, chosen]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
        return json.loads(Path(output).read_text())


def report() -> None:
    """Time is predicted from one process with a rank's share of the batch, and from what a collective costs."""
    cores, rows = os.cpu_count() or 1, []
    cases = [(batch, sharding) for batch in (1024, 4096) for sharding in ("table", "row")]
    shape = {"cardinalities": CARDINALITIES, "dim": 16, "deep": (256, 128), "cross": 4}
    alone = [Setting(**shape, batch=batch, ranks=1) for batch in (256, 512, 1024, 2048, 4096)]
    share = {setting.batch: found for setting, found in zip(alone, measure(1, alone), strict=True)}
    rows += [(Setting(**shape, batch=batch, ranks=1), share[batch], None) for batch in (1024, 4096)]
    for ranks in (2, 4):
        settings = [Setting(**shape, batch=batch, ranks=ranks, sharding=sharding) for batch, sharding in cases]
        for setting, found in zip(settings, measure(ranks, settings), strict=True):
            # 4 million float32 in a ring: each rank sends twice their size, less a part.
            bandwidth = 2 * (ranks - 1) / ranks * (4 << 22) / found["bandwidth"]
            computing = share[setting.batch // ranks]["step"][0] * max(1, ranks / cores)
            waiting = collectives(setting) * found["latency"]
            rows.append((setting, found, computing + traffic(setting) / bandwidth + waiting))
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
    from fastcross.distributed.processes import start

    torch.set_num_threads(os.cpu_count() or 1)
    print("| optimiser | n_e | batch | fastcross | fbgemm through TorchRec | fastcross through TorchRec |")
    print("|---|---|---|---|---|---|")
    with start(torch.device("cpu")) as processes:
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
