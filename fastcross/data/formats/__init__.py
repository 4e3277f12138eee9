"""The formats that can be read. A new one is a file in this folder and its name in FORMATS.

The file offers FORMAT: whether a file is of this format, and how one is opened (formats/table.py says in which terms).
This module imports none of them, so that the command line learns their names without pyarrow.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastcross.data.formats.table import Format

# In the order in which they are asked whether a file is theirs; csv, the last, takes what is left.
FORMATS = ("parquet", "criteo", "adult", "covertype", "higgs", "csv")


def get_format(name: str) -> Format:
    if name not in FORMATS:
        raise ValueError(f"format must be one of auto, {', '.join(FORMATS)}; got {name!r}")
    return import_module(f"fastcross.data.formats.{name}").FORMAT


def detect_format(path: Path) -> str:
    """The name of the first format that recognises the file by its beginning."""
    from fastcross.data.formats.table import Head

    head = Head.read(path)
    return next(name for name in FORMATS if get_format(name).recognises(head))
