"""What the tests of the command line share."""

import json
from pathlib import Path

SMALL = ["--embedding-dim", "4", "--deep-layers", "8", "--batch-size", "128", "--epochs", "1", "--threads", "1"]
BAD_ROWS = {
    "columns": (lambda line: line.rsplit(b"\t", 3)[0], "expected 40 columns, got 37"),
    "integer": (lambda line: line.replace(b"\t", b"\tseven", 1), "seven"),
    "utf8": (lambda line: line[:-3] + b"\xff\xfe\xfd", "UTF"),
    "label": (lambda line: b"2" + line[1:], "label"),
}


def read(path):
    return json.loads(Path(path).read_text())


def edited(log, number, edit):
    """The log with line ``number`` (from 1) changed."""
    lines = log.read_bytes().split(b"\n")
    lines[number - 1] = edit(lines[number - 1])
    return b"\n".join(lines)
