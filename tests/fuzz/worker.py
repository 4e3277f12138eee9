"""One process that runs the cases of one suite, number after number, and writes down what it did.

``current`` holds the number of the case that runs, written before it starts, so that a crash can be blamed on it.
``log`` gets a line of JSON for each failure, and every second one with the counts since the last.
"""

import collections
import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path

SUITES = {
    "operators": "fuzz.operators",
    "sidedoors": "fuzz.sidedoors",
    "embedding": "fuzz.embedding",
    "optimiser": "fuzz.optimiser",
    "swap": "fuzz.swaps",
    "bytes": "fuzz.damage",
    "kill": "fuzz.kills",
}


def suite(name):
    return importlib.import_module(SUITES.get(name, name))


def prepare(name, folder):
    """What all workers of a suite share, made once."""
    make = getattr(suite(name), "prepare", None)
    if make is not None:
        make(folder)


def replay(cases, folder):
    name, _, numbers = cases.partition(":")
    first, _, last = numbers.partition("-")
    faulthandler.enable()
    prepare(name, folder)
    failed = 0
    for number in range(int(first), int(last or first) + 1):
        try:
            print(f"{name}:{number} {suite(name).case(number, folder)}", flush=True)
        except Exception:
            failed += 1
            print(f"{name}:{number} FAILED", flush=True)
            traceback.print_exc()
    return 1 if failed else 0


def work(name, first, seconds, folder, log):
    """Runs the cases first, first + 1, … for so many seconds."""
    faulthandler.enable()
    prepare(name, folder)
    case = suite(name).case
    current = os.open(log.with_suffix(".current"), os.O_WRONLY | os.O_CREAT)
    done, told, end = collections.Counter(), time.monotonic(), None
    with open(log, "a", buffering=1) as file:
        number = first
        while end is None or time.monotonic() < end:
            if (now := time.monotonic()) - told > 1:
                file.write(json.dumps({"done": done}) + "\n")
                done, told = collections.Counter(), now
            os.pwrite(current, f"{number:<20}".encode(), 0)
            try:
                done[case(number, folder)] += 1
            except Exception as error:
                done["failed"] += 1
                said = traceback.format_exc()
                file.write(json.dumps({"failure": number, "error": _headline(error), "traceback": said}) + "\n")
            number += 1
            if end is None:
                end = time.monotonic() + seconds  # the first case may have compiled the kernels
        file.write(json.dumps({"done": done, "next": number}) + "\n")


def _headline(error):
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


if __name__ == "__main__":
    name, first, seconds, folder, log = sys.argv[1:]
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    work(name, int(first), float(seconds), Path(folder), Path(log))
