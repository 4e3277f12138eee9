"""The measurements as Markdown: one table per case, the grid as one table, the GPU kernels' machine code."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.contestants import COPY, DNN, EAGER, EMPTY, OURS, PEERS, PRODUCTS, swapped
from benchmarks.report.runs import Case, Spread, Suite

FLOORS = (COPY.name, EMPTY.name, PRODUCTS.name)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table that is aligned as text, too; numbers to the right."""
    lines = [[*header], *([*row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]

    def join(line: Sequence[str]) -> str:
        cells = [
            text.ljust(w) if i == 0 else text.rjust(w) for i, (text, w) in enumerate(zip(line, widths, strict=True))
        ]
        return "| " + " | ".join(cells) + " |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([join(lines[0]), join(rule), *map(join, lines[1:])])


def duration(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def size(count: float | None) -> str:
    if count is None:
        return ""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


def times(ratio: float) -> str:
    return f"{ratio:.3g}×"


def spread(ratio: Spread) -> str:
    return f"{ratio.middle:.3g}× ({ratio.low:.3g} to {ratio.high:.3g})"


def best_peer(case: Case) -> str | None:
    """The fastest of the peers that took part as they come."""
    peers = [peer.name for peer in PEERS if case.has(peer)]
    return min(peers, key=lambda name: case.seconds(name).middle, default=None)


def faster_than(case: Case, base: str | None) -> Callable[[str], str]:
    """A column: how many times as fast as the base."""

    def cell(name: str) -> str:
        return "" if base not in case.names or name in FLOORS else times(case.ratio(base, name).middle)

    return cell


def case_table(case: Case) -> str:
    """Every contestant of one workload; columns that none of them has are left out."""
    before = {swapped(peer).name: peer.name for peer in PEERS}

    def relative(base: str) -> Callable[[str], str]:
        return lambda name: f"{case.ratio(name, base).middle:.3g}" if base in case.names else ""

    def gigabytes(name: str) -> str:
        moved = case.workload.get("floor_bytes")
        return (
            ""
            if moved is None or name in FLOORS or case.workload["kind"] == "depths"
            else (f"{moved / case.seconds(name).middle / 1e9:.3g}")
        )

    columns: dict[str, Callable[[str], str]] = {
        "": lambda name: name,
        "p50": lambda name: duration(case.seconds(name).middle),
        "p20 to p80": lambda name: f"{duration(case.seconds(name).low)} to {duration(case.seconds(name).high)}",
        "p99": lambda name: duration(case.percentile(name, 99)) if case.workload["latency"] else "",
        "× eager": faster_than(case, EAGER.name),
        "× best peer": faster_than(case, best_peer(case)),
        "× before": lambda name: times(case.ratio(before[name], name).middle) if before.get(name) in case.names else "",
        "× DNN's time": relative(DNN.name),
        "copies of x0": relative(COPY.name),
        "× GEMMs": relative(PRODUCTS.name),
        "GB/s": gigabytes,
        "kept": lambda name: size(case.weight(name, "kept_bytes")),
        "peak": lambda name: size(case.weight(name, "peak_bytes")),
    }
    rows = [[cell(name) for cell in columns.values()] for name in case.names]
    rows += [[name, "missing", *[""] * (len(columns) - 2)] for name in case.missing]
    used = [i for i in range(len(columns)) if i == 0 or any(row[i] for row in rows)]
    table = markdown([[*columns][i] for i in used], [[row[i] for i in used] for row in rows])
    notes = [f"{name}: {reason}." for name, reason in case.missing.items()]
    if "floor_copies" in case.workload and case.has(COPY):
        notes.append(f"The floor is {case.workload['floor_copies']:g} copies.")
    return "\n\n".join([f"**{case.title}**", table, *notes])


def grid_table(cases: Sequence[Case]) -> str:
    """How many times as fast as the eager loop fastcross is, rows against shapes."""
    batches = sorted({case.workload["rows"] for case in cases})
    shapes = sorted({(case.workload["d"], case.workload["layers"]) for case in cases})
    found = {(w["rows"], w["d"], w["layers"]): case for case in cases if (w := case.workload)}

    def cell(rows: int, d: int, layers: int) -> str:
        case = found.get((rows, d, layers))
        if case is None:
            return ""
        return times(case.ratio(EAGER.name, OURS.name).middle) if case.has(EAGER) else case.missing.get(EAGER.name, "")

    header = ["d, L", *(f"B = {rows}" for rows in batches)]
    return markdown(header, [[f"{d}, {layers}", *(cell(rows, d, layers) for rows in batches)] for d, layers in shapes])


def static_table(rows: Sequence[dict[str, Any]]) -> str:
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "target": lambda row: f"{row['target']} ({row['chip']})",
        "operator": lambda row: row["operator"],
        "dtype": lambda row: row["dtype"],
        "registers": lambda row: row["registers"],
        "spills": lambda row: row["spills"],
        "occupancy": lambda row: f"{row['occupancy']:.0%}",
        "word": lambda row: f"{row['word']} bit",
        "bytes per row / floor": lambda row: row["bytes/row"] + (f" ({row['wrong']})" if row["wrong"] else ""),
        "estimate": lambda row: duration(row["estimated_seconds"]),
    }
    return markdown([*columns], [[cell(row) for cell in columns.values()] for row in rows])


def suite_tables(suite: Suite) -> str:
    if suite.rows:
        return static_table(suite.rows)
    if suite.registered.grid:
        return grid_table(suite.cases)
    return "\n\n".join(case_table(case) for case in suite.cases)


def provenance(suite: Suite) -> str:
    """What made a table."""
    on = suite.machine
    where = f"{on['gpu']}, " if "gpu" in on else ""
    where += f"{on['processor']}, {on['cores']} cores, {on['threads']} threads, {on['memory']}"
    runs = "one run" if suite.runs == 1 else f"{suite.runs} runs"
    return f"`{suite.command}`, {runs}; {where}; " + ", ".join(f"{name} {v}" for name, v in suite.versions.items())
