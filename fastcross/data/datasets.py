"""Data sets with a reader of their own: covertype and Higgs of section 4.5, and Adult, all in UCI's formats."""

from __future__ import annotations

from fastcross.data.columns import Columns, Dialect, numbered
from fastcross.data.table import TextTable

COVERTYPE_NUMBERS = (
    "Elevation",
    "Aspect",
    "Slope",
    "Horizontal_Distance_To_Hydrology",
    "Vertical_Distance_To_Hydrology",
    "Horizontal_Distance_To_Roadways",
    "Hillshade_9am",
    "Hillshade_Noon",
    "Hillshade_3pm",
    "Horizontal_Distance_To_Fire_Points",
)
COVERTYPE_FLAGS = (*numbered("Wilderness_Area", 4), *numbered("Soil_Type", 40))
ADULT_KINDS = {  # in the order of the file
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


def covertype_table() -> TextTable:
    """54 dense features, fed to the cross network directly: ten numbers standardised, 44 flags as they are."""
    features = COVERTYPE_NUMBERS + COVERTYPE_FLAGS
    transforms = ("standard",) * len(COVERTYPE_NUMBERS) + ("none",) * len(COVERTYPE_FLAGS)
    columns = Columns("Cover_Type", features, (), (), classes=numbered("", 7), transform=transforms, integers=True)
    return TextTable(Dialect((*features, "Cover_Type"), quote=None, first_line="Elevation,"), columns)


def higgs_table() -> TextTable:
    """The label first, then 28 standardised features."""
    features = numbered("feature", 28)
    return TextTable(
        Dialect(("label", *features), quote=None), Columns("label", features, (), (), transform="standard")
    )


def adult_table() -> TextTable:
    """Six numbers (the two sums of money log-transformed, the others standardised), eight categories; `?` is missing.

    The test file begins with a comment and ends its labels with a dot.
    """
    dense = tuple(name for name, kind in ADULT_KINDS.items() if kind == "dense")
    categorical = tuple(name for name, kind in ADULT_KINDS.items() if kind == "categorical")
    transforms = tuple("log" if name.startswith("capital") else "standard" for name in dense)
    columns = Columns(
        "income",
        dense,
        categorical,
        (),
        classes=("<=50K", ">50K"),
        aliases={"<=50K.": "<=50K", ">50K.": ">50K"},
        transform=transforms,
        integers=True,
    )
    dialect = Dialect((*ADULT_KINDS, "income"), quote=None, missing=("?", ""), trim=True, first_line="|")
    return TextTable(dialect, columns)
