"""Numbers as people write them: $1,200, 12 %, 3,5, 1.234,50 €, (80). A column is read so if all of it fits one way.

In "1,200" the comma stands between thousands unless another value of the column tells that it is the decimal mark. The
unit is dropped; columns with several ("$5" and "€5") are no numbers.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

SYMBOLS = "$€£¥₹₩%"
SPACES = " \u00a0\u202f"
GROUPS = {".": f"[,'’{SPACES}]", ",": f"[.'’{SPACES}]"}  # by the decimal mark: what stands between thousands


def _pattern(mark: str) -> str:
    number = rf"(?:(?:[1-9]\d{{0,2}}(?:{GROUPS[mark]}\d{{3}})+|\d+)(?:[{mark}]\d*)?|[{mark}]\d+)"
    unit = rf"[{SPACES}]*[{SYMBOLS}]?[{SPACES}]*"
    return rf"^[{SPACES}]*(?:[+−-]?{unit}[+−-]?{number}{unit}|\({unit}{number}{unit}\))[{SPACES}]*$"


PATTERNS = {mark: _pattern(mark) for mark in ".,"}


def decimal_mark(texts: pa.Array) -> str | None:
    """The decimal mark of numbers that are written so; None for other texts, and for plain numbers."""
    found = "".join(texts.to_pylist())
    if not len(texts) or len({symbol for symbol in SYMBOLS if symbol in found}) > 1:
        return None
    has_unit = any(symbol in found for symbol in SYMBOLS)
    for mark, others in ((".", ",."), (",", ",")):
        if (has_unit or any(other in found for other in others)) and _fits(texts, mark):
            return mark
    return None


def to_plain(column: pa.ChunkedArray, mark: str) -> pa.ChunkedArray:
    """Numbers as Arrow reads them; an ArrowInvalid where a value is not written as those of its column."""
    values = pc.drop_null(column)
    if not _fits(values, mark):
        wrong = values.filter(pc.invert(pc.match_substring_regex(values, PATTERNS[mark])))[0].as_py()
        raise pa.ArrowInvalid(f"not a number: {wrong!r}")
    column = pc.replace_substring_regex(column, r"^\s*\((.*)\)\s*$", r"-\1")
    column = pc.replace_substring_regex(column, rf"[{SYMBOLS}{SPACES}'’{',' if mark == '.' else '.'}]", "")
    return pc.replace_substring(pc.replace_substring(column, "−", "-"), mark, ".")


def _fits(texts: pa.Array | pa.ChunkedArray, mark: str) -> bool:
    return pc.all(pc.match_substring_regex(texts, PATTERNS[mark]), min_count=0).as_py()
