"""What is wrong with a user's data: one error to stop with, one list to skip with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

EXAMPLES = 10  # shown in a report


class DataError(ValueError):
    """The input cannot be used as it is; the message names the file and, where there is one, the line."""


class BadRow(Exception):
    """Somewhere among the rows being converted is a bad one; the reader narrows it down and reports the place."""


@dataclass
class Problems:
    """Bad rows met so far: the first one raises (on_error="stop"), or each is counted (on_error="skip").

    truncated: one message for each file that breaks off, whose rest is lost however many rows that was.
    """

    on_error: str = "stop"
    places: list[tuple[str, int]] = field(default_factory=list)  # file, line (row for Parquet), each from 1
    examples: list[str] = field(default_factory=list)
    truncated: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.on_error not in ("stop", "skip"):
            raise ValueError(f'on_error must be "stop" or "skip"; got {self.on_error!r}')

    def add(self, path: Path, line: int, reason: str, *, unit: str = "line") -> None:
        message = f"{path}, {unit} {line}: {reason}"
        if self.on_error == "stop":
            raise DataError(message)
        self.places.append((str(path), line))
        if len(self.examples) < EXAMPLES:
            self.examples.append(message)

    def truncate(self, path: Path, line: int, reason: str) -> None:
        """The unfinished row counts as a bad one; what came after it nobody can count."""
        self.add(path, line, reason)
        self.truncated.append(f"{path}, line {line}: {reason}")

    def extend(self, other: Problems) -> None:
        self.places += other.places
        self.truncated += other.truncated
        self.examples += other.examples[: EXAMPLES - len(self.examples)]

    def __len__(self) -> int:
        return len(self.places)

    def __str__(self) -> str:
        if not self.places:
            return "no rows skipped"
        more = f"\n  … and {len(self) - len(self.examples)} more" if len(self) > len(self.examples) else ""
        return f"{len(self)} rows skipped:\n  " + "\n  ".join(self.examples) + more
