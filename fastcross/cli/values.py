"""The values of options, from the text a user typed; what cannot be read is an error that says what could."""

import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

from fastcross.models import MODELS


def names(text: str) -> list[str]:
    """a,b,c"""
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise ArgumentTypeError(f"expected names with commas between them, as in a,b; got {text!r}")
    if twice := [name for name in found if found.count(name) > 1]:
        raise ArgumentTypeError(f"{twice[0]} is named twice in {text!r}")
    return found


def run_folder(text: str) -> str:
    """A run, by its folder or the checkpoint in it."""
    path = Path(text)
    if not path.exists():
        raise ArgumentTypeError(f"there is no {text}")
    if path.is_file() and path.suffix != ".safetensors":
        raise ArgumentTypeError(f"expected a run folder, or the best.safetensors in it; got the file {text}")
    return text


LARGEST = 2**31 - 1  # of any number of things


def at_least(smallest: int, largest: int = LARGEST) -> Callable[[str], int]:
    """A whole number that is not below ``smallest``."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise ArgumentTypeError(f"expected a whole number; got {text!r}") from None
        if number < smallest:
            raise ArgumentTypeError(f"must be at least {smallest}; got {number}")
        if number > largest:
            raise ArgumentTypeError(f"must be at most {largest}; got {number}")
        return number

    return parse


def integers(text: str) -> list[int]:
    """0,1,2"""
    try:
        return [int(number) for number in names(text)]
    except ValueError:
        raise ArgumentTypeError(f"expected whole numbers with commas between them, as in 0,1,2; got {text!r}") from None


def auto_crosses(text: str) -> int:
    """auto or auto:N: how many crosses; by default as many as the paper's logistic regression had."""
    match = re.fullmatch(r"auto(?::(\d+))?", text)
    if not match or (match[1] and not int(match[1])):
        raise ArgumentTypeError(f"expected auto or auto:N with N at least 1 (--cross A,B names one); got {text!r}")
    return int(match[1] or 42)


def duration(text: str) -> float:
    """2h, 30m, 90s, 1h30m: in seconds."""
    match = re.fullmatch(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?", text)
    seconds = (
        sum(float(part or 0) * unit for part, unit in zip(match.groups(), (3600, 60, 1), strict=True)) if match else 0
    )
    if not seconds:
        raise ArgumentTypeError(f"expected a time as in 2h, 30m, 90s or 1h30m; got {text!r}")
    return seconds


def model_names(text: str) -> list[str]:
    """Names of models."""
    found = names(text)
    if unknown := [name for name in found if name not in MODELS]:
        raise ArgumentTypeError(f"there is no model {unknown[0]!r}; there are {', '.join(MODELS)}")
    return found


def layers(text: str) -> list[int]:
    """1024,1024 or 292x6; 0 for no layers."""
    sizes: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:x(\d+))?", part.strip())
        if not match:
            raise ArgumentTypeError(f"expected layer sizes as in 1024,1024 or 292x6, or 0 for none; got {text!r}")
        size, times = int(match[1]), int(match[2] or 1)
        if max(size, times) > LARGEST or (not size * times and text.strip() != "0"):
            raise ArgumentTypeError(f"expected layer sizes as in 1024,1024 or 292x6, or 0 for none; got {text!r}")
        sizes += [size] * times
    return [size for size in sizes if size]


def multi_valued(text: str) -> tuple[str, str]:
    """genres:| is the column genres, with | between its values; genres alone is the same."""
    name, colon, separator = text.partition(":")
    if not name or (colon and not separator):
        raise ArgumentTypeError(f"expected a column and its separator as in genres:|; got {text!r}")
    return name, separator or "|"
