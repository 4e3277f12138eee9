"""python -m benchmarks.report: tables and figures from the committed runs, into docs/ and README.md.

Nothing in them is typed: every number comes from benchmarks/results/, with the command, the machine and the versions
that made it. A result that was not verified is refused, and so are runs that were not made alike.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.harness import results
from benchmarks.harness.measure import Refused
from benchmarks.report import plots, runs, tables
from benchmarks.report.summary import facts, summary
from benchmarks.static import gpu_static

ROOT = Path(__file__).parents[2]
START, END = "<!-- benchmarks:start -->", "<!-- benchmarks:end -->"
PROGRAMS = "<!-- from here on by programs of their own: kept as it stands -->"
COLUMNS = """\
**p50**, **p20 to p80**: time per call; the median of the runs' medians, the lowest 20th and the highest 80th percentile
of any run. **× eager**, **× best peer**: how many times as fast as the eager loop and as the fastest of the four peers.
**× before**: as the same module before the swap. **copies of x0**: time over that of `x0.clone()`, one read and one
write of x0 with its allocation. **GB/s**: the bytes that the closed form has to move, over the time. **kept**: bytes
kept for the backward pass beside inputs and parameters. **peak**: the most memory a call held beyond what was there
before it. Ratios are taken within a round, all contestants in turns, after the output and the gradients of each were
compared with the float64 reference. Each suite ran in a process of its own."""


def page(suites: dict[str, runs.Suite]) -> str:
    """docs/benchmarks.md."""
    parts = ["# Benchmarks", "Made by `make report` from the runs in `benchmarks/results/`."]
    if "cross_network" in suites:
        parts.append("\n".join(f"- {fact}" for fact in facts(suites)))
    parts.append(COLUMNS)
    for suite in suites.values():
        parts += [f"## {suite.title}", suite.registered.text, tables.suite_tables(suite)]
        if suite.rows:
            parts.append(
                f"Compiled without a GPU: aligned rows of d = {gpu_static.D}, L = {gpu_static.LAYERS}. Occupancy as far"
                f" as registers decide, by the targets' published limits. Estimate: {gpu_static.ESTIMATE}, for"
                f" B = {gpu_static.ROWS} on the chip named."
            )
        parts.append(tables.provenance(suite) + ".")
        parts += [f"![{plots.FIGURES[name][0]}](figures/{name}.png)" for name in suite.registered.figures]
    return "\n\n".join(part for part in parts if part) + "\n"


def replace_between_markers(text: str, part: str) -> str:
    if text.count(START) != 1 or text.count(END) != 1 or text.index(START) > text.index(END):
        raise Refused(f"README.md must have {START} and {END} once each, in this order")
    return text[: text.index(START) + len(START)] + f"\n{part}\n" + text[text.index(END) :]


def kept_part(path: Path) -> str:
    """What docs/benchmarks.md has from programs that print their own tables."""
    _, mark, part = path.read_text().partition(PROGRAMS) if path.exists() else ("", "", "")
    return f"\n{mark}{part}" if mark else ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.report", description=__doc__)
    parser.add_argument(
        "--results", type=Path, default=results.folder(), help="the folder of the runs (results/DEVICE)"
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="where README.md and docs/ are")
    chosen = parser.parse_args(arguments)
    try:
        suites = runs.load(chosen.results)
        readme, docs = chosen.root / "README.md", chosen.root / "docs"
        if "cross_network" in suites:
            readme.write_text(replace_between_markers(readme.read_text(), summary(suites)))
        figures = plots.draw(suites, docs / "figures")
        tables_page = docs / "benchmarks.md"
        tables_page.write_text(page(suites) + kept_part(tables_page))
    except Refused as reason:
        print(f"refused: {reason}", file=sys.stderr)
        return 1
    print(f"wrote README.md, docs/benchmarks.md and {', '.join(figures)} in {chosen.root}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
