"""Where a command writes is checked before it works: an error after minutes of prediction helps nobody."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

RUN_FILES = ("config.json", "result.json", "metrics.csv", "encoder/encoder.json")


def check_output(output: str | Path, suffixes: Sequence[str], run: str | Path) -> Path:
    """The path to write to; a ValueError where that cannot be done, or would overwrite a file of the run."""
    path = Path(output)
    if path.suffix not in suffixes:
        raise ValueError(f"the output must end in {' or '.join(suffixes)}; got {path.name}")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} to write {path.name} to")
    if path.is_dir():
        raise ValueError(f"the output must be a file; {path} is a folder")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ValueError(f"the folder {path.parent} cannot be written to")
    refuse_overwriting(path, (Path(run) / name for name in RUN_FILES))
    return path


def refuse_overwriting(output: Path, inputs: Iterable[str | Path]) -> None:
    """Raise where the output is one of the inputs, be it by another name or link."""
    for file in inputs:
        if output.exists() and Path(file).exists() and output.samefile(file):
            raise ValueError(f"the output {output} would overwrite {file}, which is read; choose another file")
