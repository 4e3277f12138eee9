"""Higgs of section 4.5, in UCI's format: the label first, then 28 standardised features."""

from __future__ import annotations

from fastcross.data.blocks import is_number
from fastcross.data.columns import Columns, numbered
from fastcross.data.formats.table import Head
from fastcross.data.formats.text import Dialect, FixedText

FEATURES = numbered("feature", 28)


def recognises(head: Head) -> bool:
    fields = head.line.split(",")
    return len(fields) == 29 and fields[0][:1] in "01" and all(map(is_number, fields))


FORMAT = FixedText(
    "higgs",
    Dialect(("label", *FEATURES), quote=None),
    Columns("label", FEATURES, (), (), classes=("0", "1"), transform="standard"),
    recognises,
)
