"""Covertype of section 4.5, in UCI's format: 54 dense features, fed to the cross network directly.

Ten numbers are standardised, 44 flags (wilderness areas and soil types) stay as they are; the label is 1 … 7.
"""

from __future__ import annotations

from fastcross.data.columns import Columns, numbered
from fastcross.data.formats.table import Head
from fastcross.data.formats.text import Dialect, FixedText

NUMBERS = (
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
FLAGS = (*numbered("Wilderness_Area", 4), *numbered("Soil_Type", 40))


def recognises(head: Head) -> bool:
    fields = head.line.split(",")
    return head.line.startswith("Elevation,") or (
        len(fields) in (54, 55) and all(field.lstrip("-").isdigit() for field in fields)
    )


FORMAT = FixedText(
    "covertype",
    Dialect((*NUMBERS, *FLAGS, "Cover_Type"), quote=None, first_line="Elevation,"),
    Columns(
        "Cover_Type",
        NUMBERS + FLAGS,
        (),
        (),
        classes=numbered("", 7),
        transform=("standard",) * len(NUMBERS) + ("none",) * len(FLAGS),
        integers=True,
    ),
    recognises,
)
