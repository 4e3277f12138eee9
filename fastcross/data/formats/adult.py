"""Adult, in UCI's format: six numbers and eight categories.

The two sums of money are log-transformed, the other numbers standardised; `?` is missing. The test file begins
with a comment and ends its labels with a dot.
"""

from __future__ import annotations

from fastcross.data.columns import Columns
from fastcross.data.formats.table import Head
from fastcross.data.formats.text import Dialect, FixedText

KINDS = {  # in the order of the file
    "age": "dense",
    "workclass": "categorical",
    "fnlwgt": "dense",
    "education": "categorical",
    "education-num": "dense",
    "marital-status": "categorical",
    "occupation": "categorical",
    "relationship": "categorical",
    "race": "categorical",
    "sex": "categorical",
    "capital-gain": "dense",
    "capital-loss": "dense",
    "hours-per-week": "dense",
    "native-country": "categorical",
}
DENSE = tuple(name for name, kind in KINDS.items() if kind == "dense")


def recognises(head: Head) -> bool:
    fields = head.line.split(",")
    return head.line.startswith("|1x3") or (
        len(fields) in (14, 15) and fields[0].isdigit() and fields[1].startswith(" ")
    )


FORMAT = FixedText(
    "adult",
    Dialect((*KINDS, "income"), quote=None, missing=("?", ""), trim=True, first_line="|"),
    Columns(
        "income",
        DENSE,
        tuple(name for name, kind in KINDS.items() if kind == "categorical"),
        (),
        classes=("<=50K", ">50K"),
        aliases={"<=50K.": "<=50K", ">50K.": ">50K"},
        transform=tuple("log" if name.startswith("capital") else "standard" for name in DENSE),
        integers=True,
    ),
    recognises,
)
