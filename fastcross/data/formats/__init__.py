"""The formats that can be read. A new one is a file in this folder with FORMAT, and one line in FORMATS.

FORMAT says whether a file is of this format, and opens one; reading.py says in which terms (Format, Table). A text
whose columns are known is a FixedText, as text.py has four. This module imports none of them, so that the command line
learns their names without pyarrow.
"""

# Where each is, in the order in which they are asked whether a file is theirs; csv, the last, takes what is left.
FORMATS = {
    "parquet": "parquet.FORMAT",
    "criteo": "text.CRITEO",
    "adult": "text.ADULT",
    "covertype": "text.COVERTYPE",
    "higgs": "text.HIGGS",
    "csv": "text.CSV",
}
