"""python -m benchmarks.report: tables and figures from the measurements' JSON, into docs/ and README.md.

Nothing in them is typed: every number comes from ``benchmarks/results/``, with the command, the machine and the
versions that made it. A result that was not verified is refused.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks import plots, results, tables
from benchmarks.contestants import COPY, EAGER, OURS
from benchmarks.harness import Refused
from benchmarks.models import DEEPCTR, DNN, TORCHFM
from benchmarks.static import gpu_static

ROOT = Path(__file__).parent.parent
START, END = "<!-- benchmarks:start -->", "<!-- benchmarks:end -->"
COLUMNS = """\
**p50**, **p20 to p80**: time per call, median and spread. **× eager**, **× best peer**: how many times as fast as the
eager loop and as the fastest of the four peers. **copies of x0**: time over that of `x0.clone()`, one read and one
write of x0 with its allocation. **GB/s**: the bytes that the closed form has to move, over the time. **kept**: bytes
kept for the backward pass beside inputs and parameters. **peak**: the most memory a call held beyond what was there
before it. Ratios are taken within a round, all contestants in turns, after the output and the gradients of each were
compared with the float64 reference. Each group ran in a process of its own."""


def summary(groups: dict[str, Any]) -> str:
    """The README's part: one table, what else is worth knowing in a line each, one figure."""
    group = groups["cross_network"]
    case = group["cases"][0]
    rows = []
    for name, record in case["contestants"].items():
        ratio = record["ratio_to"][OURS]
        gain = "" if name in (OURS, COPY) else tables.spread(ratio)
        kept = tables.size(record["kept_bytes"]) if "kept_bytes" in record else ""
        rows.append([name, tables.duration(record["seconds"]["p50"]), gain, kept, tables.size(record["peak_bytes"])])
    rows += [[name, "missing", "", "", ""] for name in case["missing"]]
    header = ["", "time", "fastcross is faster by", "kept for backward", "peak memory"]
    lines = [f"**{case['workload']['title']}**", tables.markdown(header, rows)]
    facts = [fact for fact in _facts(groups) if fact]
    lines.append("\n".join(f"- {fact}" for fact in facts))
    lines.append("![Time against depth](docs/figures/time-against-depth.png)")
    everything = (
        "All groups, memory, roofline and the GPU kernels' machine code: [docs/benchmarks.md](docs/benchmarks.md)."
    )
    lines.append(f"{tables.provenance(group)}. {everything}")
    return "\n\n".join(lines)


def _facts(groups: dict[str, Any]) -> list[str | None]:
    """What the table does not show, where it was measured."""
    case, depths = groups["cross_network"]["cases"][0], groups["cross_network"]["cases"][2]["contestants"]
    ours, eager = case["contestants"][OURS], case["contestants"][EAGER]
    twelve, deepest = (depths[f"{OURS}, L = {layers}"]["ratio_to"][f"{OURS}, L = 1"] for layers in (12, 32))
    loop = depths[f"{EAGER}, L = 12"]["ratio_to"][f"{EAGER}, L = 1"]
    kept = eager["kept_bytes"] / ours["kept_bytes"]
    return [
        f"A forward and backward pass takes {tables.spread(ours['ratio_to'][COPY])} the time of a copy of x0; the least"
        f" that the closed form has to move is {case['workload']['floor_copies']:g} copies.",
        f"12 layers take {tables.spread(twelve)} the time of 1 layer, 32 layers {tables.spread(deepest)}; in the eager"
        f" loop 12 layers take {tables.spread(loop)}.",
        f"For the backward pass it keeps 1/{kept:.0f} of what the eager loop keeps.",
        _grid_fact(groups),
        *_step_facts(groups),
    ]


