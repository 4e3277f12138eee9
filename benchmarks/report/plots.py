"""The figures: time against depth and width, memory against depth, the roofline."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.contestants import COMPILED, COPY, DEEPCTR, EAGER, FUXICTR, OURS, TORCHFM, TORCHREC
from benchmarks.report.runs import Case, Suite
from benchmarks.suites import DEPTHS
from benchmarks.workloads import counts
from benchmarks.workloads.roof import LARGE_COPY, PRODUCT

STYLES: dict[str, dict[str, Any]] = {
    OURS.name: {"color": "#c0392b", "marker": "o", "linewidth": 2.5, "zorder": 3},
    EAGER.name: {"color": "#2c3e50", "marker": "s"},
    COMPILED.name: {"color": "#8e44ad", "marker": "^"},
    DEEPCTR.name: {"color": "#2980b9", "marker": "v"},
    TORCHREC.name: {"color": "#27ae60", "marker": "D"},
    FUXICTR.name: {"color": "#d35400", "marker": "<"},
    TORCHFM.name: {"color": "#16a085", "marker": ">"},
    COPY.name: {"color": "#7f8c8d", "linestyle": ":"},
}


def series(cases: list[Case], axis: str, name: str, value: str) -> tuple[list[float], list[float]]:
    """Points of one contestant: the workload's ``axis`` against ``seconds`` or ``kept_bytes``."""
    points = []
    for case in cases:
        if name in case.names and case.workload["backward"]:
            y = case.seconds(name).middle if value == "seconds" else case.weight(name, value)
            if y is not None:
                points.append((case.workload[axis], y))
    points.sort()
    return [x for x, _ in points], [y for _, y in points]


def against(suite: Suite, file: Path, axis: str, value: str, labels: tuple[str, str], scale: float) -> None:
    """One line per contestant, both axes logarithmic."""
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for name, style in STYLES.items():
        x, y = series(suite.cases, axis, name, value)
        if x and any(y):
            axes.plot(x, [scale * v for v in y], label=name, markersize=5, **style)
    _finish(figure, axes, labels, f"{_fixed(suite, axis)}\n{_where(suite)}", file)


def roofline(suite: Suite, file: Path) -> None:
    """Operations per second against operations per byte, each contestant by the count of its own algorithm."""
    (machine,), (depths,), paper = suite.of_kind("roof"), suite.of_kind("depths"), suite.of_kind("operator")[0]
    bandwidth = machine.workload["copy_bytes"] / machine.seconds(LARGE_COPY.name).middle
    compute = machine.workload["product_operations"] / machine.seconds(PRODUCT.name).middle
    rows, d, layers = (paper.workload[key] for key in ("rows", "d", "layers"))
    points = [(name, layers, paper.seconds(name).middle) for name in paper.names]
    for contestant in DEPTHS:
        if depths.has(contestant) and contestant.layers is not None:
            plain = OURS.name if contestant.backend == OURS.backend else EAGER.name
            points.append((plain, contestant.layers, depths.seconds(contestant.name).middle))

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    x = [2.0**e for e in range(-5, 8)]
    roof = [min(bandwidth * v, compute) / 1e9 for v in x]
    axes.plot(x, roof, color="black", label="roof: large copy, matrix product")
    named = set()
    for name, depth, seconds in points:
        per_element = counts.OURS if name == OURS.name else counts.LAYER_BY_LAYER.get(name)
        if per_element is None:
            continue
        done, moved = per_element.operations(depth) * rows * d, per_element.bytes(depth, 4) * rows * d
        style = {key: value for key, value in STYLES[name].items() if key != "linewidth"}
        point = (done / moved, done / seconds / 1e9)
        axes.plot(*point, linestyle="none", label=None if name in named else name, **style)
        if name == OURS.name:
            axes.annotate(f"L = {depth}", point, textcoords="offset points", xytext=(6, -10), fontsize=8)
        named.add(name)
    labels = "operations per byte moved", "10⁹ operations per second"
    title = f"Roofline, forward + backward\n{_fixed(suite, 'layers')}\n{_where(suite)}"
    _finish(figure, axes, labels, title, file)


def time_against_depth(suite: Suite, file: Path) -> None:
    against(suite, file, "layers", "seconds", ("number of cross layers", "time of forward + backward pass, ms"), 1e3)


def memory_against_depth(suite: Suite, file: Path) -> None:
    against(
        suite,
        file,
        "layers",
        "kept_bytes",
        ("number of cross layers", "memory kept for the backward pass, MiB"),
        2**-20,
    )


def time_against_width(suite: Suite, file: Path) -> None:
    against(suite, file, "d", "seconds", ("number of features", "time of forward + backward pass, ms"), 1e3)


# Name of the file and of a suite's entry in the registry -> caption, and what draws it.
FIGURES: dict[str, tuple[str, Callable[[Suite, Path], None]]] = {
    "roofline": ("Roofline", roofline),
    "time-against-depth": ("Time against depth", time_against_depth),
    "memory-against-depth": ("Memory kept for the backward pass against depth", memory_against_depth),
    "time-against-width": ("Time against width", time_against_width),
}


def draw(suites: dict[str, Suite], folder: Path) -> list[str]:
    """The figures of the suites that were measured; the names of their files."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for suite in suites.values():
        for name in suite.registered.figures:
            FIGURES[name][1](suite, folder / f"{name}.png")
            drawn.append(f"{name}.png")
    return drawn


def _fixed(suite: Suite, axis: str) -> str:
    """What all points of a figure share."""
    workload = suite.cases[0].workload
    names = {"rows": "rows", "d": "features", "layers": "layers"}
    shared = [f"{workload[key]} {name}" for key, name in names.items() if key != axis]
    return f"cross network, {', '.join(shared)}, {workload['dtype']}"


def _where(suite: Suite) -> str:
    on = suite.machine
    kernels = ", CPU kernels before C++ (Numba)" if "numba" in suite.versions else ""
    return on.get("gpu") or f"{on['processor']}, {on['threads']} threads{kernels}"


def _finish(figure: Any, axes: Any, labels: tuple[str, str], title: str, file: Path) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")  # 0.1, 8 or 32 in place of powers
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3, which="both")
    figure.legend(fontsize=8, loc="outside right upper")  # beside the curves, never over them
    figure.savefig(file, dpi=150, metadata={"Software": None})  # the same numbers give the same file
    plt.close(figure)
