"""The figures: time against depth and width, memory against depth, the roofline."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from benchmarks import counts, roof
from benchmarks.contestants import COMPILED, COPY, EAGER, OURS

STYLES: dict[str, dict[str, Any]] = {
    OURS: {"color": "#c0392b", "marker": "o", "linewidth": 2.5, "zorder": 3},
    EAGER: {"color": "#2c3e50", "marker": "s"},
    COMPILED: {"color": "#8e44ad", "marker": "^"},
    "DeepCTR-Torch": {"color": "#2980b9", "marker": "v"},
    "TorchRec": {"color": "#27ae60", "marker": "D"},
    "FuxiCTR": {"color": "#d35400", "marker": "<"},
    "torchfm": {"color": "#16a085", "marker": ">"},
    COPY: {"color": "#7f8c8d", "linestyle": ":"},
}


def series(cases: list[dict[str, Any]], axis: str, contestant: str, value: str) -> tuple[list[float], list[float]]:
    """Points of one contestant: the workload's ``axis`` against ``seconds``, ``kept_bytes`` or ``peak_bytes``."""
    points = []
    for case in cases:
        record = case["contestants"].get(contestant, {})
        y = record.get("seconds", {}).get("p50") if value == "seconds" else record.get(value)
        if y is not None and case["workload"]["backward"]:
            points.append((case["workload"][axis], y))
    points.sort()
    return [x for x, _ in points], [y for _, y in points]


def against(group: dict[str, Any], axis: str, value: str, labels: tuple[str, str], scale: float, file: Path) -> None:
    """One line per contestant, both axes logarithmic."""
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for contestant, style in STYLES.items():
        x, y = series(group["cases"], axis, contestant, value)
        if x and any(y):
            axes.plot(x, [scale * v for v in y], label=contestant, markersize=5, **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({case["workload"][axis] for case in group["cases"]})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    _finish(figure, axes, f"{_fixed(group, axis)}\n{_where(group)}", file)


def roofline(group: dict[str, Any], file: Path) -> None:
    """Operations per second against operations per byte, each contestant by the count of its own algorithm."""
    cases = {case["workload"]["title"].split(",")[0].split(":")[0]: case for case in reversed(group["cases"])}
    machine, paper, depths = cases["roof"], cases["cross_network"], cases["cross_network against itself"]
    bandwidth = machine["workload"]["copy_bytes"] / machine["contestants"][roof.COPY]["seconds"]["p50"]
    compute = machine["workload"]["product_operations"] / machine["contestants"][roof.PRODUCT]["seconds"]["p50"]
    shape = paper["workload"]
    points = [(name, shape["layers"], record) for name, record in paper["contestants"].items()]
    for name, record in depths["contestants"].items():
        which, _, layers = name.partition(", L = ")
        points.append((which, int(layers), record))

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    x = [2.0**e for e in range(-5, 8)]
    axes.plot(
        x, [min(bandwidth * v, compute) / 1e9 for v in x], color="black", label="roof: large copy, matrix product"
    )
    named = set()
    for name, layers, record in points:
        moved = counts.moved_bytes(name, shape["rows"], shape["d"], layers, 4)
        if moved is None:
            continue
        done = counts.operations(name, shape["rows"], shape["d"], layers)
        style = {key: value for key, value in STYLES[name].items() if key != "linewidth"}
        point = (done / moved, done / record["seconds"]["p50"] / 1e9)
        axes.plot(*point, linestyle="none", label=None if name in named else name, **style)
        if name == OURS:
            axes.annotate(f"L = {layers}", point, textcoords="offset points", xytext=(6, -10), fontsize=8)
        named.add(name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("operations per byte moved")
    axes.set_ylabel("10⁹ operations per second")
    _finish(figure, axes, f"Roofline, forward + backward, {_fixed(group, 'layers')}\n{_where(group)}", file)


def draw(groups: dict[str, Any], folder: Path) -> dict[str, str]:
    """The figures that the measured groups allow: file name -> caption."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {}
    if depth := groups.get("cross_network_depth"):
        labels = "layers L", "forward + backward, ms"
        against(depth, "layers", "seconds", labels, 1e3, folder / "time-against-depth.png")
        drawn["time-against-depth.png"] = "Time against depth"
        labels = "layers L", "kept for the backward pass, MiB"
        against(depth, "layers", "kept_bytes", labels, 2**-20, folder / "memory-against-depth.png")
        drawn["memory-against-depth.png"] = "Memory kept for the backward pass against depth"
    if width := groups.get("cross_network_width"):
        labels = "features d", "forward + backward, ms"
        against(width, "d", "seconds", labels, 1e3, folder / "time-against-width.png")
        drawn["time-against-width.png"] = "Time against width"
    if "cross_network" in groups:
        roofline(groups["cross_network"], folder / "roofline.png")
        drawn["roofline.png"] = "Roofline"
    return drawn


def _fixed(group: dict[str, Any], axis: str) -> str:
    """What all points of a figure share."""
    workload = group["cases"][0]["workload"]
    names = {"rows": "B", "d": "d", "layers": "L"}
    shared = [f"{name} = {workload[key]}" for key, name in names.items() if key != axis]
    return f"cross network, {', '.join(shared)}, {workload['dtype']}"


def _where(group: dict[str, Any]) -> str:
    on = group["machine"]
    return on.get("gpu") or f"{on['processor']}, {on['threads']} threads"


def _finish(figure: Any, axes: Any, title: str, file: Path) -> None:
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8, loc="upper left")
    figure.savefig(file, dpi=150, metadata={"Software": None})  # the same numbers give the same file
    plt.close(figure)
