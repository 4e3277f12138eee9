"""Criteo's click logs: label, 13 integers, 26 hexadecimal strings; tab-separated, no header, empty = missing.

Section 4.2: the integers are normalised by a log transform. Some of them are negative, where the paper says nothing;
here sign(x) · log(1 + |x|) is used, which is odd, monotone and finite everywhere. A missing integer becomes 0, the
value the transform gives to a count of none; a missing category is a category of its own.
"""

from __future__ import annotations

from fastcross.data.columns import Columns, Dialect, numbered
from fastcross.data.table import TextTable

INTEGERS = numbered("I", 13)
CATEGORIES = numbered("C", 26)


def criteo_table() -> TextTable:
    dialect = Dialect(names=("label", *INTEGERS, *CATEGORIES), delimiter="\t", quote=None)
    columns = Columns("label", INTEGERS, CATEGORIES, (), transform="log", integers=True)
    return TextTable(dialect, columns)
