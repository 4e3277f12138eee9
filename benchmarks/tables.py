"""The measurements as Markdown: one table per workload, the grid as one table, and the README's summary."""

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.contestants import COPY, EAGER, OURS, PEER_CLASSES
from benchmarks.models import DNN

# What ratios are taken to, where they take part.
BASES = (EAGER, COPY, OURS, DNN, f"{OURS}, L = 1", f"{EAGER}, L = 1", f"{OURS}, 1000 ids")


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


def faster(ratio: dict[str, float] | None) -> str:
    """A ratio of times, taken to the base, as the factor by which the contestant is faster than the base."""
    return "" if ratio is None else times(1 / ratio["p50"])


def spread(ratio: dict[str, float]) -> str:
    return f"{ratio['p50']:.3g}× ({ratio['p20']:.3g} to {ratio['p80']:.3g})"


def best_peer(case: dict[str, Any]) -> str | None:
    """The fastest of the peers that took part."""
    peers = [name for name in case["contestants"] if name in PEER_CLASSES]
    return min(peers, key=lambda name: case["contestants"][name]["seconds"]["p50"], default=None)


def case_table(case: dict[str, Any]) -> str:
    """Every contestant of one workload; columns that none of them has are left out."""
    peer = best_peer(case)
    peer_time = case["contestants"][peer]["seconds"]["p50"] if peer else None
    header = [
        "",
        "p50",
        "p20 to p80",
        "p99",
        "× eager",
        "× best peer",
        "× DNN's time",
        "copies of x0",
        "GB/s",
        "kept",
        "peak",
    ]
    rows = []
    for name, record in case["contestants"].items():
        seconds, ratio_to, floor = record["seconds"], record["ratio_to"], name == COPY
        copies = ratio_to.get(COPY)
        rows.append(
            [
                name,
                duration(seconds["p50"]),
                f"{duration(seconds['p20'])} to {duration(seconds['p80'])}",
                duration(seconds["p99"]) if "p99" in seconds else "",
                "" if floor else faster(ratio_to.get(EAGER)),
                "" if floor or peer_time is None else times(peer_time / seconds["p50"]),
                f"{ratio_to[DNN]['p50']:.3f}" if DNN in ratio_to else "",
                f"{copies['p50']:.3g}" if copies else "",
                "" if floor or "gigabytes_per_second" not in record else f"{record['gigabytes_per_second']:.3g}",
                size(record.get("kept_bytes")),
                size(record.get("peak_bytes")),
            ]
        )
    rows += [[name, "missing", *[""] * (len(header) - 2)] for name in case["missing"]]
    used = [i for i in range(len(header)) if i == 0 or any(row[i] for row in rows)]
    table = markdown([header[i] for i in used], [[row[i] for i in used] for row in rows])
    notes = [f"{name}: {reason}." for name, reason in case["missing"].items()]
    if "floor_copies" in case["workload"] and COPY in case["contestants"]:
        notes.append(f"The floor is {case['workload']['floor_copies']:g} copies.")
    return "\n\n".join([f"**{case['workload']['title']}**", table, *notes])


def grid_table(cases: Sequence[dict[str, Any]]) -> str:
    """How many times as fast as the eager loop fastcross is, rows against shapes."""
    batches = sorted({case["workload"]["rows"] for case in cases})
    shapes = sorted({(case["workload"]["d"], case["workload"]["layers"]) for case in cases})
    found = {(w["rows"], w["d"], w["layers"]): case for case in cases if (w := case["workload"])}

    def cell(rows: int, d: int, layers: int) -> str:
        case = found.get((rows, d, layers))
        if case is None:
            return ""
        if EAGER not in case["contestants"]:
            return case["missing"].get(EAGER, "")
        return times(case["contestants"][EAGER]["ratio_to"][OURS]["p50"])

    header = ["d, L", *(f"B = {rows}" for rows in batches)]
    return markdown(header, [[f"{d}, {layers}", *(cell(rows, d, layers) for rows in batches)] for d, layers in shapes])


def static_table(rows: Sequence[dict[str, Any]]) -> str:
    header = [
        "target",
        "operator",
        "dtype",
        "registers",
        "spills",
        "occupancy",
        "word",
        "bytes per row / floor",
        "estimate",
    ]
    return markdown(
        header,
        [
            [
                f"{row['target']} ({row['chip']})",
                row["operator"],
                row["dtype"],
                *(row[key] for key in ("registers", "spills")),
                f"{row['occupancy']:.0%}",
                f"{row['word']} bit",
                row["bytes/row"] + (f" ({row['wrong']})" if row["wrong"] else ""),
                duration(row["estimated_seconds"]),
            ]
            for row in rows
        ],
    )


def group_tables(group: dict[str, Any]) -> str:
    cases = group["cases"]
    if "rows" in cases[0]:
        return static_table(cases[0]["rows"])
    if group["title"].startswith("Grid"):
        return grid_table(cases)
    return "\n\n".join(case_table(case) for case in cases)


def provenance(group: dict[str, Any]) -> str:
    """What made a table."""
    on, versions = group["machine"], group["versions"]
    where = f"{on['gpu']}, " if "gpu" in on else ""
    where += f"{on['processor']}, {on['cores']} cores, {on['threads']} threads, {on['memory']}"
    return f"`{group['command']}`; {where}; " + ", ".join(f"{name} {version}" for name, version in versions.items())
