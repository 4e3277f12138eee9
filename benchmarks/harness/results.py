"""A run's measurements as one JSON file: every sample of every contestant, each suite with its machine and versions.

The committed runs are results/DEVICE/run-1.json, run-2.json, …: the report is made from them alone.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.measure import Refused

FOLDER = Path(__file__).parents[1] / "results"
Run = dict[str, Any]  # suites by name


def folder(root: Path = FOLDER) -> Path:
    """This device's."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return root / re.sub(r"[^a-z0-9]+", "-", name.lower())


def path(run: int | None) -> Path:
    """The file of a numbered run; without a number the one of the last try, which is not committed."""
    return folder() / ("last.json" if run is None else f"run-{run}.json")


def runs(where: Path) -> list[Path]:
    return sorted(where.glob("run-*.json"))


def load(file: Path) -> Run:
    """A contestant without its verification is refused: nobody knows what was timed."""
    suites = json.loads(file.read_text())
    for suite in suites.values():
        for case in suite["cases"]:
            for name, record in case.get("contestants", {}).items():
                if not record.get("errors"):
                    raise Refused(f"{file}: {name} on {case['workload']['title']} has a time and was not verified")
    return suites


def save(file: Path, suites: Run) -> None:
    """Replaces the suites that were measured, and leaves the others. One line per contestant: changes can be read."""
    file.parent.mkdir(parents=True, exist_ok=True)
    merged = (json.loads(file.read_text()) if file.exists() else {}) | suites
    temporary = file.with_suffix(".tmp")
    temporary.write_text(_lines(merged, depth=5) + "\n")
    os.replace(temporary, file)


def _lines(value: Any, depth: int) -> str:
    """JSON, a line for each item of the ``depth`` outer levels."""
    if depth == 0 or not isinstance(value, dict | list) or not value:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if isinstance(value, list):
        return "[\n" + ",\n".join(_lines(item, depth - 1) for item in value) + "\n]"
    return "{\n" + ",\n".join(f"{json.dumps(key)}:{_lines(item, depth - 1)}" for key, item in value.items()) + "\n}"
