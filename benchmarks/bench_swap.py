"""What ``fastcross.swap`` gains, and what an exported model costs to serve; contestants interleaved, paired ratios.

    python benchmarks/bench_swap.py cross       each package's cross network, forward and backward, before and after
    python benchmarks/bench_swap.py train       a training step of DeepCTR-Torch's own DCN, before and after
    python benchmarks/bench_swap.py serve       latency of one request: exported, eager, and DeepCTR-Torch's DCN

Needs the packages of requirements-peers.txt. Each pair is compared for equal results before it is timed.
"""

import argparse
import copy
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastcross

CROSS_NETWORKS = {
    "DeepCTR-Torch": ("deepctr_torch.layers.interaction", "CrossNet"),
    "TorchRec": ("torchrec.modules.crossnet", "VectorCrossNet"),
    "FuxiCTR": ("fuxictr.pytorch.layers.interactions.cross_net", "CrossNet"),
    "torchfm": ("torchfm.layer", "CrossNetwork"),
}
FIELDS, DENSE = 26, 13  # Criteo's


def interleave(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds that each step took, one of each in turn."""
    for step in steps.values():
        step()
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    return times


def quantiles(values: list[float], *at: float) -> list[float]:
    ordered = sorted(values)
    return [ordered[round(q * (len(ordered) - 1))] for q in at]


def report_ratio(name: str, before: list[float], after: list[float]) -> None:
    p20, p50, p80 = quantiles([b / a for b, a in zip(before, after, strict=True)], 0.2, 0.5, 0.8)
    milliseconds = [1e3 * quantiles(taken, 0.5)[0] for taken in (before, after)]
    print(
        f"{name:34} before {milliseconds[0]:8.2f} ms   after {milliseconds[1]:8.2f} ms   "
        f"before / after {p50:6.2f} ({p20:.2f} to {p80:.2f})"
    )


def swapped_copy(model: nn.Module) -> nn.Module:
    ours = copy.deepcopy(model)
    if not fastcross.swap(ours).swapped:
        raise SystemExit(f"nothing was swapped in {type(model).__name__}")
    return ours


def bench_cross(rows: int, features: int, layers: int, rounds: int) -> None:
    print(f"cross network, forward and backward: {rows} rows, d = {features}, L = {layers}, float32")
    for name, (module, cls) in CROSS_NETWORKS.items():
        theirs = getattr(import_module(module), cls)(features, layers)
        ours = swapped_copy(theirs)
        x0, dy = torch.randn(rows, features), torch.randn(rows, features)

        def step(network: nn.Module, x0: Tensor = x0, dy: Tensor = dy) -> list[Tensor]:
            x = x0.detach().requires_grad_()
            y = network(x)
            return [y.detach(), *torch.autograd.grad(y, [x, *network.parameters()], dy)]

        for a, b in zip(step(theirs), step(ours), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-4 * a.abs().max().item())
        times = interleave({"before": lambda: step(theirs), "after": lambda: step(ours)}, rounds)  # noqa: B023
        report_ratio(name, times["before"], times["after"])


def deepctr_dcn(layers: int, embedding_dim: int = 16, cardinality: int = 1000) -> nn.Module:
    inputs, models = import_module("deepctr_torch.inputs"), import_module("deepctr_torch.models.dcn")
    columns = [inputs.SparseFeat(f"c{i}", cardinality, embedding_dim=embedding_dim) for i in range(FIELDS)]
    columns += [inputs.DenseFeat(f"i{i}", 1) for i in range(DENSE)]
    return models.DCN(columns, columns, cross_num=layers, dnn_hidden_units=(256, 128))


def deepctr_rows(rows: int, cardinality: int = 1000) -> Tensor:
    return torch.cat((torch.randint(0, cardinality, (rows, FIELDS)).float(), torch.randn(rows, DENSE)), dim=1)


def bench_train(rows: int, layers: int, rounds: int) -> None:
    theirs = deepctr_dcn(layers)
    ours = swapped_copy(theirs)
    x, label = deepctr_rows(rows), torch.randint(0, 2, (rows,)).float()
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
    d = theirs.crossnet.kernels.shape[1]
    print(f"DeepCTR-Torch's DCN, a step of Adam: {rows} rows, d = {d}, L = {layers}, deep (256, 128)")

    def training_step(model: nn.Module) -> Callable[[], None]:
        optimizer = torch.optim.Adam(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            F.binary_cross_entropy(model(x).flatten(), label).backward()
            optimizer.step()

        return step

    times = interleave({"before": training_step(theirs), "after": training_step(ours)}, rounds)
    report_ratio("whole step", times["before"], times["after"])


def bench_serve(layers: int, rounds: int) -> None:
    model = fastcross.DCN([1000] * FIELDS, DENSE, embedding_dim=16, cross_layers=layers, deep_layers=(256, 128)).eval()
    theirs = deepctr_dcn(layers).eval()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = fastcross.export(model, Path(folder) / "dcn.pt2", request(2))
        exported = torch._inductor.aoti_load_package(str(path))
        for rows in (1, 512):
            dense, categorical = request(rows)
            x = torch.cat((categorical.float(), dense), dim=1)
            torch.testing.assert_close(exported(dense, categorical), model(dense, categorical), rtol=1e-4, atol=1e-5)
            steps = {
                "DCN, exported (AOTInductor)": lambda: exported(dense, categorical),  # noqa: B023
                "DCN, eager": lambda: model(dense, categorical),  # noqa: B023
                "DeepCTR-Torch's DCN": lambda: theirs(x),  # noqa: B023
            }
            print(f"one request of {rows} rows, {FIELDS} features of 16 and {DENSE} dense, L = {layers}")
            times = interleave(steps, rounds)
            base = times["DCN, exported (AOTInductor)"]
            for name, taken in times.items():
                p50, p99 = (1e6 * t for t in quantiles(taken, 0.5, 0.99))
                ratio = quantiles([t / b for t, b in zip(taken, base, strict=True)], 0.5)[0]
                print(f"{name:34} p50 {p50:8.0f} µs   p99 {p99:8.0f} µs   × exported {ratio:6.2f}")


def request(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, DENSE), torch.randint(0, 1000, (rows, FIELDS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cross", "train", "serve"])
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--features", type=int, default=1026, help="d of `cross`; the paper's")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    if arguments.what == "cross":
        bench_cross(arguments.rows, arguments.features, arguments.layers, arguments.rounds)
    elif arguments.what == "train":
        bench_train(arguments.rows, arguments.layers, arguments.rounds)
    else:
        bench_serve(arguments.layers, arguments.rounds * 10)


if __name__ == "__main__":
    main()
