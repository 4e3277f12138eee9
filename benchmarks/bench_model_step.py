"""Training steps of whole models, contestants interleaved, as ratios of paired times.

    python benchmarks/bench_model_step.py cross       DCN's step beside that of its DNN alone
    python benchmarks/bench_model_step.py height      a step with tables of 10 million rows beside one of a thousand
    python benchmarks/bench_model_step.py deepctr     DCN beside DeepCTR-Torch's, 26 features of a million ids each

A step is everything from a batch in memory to updated parameters: zero_grad, forward, loss, backward, Adam.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fastcross import DCN, optim

Step = Callable[[], None]


def compare(steps: dict[str, Step], rounds: int, unit: int) -> None:
    """One step of each contestant in turn; each time divided by the first contestant's in the same round."""
    for step in steps.values():
        step()
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    first = next(iter(steps))
    for name, taken in times.items():
        ratios = sorted(t / base for t, base in zip(taken, times[first], strict=True))
        p20, p50, p80 = (ratios[int(q * (len(ratios) - 1))] for q in (0.2, 0.5, 0.8))
        median = statistics.median(taken)
        print(
            f"{name:32} {1e3 * median:9.2f} ms {unit / median:11,.0f} samples/s   "
            f"× {first}: {p50:.3f} ({p20:.3f} to {p80:.3f})"
        )


def batches(
    cardinality: int, rows: int, count: int = 8, num_dense: int = 13
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """An endless cycle of random batches; ids in the skewed fashion of click logs, a few frequent and a long tail."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        uniform = torch.rand(rows, 26, generator=generator, dtype=torch.float64)
        categorical = (cardinality**uniform).long().clamp(max=cardinality) - 1
        dense = torch.randn(rows, 13, generator=generator)
        made.append((dense, categorical, torch.randint(0, 2, (rows,), generator=generator).float()))
    while True:
        yield from made


def training_step(model: DCN, data: Iterator[tuple[Tensor, Tensor, Tensor]]) -> Step:
    optimizer = optim.configure(model, lr=1e-3)

    def step() -> None:
        dense, categorical, label = next(data)
        optimizer.zero_grad()
        model.loss(model(dense, categorical), label).backward()
        optimizer.step()

    return step


def bench_cross(rows: int, rounds: int) -> None:
    dims = [39] * 25 + [38]  # and 13 dense features: the paper's d = 1026
    steps = {}
    for name, options in {
        "DNN": {"cross_layers": 0},
        "DCN": {"cross_layers": 6},
        "DCN, cross layers one by one": {"cross_layers": 6, "backend": "reference"},
    }.items():
        torch.manual_seed(0)
        model = DCN([10_000] * 26, 13, dims, deep_layers=(1024, 1024), **options)
        model.embedding.backend = "auto"
        steps[name] = training_step(model, batches(10_000, rows))
    print(f"d = 1026, 6 cross layers, 2 × 1024, B = {rows}")
    compare(steps, rounds, rows)


def bench_height(rows: int, rounds: int) -> None:
    steps = {}
    for height in (1_000, 10_000_000):
        torch.manual_seed(0)
        model = DCN([height, *[1_000] * 25], 13, 8, cross_layers=3, deep_layers=(256, 256))
        steps[f"first table of {height:,} rows"] = training_step(model, batches(1_000, rows))
    print(f"26 features of 8 columns, 3 cross layers, 2 × 256, B = {rows}; the same ids for both")
    compare(steps, rounds, rows)


def bench_deepctr(rows: int, rounds: int) -> None:
    from deepctr_torch.inputs import DenseFeat, SparseFeat
    from deepctr_torch.models import DCN as DeepCTR

    height, width, cross_layers, deep_layers = 1_000_000, 8, 3, (256, 256)
    features = [SparseFeat(f"C{i}", height, width) for i in range(26)] + [DenseFeat(f"I{i}") for i in range(13)]
    torch.manual_seed(0)
    # The linear part that DeepCTR adds to the paper's model is left out; so is its penalty on whole tables.
    theirs = DeepCTR(
        *([], features, cross_layers, "vector", deep_layers),
        l2_reg_linear=0,
        l2_reg_embedding=0,
        l2_reg_cross=0,
        l2_reg_dnn=0,
        dnn_use_bn=True,
    )
    theirs.train()
    optimizer = torch.optim.Adam(theirs.parameters(), lr=1e-3)
    data = batches(height, rows)

    def step() -> None:
        dense, categorical, label = next(data)
        optimizer.zero_grad()
        probability = theirs(torch.cat((categorical.float(), dense), dim=1)).squeeze(1)
        F.binary_cross_entropy(probability, label).backward()
        optimizer.step()

    ours = DCN([height] * 26, 13, width, cross_layers=cross_layers, deep_layers=deep_layers)
    print(f"26 features of 1,000,000 ids and {width} columns, {cross_layers} cross layers, 2 × 256, B = {rows}")
    compare({"fastcross": training_step(ours, batches(height, rows)), "DeepCTR-Torch": step}, rounds, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cross", "height", "deepctr"))
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    for batch in arguments.rows:
        globals()[f"bench_{arguments.what}"](batch, arguments.rounds)
