"""The measurements as one JSON file per device: each group with its machine, versions and command."""

import json
import os
import re
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Refused

FOLDER = Path(__file__).parent / "results"


def path(folder: Path = FOLDER) -> Path:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return folder / f"{re.sub(r'[^a-z0-9]+', '-', name.lower())}.json"


def load(file: Path) -> dict[str, Any]:
    """The groups by name. A contestant without its verification is refused: nobody knows what was timed."""
    groups = json.loads(file.read_text())
    for group in groups.values():
        for case in group["cases"]:
            for name, record in case.get("contestants", {}).items():
                if not record.get("errors"):
                    raise Refused(f"{file}: {name} on {case['workload']['title']} has a time and was not verified")
    return groups


def save(file: Path, groups: dict[str, Any]) -> None:
    """Replaces the groups that were measured, and leaves the others."""
    file.parent.mkdir(parents=True, exist_ok=True)
    merged = (json.loads(file.read_text()) if file.exists() else {}) | groups
    for group in groups.values():
        for case in group["cases"]:
            for record in case.get("contestants", {}).values():
                record.pop("times", None)  # the percentiles stay
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(merged, indent=1) + "\n")
    os.replace(temporary, file)
