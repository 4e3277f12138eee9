"""What a label's values are: 0 and 1, -1 and 1, yes and no, any two values, several names, or a quantity."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from fastcross.data.blocks import is_number
from fastcross.data.columns import Columns
from fastcross.data.errors import DataError
from fastcross.data.kinds import STRAYS, Values

PAIRS = (("0", "1"), ("-1", "1"), ("false", "true"), ("no", "yes"), ("f", "t"), ("n", "y"), ("negative", "positive"))
MOST_CLASSES = 1000


@dataclass(frozen=True)
class Classes:
    """classes[i] has the id i; aliases: other spellings -> class. No classes: a quantity."""

    classes: tuple[str, ...]
    aliases: dict[str, str] = field(default_factory=dict)

    def of(self, columns: Columns) -> Columns:
        """These columns, with a label that is known to be so."""
        if not self.classes:
            return replace(columns, task="regression")
        return replace(columns, classes=self.classes, aliases=columns.aliases | self.aliases)


QUANTITY = Classes(())


def settle(values: Values, label: str, *, whole: bool, task: str = "auto") -> Classes | None:
    """The classes of these values, None where they leave it open and not the `whole` file was looked at.

    Numbers of which too many are different for classes are a quantity, unless the task is "classification".
    A pair such as 0 and 1 is settled by a part of the rows, and by one of its two values: what does not fit it is a
    bad row. Other values may hide a class that the part does not show.
    """
    counts: dict[str, int] = {}  # by canonical spelling
    spellings: dict[str, dict[str, int]] = {}
    for text, count in zip(values.texts.to_pylist(), values.counts.tolist(), strict=True):
        name = _canonical(text)
        counts[name] = counts.get(name, 0) + count
        spellings.setdefault(name, {})[text] = count
    pair = max(PAIRS, key=lambda pair: sum(counts.get(name, 0) for name in pair))
    inside = sum(counts.get(name, 0) for name in pair)
    if inside and inside >= (1 - STRAYS) * values.rows:
        return _spelt(pair, spellings)
    if not whole:
        return None
    return _several(counts, spellings, label, values.rows, task)


def check_both(counts: np.ndarray, classes: tuple[str, ...], label: str, rows: str) -> None:
    """Raise DataError where fewer than two classes have rows."""
    present = [name for name, count in zip(classes, counts.tolist(), strict=True) if count]
    if len(present) < 2:
        raise DataError(
            f"the label (column {label}) is {present[0] if present else 'absent'} in all {int(counts.sum()):,} rows"
            f"{rows}: there is nothing to tell apart"
        )


def check_varies(smallest: float, largest: float, label: str, rows: str) -> None:
    """Raise DataError where a quantity is the same in all rows."""
    if not smallest < largest:
        raise DataError(f"the label (column {label}) is {largest:g} in all rows{rows}: there is nothing to tell apart")


def _several(counts: dict[str, int], spellings: dict[str, dict[str, int]], label: str, rows: int, task: str) -> Classes:
    names = sorted(counts, key=counts.__getitem__, reverse=True)
    shown = ", ".join(f"{name} ({counts[name]:,} rows)" for name in names[:5]) + (", …" if len(names) > 5 else "")
    what = f"the label (column {label}) has the values {shown}"
    if len(names) == 1:
        raise DataError(
            f"the label (column {label}) is {names[0]} in all {rows:,} rows: there is nothing to tell apart"
        )
    if not names:
        raise DataError(f"the label (column {label}) has no value in any row")
    numbers = [is_number(name) for name in names]
    if any(numbers) and not all(numbers):
        raise DataError(f"{what}: numbers and words; declare its classes, or mend it")
    if len({name.lower() for name in names}) < len(names):
        raise DataError(f"{what}: the same words in capitals and without; declare its classes, or mend it")
    if len(names) > 2 and sum(counts[name] for name in names[:2]) >= (1 - STRAYS) * rows:
        raise DataError(f"{what}: two classes and stray values, or more classes? Declare them, or mend it")
    if (
        len(names) > MOST_CLASSES
        or (len(names) > 20 and rows < 10 * len(names))
        or (all(numbers) and len(names) > 20 and not all(float(name).is_integer() for name in names))
    ):
        if all(numbers) and task == "auto":
            return QUANTITY
        needed = "where classes are needed" if all(numbers) else "and no numbers, where classes are needed"
        raise DataError(f"{what}, {len(names):,} different ones: a quantity, {needed}")
    ordered = sorted(names, key=float) if all(numbers) else sorted(names, key=lambda name: _commonest(spellings[name]))
    return _spelt(tuple(ordered), spellings)


def _spelt(names: tuple[str, ...], spellings: dict[str, dict[str, int]]) -> Classes:
    """Each class under its commonest spelling; numbers under their canonical one."""
    spelt = {n: n if is_number(n) or n not in spellings else _commonest(spellings[n]) for n in names}
    others = {text: spelt[name] for name in names for text in spellings.get(name, {}) if text != spelt[name]}
    # A class that no row shows may still come, spelt as its partner is.
    for name in names:
        if name not in spellings and (partner := next((n for n in names if n in spellings), None)):
            spelt[name] = _in_the_case_of(name, spelt[partner])
    return Classes(tuple(spelt[name] for name in names), {t: c for t, c in others.items() if not is_number(t)})


def _canonical(text: str) -> str:
    if is_number(text):
        number = float(text)
        return str(int(number)) if number.is_integer() else repr(number)
    lower = text.lower()
    return lower if any(lower in pair for pair in PAIRS) else text


def _commonest(spellings: dict[str, int]) -> str:
    return max(sorted(spellings), key=spellings.__getitem__)


def _in_the_case_of(name: str, other: str) -> str:
    return name.upper() if other.isupper() else name.title() if other.istitle() else name
