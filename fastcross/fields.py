"""The fields of a configuration: each must have the type that its annotation says."""

import operator
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


def check_types(config: Any) -> None:
    """For ``__post_init__`` of a dataclass, frozen or not: raises where a field is not of its type.

    What means the same becomes it: any sequence a tuple, an integer a float where one is asked for, NumPy's numbers
    Python's. No string or number becomes a bool.
    """
    hints = get_type_hints(type(config))
    for entry in fields(config):
        value = getattr(config, entry.name)
        try:
            object.__setattr__(config, entry.name, _fit(value, hints[entry.name]))
        except TypeError:
            raise TypeError(f"{entry.name} must be {_spell(hints[entry.name])}; got {value!r}") from None


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
    """A type in words."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    *others, last = (word for kind in kinds for word in _words(kind))
    return f"{', '.join(others)} or {last}" if others else last


def _words(kind: Any) -> tuple[str, ...]:
    if get_origin(kind) in (Sequence, tuple):
        return (f"a sequence of {_spell(get_args(kind)[0])}",)
    return WORDS.get(kind) or (kind.__name__,)
