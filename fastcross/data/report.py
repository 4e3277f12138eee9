"""What `prepare` made of a file, as text: what each column was taken for and why, the label, the split, warnings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastcross.data.split import PARTS

SHOWN = 40  # columns one by one; of wider tables only the names by kind


def describe(manifest: dict[str, Any]) -> str:
    return "\n".join(_lines(manifest))


def _lines(manifest: dict[str, Any]) -> Iterator[str]:
    findings, schema = manifest["findings"], manifest["schema"]
    if not findings:
        yield f"columns: those of the format {manifest['configuration']['format']}"
    elif len(findings) <= SHOWN:
        sizes = dict(zip(schema["categorical_names"], schema["cardinalities"], strict=True))
        sizes |= dict(zip(schema["bag_names"], schema["bag_cardinalities"], strict=True))
        width = max(len(found["column"]) for found in findings)
        yield f"columns, by {manifest['looked_at']}:"
        for found in findings:
            ids = f" ({sizes[found['column']]:,} ids)" if found["column"] in sizes else ""
            yield f"  {found['column']:{width}}  {found['kind']:12} {found['why']}{ids}"
    else:
        for kind in dict.fromkeys(found["kind"] for found in findings):
            names = [found["column"] for found in findings if found["kind"] == kind]
            yield f"{kind} columns ({len(names)}): {', '.join(names)}"
    label = manifest["label"]
    if schema["task"] == "regression":
        spread = f"mean {label['mean']:.6g}, standard deviation {label['deviation']:.6g} over the training rows"
        yield f"label {label['column']}: a quantity (regression), {spread}"
    else:
        yield _classes(label)
    if weight := manifest.get("weight"):
        yield f"weight {weight['column']}: mean {weight['mean']:.6g} over the training rows"
    sizes_of_parts = ", ".join(f"{part} {manifest['sizes'][part]:,}" for part in PARTS)
    yield f"split {manifest['split']}; rows: {sizes_of_parts}"
    for found in findings:
        if found["warning"]:
            yield f"warning: column {found['column']} ({found['kind']}): {found['warning']}"
    for part, counts in zip(PARTS, label["rows"], strict=True):
        if len(counts) > 1 and sum(counts) and sum(count > 0 for count in counts) < 2:
            only = label["classes"][next(i for i, count in enumerate(counts) if count)]
            yield f"warning: every row of the {part} part has the label {only}: no AUC can be had from it"
    for message in manifest["skipped"]["truncated"]:
        yield f"warning: {message}"


def _classes(label: dict[str, Any]) -> str:
    totals = [sum(counts) for counts in zip(*label["rows"], strict=True)]
    shown = [f"{name} is {i} ({n:,} rows)" for i, (name, n) in enumerate(zip(label["classes"], totals, strict=True))]
    more = f", … {len(shown) - 10} more" if len(shown) > 10 else ""
    return f"label {label['column']}: {', '.join(shown[:10])}{more}"
