"""The formats that can be read. A new one is a file in this folder with FORMAT, and one line in FORMATS.

FORMAT says whether a file is of this format, and opens one; reading.py says in which terms (Format, Table). A text
whose columns are known is a FixedText, as text.py has four. This module imports none of them, so that the command line
learns their names without pyarrow.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastcross.data.formats.reading import Format

# Where each is, in the order in which they are asked whether a file is theirs; csv, the last, takes what is left.
FORMATS = {
    "parquet": "parquet.FORMAT",
    "criteo": "text.CRITEO",
    "adult": "text.ADULT",
    "covertype": "text.COVERTYPE",
    "higgs": "text.HIGGS",
    "csv": "text.CSV",
}


def get_format(name: str) -> Format:
    if name not in FORMATS:
        raise ValueError(f"format must be one of auto, {', '.join(FORMATS)}; got {name!r}")
    module, _, variable = FORMATS[name].partition(".")
    return getattr(import_module(f"fastcross.data.formats.{module}"), variable)


def detect_format(path: Path) -> str:
    """The name of the first format that recognises the file by its beginning."""
    from fastcross.data.formats.reading import Head

    head = Head.read(path)
    return next(name for name in FORMATS if get_format(name).recognises(head))