def _grid_fact(groups: dict[str, Any]) -> str | None:
    if "cross_network_grid" not in groups:
        return None
    measured = [case for case in groups["cross_network_grid"]["cases"] if EAGER in case["contestants"]]

    def gain(case: dict[str, Any]) -> float:
        return case["contestants"][EAGER]["ratio_to"][OURS]["p50"]

    least, most = min(measured, key=gain), max(measured, key=gain)
    slower = sum(gain(case) < 1 for case in measured)
    shapes = [f"B = {w['rows']}, d = {w['d']}, L = {w['layers']}" for w in (least["workload"], most["workload"])]
    return (
        f"On a grid of {len(measured)} shapes it is between {gain(least):.3g}× ({shapes[0]}) and {gain(most):.3g}×"
        f" ({shapes[1]}) as fast as the eager loop; slower on {slower} of them."
    )


def _step_facts(groups: dict[str, Any]) -> list[str]:
    facts = []
    for case in groups.get("model_step", {"cases": []})["cases"]:
        contestants, title = case["contestants"], case["workload"]["title"]
        if DNN in contestants:
            with_loop = contestants[EAGER]["ratio_to"][DNN]["p50"]
            facts.append(
                f"DCN's {title}: {tables.spread(contestants[OURS]['ratio_to'][DNN])} that of its DNN alone"
                f" (cross layers one by one: {with_loop:.2f}×)."
            )
        for rival in (DEEPCTR, TORCHFM):
            if rival in contestants:
                gain = tables.spread(contestants[rival]["ratio_to"][OURS])
                facts.append(f"DCN's {title}: {gain} as fast as {rival}'s.")
    return facts


def page(groups: dict[str, Any], figures: dict[str, str]) -> str:
    """docs/benchmarks.md."""
    parts = ["# Benchmarks", "Made by `python -m benchmarks.report` from `benchmarks/results/`.", COLUMNS]
    for name in sorted(groups, key=lambda name: (name == "gpu_kernels", name)):
        group = groups[name]
        title, _, text = group["title"].partition("\n")
        parts += [f"## {title.rstrip('.')}", text.strip(), tables.group_tables(group)]
        if name == "gpu_kernels":
            parts.append(
                f"Compiled without a GPU: aligned rows of d = {gpu_static.D}, L = {gpu_static.LAYERS}. Occupancy as far"
                f" as registers decide, by the targets' published limits. Estimate: {gpu_static.ESTIMATE}, for"
                f" B = {gpu_static.ROWS} on the chip named."
            )
        parts.append(tables.provenance(group) + ".")
        parts += [f"![{figures[file]}](figures/{file})" for file in FIGURES.get(name, ()) if file in figures]
    return "\n\n".join(part for part in parts if part) + "\n"


FIGURES = {
    "cross_network": ("roofline.png",),
    "cross_network_depth": ("time-against-depth.png", "memory-against-depth.png"),
    "cross_network_width": ("time-against-width.png",),
}


def replace_between_markers(text: str, part: str) -> str:
    if text.count(START) != 1 or text.count(END) != 1 or text.index(START) > text.index(END):
        raise Refused(f"README.md must have {START} and {END} once each, in this order")
    return text[: text.index(START) + len(START)] + f"\n{part}\n" + text[text.index(END) :]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.report", description=__doc__)
    parser.add_argument("--results", type=Path, default=None, help="JSON (benchmarks/results/DEVICE.json)")
    parser.add_argument("--root", type=Path, default=ROOT, help="where README.md and docs/ are")
    chosen = parser.parse_args(arguments)
    file = chosen.results or results.path()
    if not file.exists():
        parser.error(f"{file} is not there; first run: pytest benchmarks/ --benchmark-only")
    try:
        groups = results.load(file)
        if "cross_network" in groups:
            readme = chosen.root / "README.md"
            readme.write_text(replace_between_markers(readme.read_text(), summary(groups)))
        figures = plots.draw(groups, chosen.root / "docs" / "figures")
        (chosen.root / "docs" / "benchmarks.md").write_text(page(groups, figures))
    except Refused as reason:
        print(f"refused: {reason}", file=sys.stderr)
        return 1
    print(f"wrote README.md, docs/benchmarks.md and {', '.join(figures)} in {chosen.root}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
