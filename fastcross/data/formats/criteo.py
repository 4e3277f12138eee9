"""Criteo's click logs: label, 13 integers, 26 hexadecimal strings; tab-separated, no header, empty = missing.

Section 4.2: the integers are normalised by a log transform. Some of them are negative, where the paper says nothing;
here sign(x) · log(1 + |x|) is used, which is odd, monotone and finite everywhere. A missing integer becomes 0, the
value the transform gives to a count of none; a missing category is a category of its own.
"""

from __future__ import annotations

from fastcross.data.columns import Columns, numbered
from fastcross.data.formats.table import Head
from fastcross.data.formats.text import Dialect, FixedText

INTEGERS = numbered("I", 13)
CATEGORIES = numbered("C", 26)


def recognises(head: Head) -> bool:
    return head.line.count("\t") in (38, 39) and not head.line.startswith(("label", "C1"))


FORMAT = FixedText(
    "criteo",
    Dialect(names=("label", *INTEGERS, *CATEGORIES), delimiter="\t", quote=None),
    Columns("label", INTEGERS, CATEGORIES, (), classes=("0", "1"), transform="log", integers=True),
    recognises,
)
