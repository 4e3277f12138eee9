"""What is known of a training once it is over, as JSON: of a trial in a study, or of a run by itself."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from fastcross.files import read_checked_json, write_checked_json
from fastcross.training.run_folder import Run

STATES = ("complete", "pruned", "diverged")


@dataclass(frozen=True)
class Record:
    """One training.

    name: by which a person finds it again; parameters: what a search chose; options, training: all of the setting, with
    the training's seed in its own field; validation, test: metrics of the best weights (of a pruned trial: validation,
    as far as it came); dense_parameters: without embeddings, as the paper counts; steps: of training; seconds: of these
    steps; total_seconds: of everything from the choice of the parameters to this record.
    """

    name: str
    model: str
    state: str
    seed: int
    parameters: Mapping[str, Any]
    options: Mapping[str, Any]
    training: Mapping[str, Any]
    steps: int = 0
    seconds: float = 0.0
    total_seconds: float | None = None
    parameter_count: int | None = None
    dense_parameters: int | None = None
    validation: Mapping[str, float] = field(default_factory=dict)
    test: Mapping[str, float] = field(default_factory=dict)
    history: Sequence[Mapping[str, float]] = ()

    @property
    def setting(self) -> str:
        """The same for runs that differ in nothing but their seed."""
        return json.dumps([self.model, self.options, self.training], sort_keys=True)

    @property
    def deep(self) -> tuple[int, int] | None:
        """(layers, nodes) of a deep network whose layers are all of one size."""
        sizes: Sequence[int] = self.options.get("deep_layers") or ()
        return (len(sizes), sizes[0]) if len(set(sizes)) == 1 else None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def from_run(folder: Path | str, **known: Any) -> Record:
    """The record of a finished run folder; ``known`` is what the folder does not say."""
    run = Run(folder)
    config, result = run.config, run.result
    if result is None:
        raise ValueError(f"the run {folder} is not finished; it can be resumed: fastcross train --resume {folder}")
    training = dict(config["training"])
    facts = {
        "name": Path(folder).name,
        "model": config["model"],
        "state": "complete",
        "seed": training.pop("seed", 0),
        "parameters": {},
        "options": config["options"],
        "training": training,
        "steps": result["steps"],
        "seconds": result["seconds"],
        "parameter_count": result["parameters"],
        "dense_parameters": result["dense_parameters"],
        "validation": result.get("validation", {}),
        "test": result.get("test", {}),
        "history": brief(run.history),
    }
    return Record(**{**facts, **known})


def brief(history: Iterable[Mapping[str, float]]) -> list[dict[str, float]]:
    """Of each evaluation the step and the validation logloss."""
    return [
        {"step": row["step"], "logloss": row["validation_logloss"]} for row in history if "validation_logloss" in row
    ]


def finished_runs(folders: Iterable[Path | str]) -> tuple[list[Record], list[str]]:
    """The records of those runs that are finished, and the names of those that are not."""
    records, unfinished = [], []
    for folder in sorted(str(folder) for folder in folders):
        if Run(folder).result is None:
            unfinished.append(folder)
        else:
            records.append(from_run(folder))
    return records, unfinished


def write_record(path: Path, record: Record) -> None:
    write_checked_json(path, record.to_dict())


def read_record(path: Path) -> Record:
    return record_from(read_checked_json(path), path)


def record_from(content: Mapping[str, Any], path: Path | str) -> Record:
    names = {entry.name for entry in fields(Record)}
    try:
        record = Record(**{name: value for name, value in content.items() if name in names})
    except TypeError as error:
        raise ValueError(f"{path} holds no record of a training: {error}") from None
    if record.state not in STATES:
        raise ValueError(
            f"{path} holds no record of a training: its state must be one of {STATES}; got {record.state!r}"
        )
    return record
