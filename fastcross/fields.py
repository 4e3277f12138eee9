"""Checks that each field of a configuration has the type of its annotation."""

import operator
import re
import types
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import fields
from numbers import Real
from typing import Any, Union, get_args, get_origin, get_type_hints

WORDS: dict[Any, tuple[str, ...]] = {
    int: ("an integer",),
    float: ("a number",),
    bool: ("True", "False"),
    str: ("a string",),
    types.NoneType: ("None",),
}
LARGEST = 2**31 - 1  # of any number of things


def check_types(config: Any) -> None:
    """For ``__post_init__`` of a dataclass, frozen or not: raises if a field does not have its type.

    Equivalent values are converted: a sequence to a tuple, an integer to a float where the type is float, NumPy's
    numbers to Python's. Strings and numbers are not converted to bool.
    """
    hints = get_type_hints(type(config))
    for entry in fields(config):
        value = fitted(entry.name, getattr(config, entry.name), hints[entry.name])
        object.__setattr__(config, entry.name, value)


def fitted(name: str, value: Any, hint: Any) -> Any:
    """The value as the type, or a TypeError that names the parameter."""
    try:
        return _fit(value, hint)
    except TypeError:
        raise TypeError(f"{name} must be {_spell(hint)}; got {value!r}") from None


def layer_sizes(text: str) -> list[int]:
    """1024,1024 or 292x6; 0 for no layers."""
    sizes: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:x(\d+))?", part.strip())
        size, times = (int(match[1]), int(match[2] or 1)) if match else (0, 0)
        if max(size, times) > LARGEST or (not size * times and text.strip() != "0"):
            raise ValueError(f"expected layer sizes as in 1024,1024 or 292x6, or 0 for none; got {text!r}")
        sizes += [size] * times
    return [size for size in sizes if size]


def _fit(value: Any, hint: Any) -> Any:
    """The value as ``hint``, or a TypeError."""
    if get_origin(hint) in (Union, types.UnionType):
        for each in get_args(hint):
            try:
                return _fit(value, each)
            except TypeError:
                continue
        raise TypeError
    if get_origin(hint) in (Sequence, tuple):
        if isinstance(value, str | bytes | Mapping | Set) or not isinstance(value, Iterable):
            raise TypeError
        return tuple(_fit(item, get_args(hint)[0]) for item in value)
    if hint in (int, float) and isinstance(value, bool):
        raise TypeError
    if hint is int:
        return operator.index(value)
    if hint is float and isinstance(value, Real):
        return float(value)
    if not isinstance(value, hint):
        raise TypeError
    return value


def _spell(hint: Any) -> str:
    """A description of a type."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    *others, last = (word for kind in kinds for word in _words(kind))
    return f"{', '.join(others)} or {last}" if others else last


def _words(kind: Any) -> tuple[str, ...]:
    if get_origin(kind) in (Sequence, tuple):
        kinds = {int: "integers", float: "numbers", str: "strings"}
        of = get_args(kind)[0]
        return (f"a sequence of {kinds.get(of) or _spell(of)}",)
    return WORDS.get(kind) or (kind.__name__,)
