"""What the columns of a table are, from a sample of its rows, with a reason for each; and what its label's values are.

A column is a quantity, a category, several categories, a date-time, or no feature at all. Integers are the hard case.
A quantity (an age, a distance) takes neighbouring values about equally often; ids (users, products, codes) do not, for
each has a popularity of its own. So the frequency c of each value is compared with e, the mean of its two neighbours'.
A sample adds noise of the variance c + e/2 to their difference, which is taken off: √((c - e)² - c - e/2) / max(c, e)
has a median below 0.1 for counts, ages and angles, up to 0.39 for the distances of covtype, and 0.43 to 0.95 for the
users and movies of MovieLens and for ids with Zipf's frequencies, from 20,000 rows to 600,000. In between, the disorder
of the logarithms decides, mean square of the steps / 2 · variance: 1 in no order, below 0.5 where frequencies follow
the values.

A label is 0 and 1, -1 and 1, yes and no, any two values, several names, or a quantity.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fastcross.data.blocks import as_text, is_number, is_text, kind_of_type, unix_units
from fastcross.data.columns import Columns, DataError
from fastcross.data.spelling import PATTERNS, decimal_mark

Array = npt.NDArray[Any]
LABEL_NAMES = ("label", "click", "clicked", "target", "y")
KINDS_OF_FEATURES = ("dense", "categorical", "bags", "datetimes")
NAMES_OF_KINDS = {"bags": "multi-valued", "datetimes": "date-time", "drop": "dropped"}
PAIRS = (("0", "1"), ("-1", "1"), ("false", "true"), ("no", "yes"), ("f", "t"), ("n", "y"), ("negative", "positive"))
MOST_CLASSES = 1000
FEW_VALUES = 20  # integers with no more distinct values than this, each seen ten times, are categories, too
STRAYS = 0.01  # values of another kind, up to this share, are taken for mistakes
TOO = "; categories, too"
JAGGED = 0.425  # the median above which there is no doubt
NUMBER = r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*$"
INTEGER = r"^\s*[+-]?\d+(\.0*)?\s*$"  # "7.0" too: what pandas writes where a column of integers has gaps
DATE_TIME = r"^\d{4}-\d{2}-\d{2}([ T]\d{2}:\d{2}(:\d{2}(\.\d{1,6})?)?(Z|[+-]\d{2}(:?\d{2})?)?)?$"
DATES = "date-times: hour, weekday, day, month, year and days since the first, where they vary"
# MovieLens-1M, split by time, AUC: 0.70 with the seconds as a number, 0.735 with hour and weekday, 0.747 without.
UNIX_TIMES = (
    "Unix times: as numbers, later rows lie outside what was trained on; declare date-times for hour, weekday and date"
)
BOOLEANS = ({"true", "false"}, {"yes", "no"}, {"t", "f"}, {"y", "n"}, {"on", "off"})
ID_WORDS = {"id", "ids", "uid", "uuid", "guid", "code", "zip", "zipcode", "postcode", "sku", "isbn", "asin"}
TIME_WORDS = {"time", "times", "timestamp", "ts", "date", "datetime", "epoch", "unixtime", "when"}
ID_NAME = re.compile(  # "movieid", but not "paid"
    r"(user|item|movie|product|ad|site|app|device|shop|store|category|cate|brand|campaign|customer|session|query|page|"
    r"doc|song|artist|video|author|adgroup|seller|merchant|member|post|news|article)_?(id|no)$"
)


@dataclass(frozen=True)
class Sample:
    """Rows from all over a file: text columns as strings, those of Parquet in their own types."""

    place: str
    table: pa.Table
    whole: bool  # all rows are in it
    unit: str  # what a place in the file is counted in: "line" or "row"
    find: Callable[[str, str], int | None]  # column, value -> the first place that has it
    where: str  # in words, for the report
    typed: bool = False  # its columns have types, which are declarations: texts are no numbers


@dataclass(frozen=True)
class Finding:
    """What a column was taken for, and why; a warning where few values decided."""

    column: str
    kind: str
    why: str
    warning: str = ""
    missing: int = 0  # values, in the rows looked at

    @property
    def is_time(self) -> bool:
        return self.kind == NAMES_OF_KINDS["datetimes"] or self.why == UNIX_TIMES

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def complete(columns: Columns, sample: Sample) -> tuple[Columns, tuple[Finding, ...]]:
    """Fill in what is not declared, and check that what is declared exists and can be read."""
    names = sample.table.column_names
    label = columns.label or next((name for name in names if name.lower() in LABEL_NAMES), None)
    if label is None:
        raise DataError(f"{sample.place}: name the label column; the columns are {', '.join(names)}")
    if label in columns.drop or label == columns.time:
        how = "dropped" if label in columns.drop else "the time"
        raise DataError(f"{sample.place}: the column {label} is the label, and cannot be {how}; name another label")
    others = [name for name in (columns.time, columns.sample_weight, columns.group) if name]
    absent = {label, *columns.inputs, *columns.levels, *columns.weights.values(), *columns.drop, *others} - set(names)
    if absent:
        raise DataError(f"{sample.place}: no column {', '.join(sorted(absent))}; the columns are {', '.join(names)}")
    declared = {name: kind for kind in KINDS_OF_FEATURES for name in getattr(columns, kind) or ()}
    declared |= dict.fromkeys(columns.weights, "bags") | dict.fromkeys(columns.drop, "drop")
    infer = columns.infer_rest or not any(getattr(columns, k) is not None for k in ("dense", "categorical", "bags"))
    kinds: dict[str, Kind] = {}
    for name in names:
        if name in (label, columns.sample_weight) or name in columns.weights.values():
            continue
        known = infer or name in columns.inputs
        kind = judge(name, sample.table[name], typed=sample.typed) if known else Kind("drop", "not declared")
        if kind.name == "" and declared.get(name) != "drop":
            raise DataError(
                f"{sample.place}: column {name} is {kind.why}, which is no feature; flatten it into columns, or drop it"
            )
        if name in declared:
            decimals = kind.decimals if declared[name] == "dense" else ""
            kind = Kind(declared[name], "declared", decimals=decimals)
        elif name == columns.time and kind.name != "datetimes":
            kind = Kind("drop", "orders the rows; later ones would lie outside what was trained on")
        kinds[name] = kind
    completed = _with_kinds(columns, kinds, label)
    if sample.typed:
        of_types = {n: kind_of_type(sample.table[n].type) for n in (*completed.categorical, *completed.bags)}  # type: ignore[misc]
        completed = replace(completed, types={name: kind for name, kind in of_types.items() if kind})
    if wrong := [name for name in completed.levels if name not in (completed.dense or ())]:
        raise DataError(f"{sample.place}: levels must name dense columns; got {', '.join(wrong)}")
    if columns.time:
        completed = replace(completed, time_as=_time_as(sample, columns.time))
    findings = [_finding(sample, name, kind) for name, kind in kinds.items()]
    if pa.types.is_nested(kind_of_label := sample.table[label].type):
        raise DataError(
            f"{sample.place}: the label (column {label}) must hold one value; it is of type {kind_of_label}"
        )
    if columns.sample_weight:
        findings.append(Finding(columns.sample_weight, "weight", "how much each row counts; no feature"))
    if completed.classes is None and not completed.is_regression:
        completed = settle(Values.of(sample.table[label]), completed, whole=sample.whole) or completed
    if len(completed.transforms) != len(completed.quantities):
        raise DataError(
            f"transform must be one name or one per dense column; got {len(completed.transform)} for "
            f"{len(completed.dense or ())} columns"
        )
    if not completed.features:
        raise DataError(f"{sample.place}: no feature columns beside the label {label}")
    return completed, tuple(findings)


def _with_kinds(columns: Columns, kinds: dict[str, Kind], label: str) -> Columns:
    """Declared columns keep the order in which they were declared; inferred ones follow in that of the file."""

    def named(wanted: str) -> tuple[str, ...]:
        declared = getattr(columns, wanted) or ()
        return (*declared, *(n for n, kind in kinds.items() if kind.name == wanted and n not in declared))

    decimals = {name: kind.decimals for name, kind in kinds.items() if kind.decimals}
    inferred = {n: k.separator for n, k in kinds.items() if k.name == "bags" and k.separator != columns.separator}
    return replace(
        columns,
        label=label,
        dense=named("dense"),
        levels=(*columns.levels, *(n for n, kind in kinds.items() if kind.level and n not in columns.levels)),
        categorical=named("categorical"),
        bags=named("bags"),
        datetimes=named("datetimes"),
        separators=inferred | columns.separators,
        decimals=decimals | columns.decimals,
        drop=(),
        infer_rest=False,
    )


def _finding(sample: Sample, name: str, kind: Kind) -> Finding:
    warning = kind.warning
    if kind.stray is not None:
        place = sample.find(name, kind.stray)
        where = f", first in {sample.unit} {place}" if place else ""
        if kind.strays:
            others = "date-times" if kind.name == "datetimes" else "numbers"
            count = f"{kind.strays:,} of {len(sample.table):,} values are no {others}, such as"
        else:
            count = f"{kind.why}:"
        warning = f"{count} {kind.stray!r}{where}"
    kind_in_words = NAMES_OF_KINDS.get(kind.name, kind.name)
    return Finding(name, kind_in_words, kind.why, warning, sample.table[name].null_count)


def _time_as(sample: Sample, time: str) -> str:
    column = sample.table[time]
    if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
        return "datetime"
    kind = judge(time, column)
    if kind.name == "datetimes":
        return "datetime"
    numbers, _ = Values.of(column).share(NUMBER)
    if numbers < 0.99:
        value = Values.of(column).texts[0].as_py()
        raise DataError(
            f"{sample.place}: the time (column {time}) must hold numbers or date-times such as 2024-01-31 12:30:00; "
            f"got {value!r}"
        )
    return "number"


@dataclass(frozen=True)
class Kind:
    name: str  # "dense", "categorical", "bags", "datetimes", "drop", or "" for what cannot be read
    why: str
    stray: str | None = None  # a value to warn of: it does not fit the others, or is not what it looks like
    strays: int = 0  # how many values do not fit
    separator: str = "|"
    decimals: str = ""  # the decimal mark, where numbers are not written as programs write them
    warning: str = ""
    level: bool = False  # a number whose values are categories, too


@dataclass(frozen=True)
class Values:
    """The distinct values of a column, and how often each occurs among its `rows` that are not missing."""

    texts: pa.Array
    counts: Array
    rows: int

    @classmethod
    def of(cls, column: pa.ChunkedArray) -> Values:
        counted = pc.drop_null(pc.cast(as_text(column), pa.string())).value_counts()
        texts = pc.utf8_trim_whitespace(counted.field("values"))
        counts = counted.field("counts").to_numpy(zero_copy_only=False)
        return cls(texts, counts, int(counts.sum()))

    def share(self, pattern: str) -> tuple[float, Array]:
        """Of the rows whose value matches, and which values do."""
        fits = pc.match_substring_regex(self.texts, pattern).to_numpy(zero_copy_only=False)
        return float(self.counts[fits].sum()) / self.rows, fits

    def commonest(self, chosen: Array) -> str:
        return self.texts[int(np.argmax(np.where(chosen, self.counts, -1)))].as_py()


def judge(name: str, column: pa.ChunkedArray, *, typed: bool = False) -> Kind:
    """What a column is. Of a ``typed`` table, a column of texts is none of numbers, even where all are digits."""
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        if pa.types.is_nested(kind.value_type):
            return Kind("", f"of type {kind}")
        vector = pa.types.is_floating(kind.value_type)
        warning = "lists of numbers are taken for sets of categories; make each place of a vector a column of its own"
        return Kind("bags", "lists", warning=warning if vector else "")
    if pa.types.is_duration(kind) or pa.types.is_time(kind):
        return Kind("dense", "times in seconds")
    if pa.types.is_boolean(kind):
        return Kind("categorical", "booleans")
    if pa.types.is_dictionary(kind) and not pa.types.is_nested(kind.value_type):
        return Kind("categorical", "stored as categories")
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return Kind("datetimes", DATES)
    if pa.types.is_null(kind):
        return Kind("drop", "no values")
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind) or is_text(kind)):
        return Kind("", f"of type {kind}")
    if pa.types.is_floating(kind):  # not a number is a missing one
        column = pc.if_else(pc.is_nan(column), None, column)
    try:
        values = Values.of(column)
    except pa.ArrowInvalid:
        return Kind("", "of bytes that are not UTF-8")
    if not values.rows:
        return Kind("categorical", "no value in the rows looked at")
    numbers, fits = values.share(NUMBER)
    declared = typed and is_text(kind)
    if numbers >= 1 - STRAYS and not declared:
        if is_time_name(name) and _is_unix_time(values, fits):
            return Kind("drop", UNIX_TIMES)
        integers, _ = values.share(INTEGER)
        whole = integers >= 1 - STRAYS if is_text(kind) else integers == 1
        found = judge_integers(name, values) if whole else Kind("dense", "numbers with decimals")
        if numbers == 1:
            return found
        # A stray value is no number, but it may be a category: few values are both only where all are numbers.
        name = "categorical" if found.level else found.name
        return Kind(name, found.why.removesuffix(TOO), values.commonest(~fits), int(values.counts[~fits].sum()))
    if numbers < 1 and (mark := decimal_mark(values.texts)):
        how = "a comma before the decimals" if mark == "," else "a unit or commas between thousands"
        return Kind("dense", f"numbers written with {how}", decimals=mark)
    moments, fits_moment = values.share(DATE_TIME)
    if moments >= 1 - STRAYS:
        found = Kind("datetimes", DATES)
        if moments == 1:
            return found
        return Kind(found.name, found.why, values.commonest(~fits_moment), int(values.counts[~fits_moment].sum()))
    text = judge_text(values)
    if numbers > 0.9 and not declared:
        why = "numbers and other values"
        return Kind(text.name, why, values.commonest(~fits), int(values.counts[~fits].sum()), text.separator)
    written, fits = values.share("|".join(f"({pattern})" for pattern in PATTERNS.values()))
    if written > 0.9 and numbers < 1:
        strays = values.commonest(~fits) if written < 1 else values.commonest(fits)
        return Kind("categorical", "numbers and other values", strays, max(1, int(values.counts[~fits].sum())))
    return text


def judge_integers(name: str, values: Values) -> Kind:
    rows, distinct = values.rows, len(values.texts)
    zeros, _ = values.share(r"^\s*[+-]?0\d")
    if zeros > STRAYS:
        return Kind("categorical", "codes: numbers with leading zeros")
    digits = pc.replace_substring_regex(values.texts, r"\.0*$", "")
    fits = pc.match_substring_regex(digits, r"^[+-]?\d{1,18}$").to_numpy(zero_copy_only=False)
    if values.counts[~fits].sum() > STRAYS * rows:
        return Kind("categorical", "integers too long for quantities")
    numbers = pc.cast(pc.utf8_ltrim(digits.filter(pa.array(fits)), "+"), pa.int64()).to_numpy()
    counts = values.counts[fits]
    if distinct <= FEW_VALUES and rows >= 10 * distinct:
        why = f"integers with few values: {distinct}"
        if distinct < 3 or is_id_name(name):
            return Kind("categorical", why)
        return Kind("dense", f"{why}{TOO}", level=True)
    if distinct == rows >= 100 and (is_id_name(name) or np.mean(np.diff(np.sort(numbers)) == 1) > 0.99):
        return Kind("drop", "another value in every row: it numbers the rows")
    if is_id_name(name):
        return Kind("categorical", f"integers, and ids by their name: {distinct:,} different in {rows:,}")
    ids = look_like_ids(numbers, counts)
    if ids:
        return Kind("categorical", f"integers as frequent as ids are: {distinct:,} different in {rows:,}")
    if ids is False:
        return Kind("dense", "integers that are about as frequent as their neighbours")
    return Kind("dense", f"integers, {distinct:,} different in {rows:,}; declare them categorical if they are ids")


def look_like_ids(numbers: Array, counts: Array) -> bool | None:
    """By the rule above; None where most rows have values too rare to tell."""
    c = counts[np.argsort(numbers)].astype(np.float64)
    middle, expected = c[1:-1], (c[:-2] + c[2:]) / 2
    larger = np.maximum(middle, expected)
    enough = larger >= 10
    if enough.sum() < 8 or c[c >= 10].sum() < 0.5 * c.sum():
        return None
    square = (middle - expected) ** 2 - (middle + expected / 2)
    jagged = np.median(np.sqrt(np.maximum(square, 0))[enough] / larger[enough])
    logarithm = np.log(c)
    disorder = np.mean(np.diff(logarithm) ** 2) / max(2 * np.var(logarithm), 1e-12)
    return bool(jagged >= JAGGED or (jagged >= 0.28 and disorder >= 0.6))


def judge_text(values: Values) -> Kind:
    rows, distinct = values.rows, len(values.texts)
    if distinct == rows >= 1000:
        why = f"another text in each of {rows:,} rows"
        return Kind("drop", why, warning=f"{why}: it is left out, for no value comes again")
    for separator in "|;,":
        if _is_separator(values, separator):
            return Kind("bags", f"several values with {separator} between them", separator=separator)
    lower = {text.lower() for text in values.texts.to_pylist()} if distinct <= 4 else set()
    if lower and any(lower <= pair for pair in BOOLEANS):
        return Kind("categorical", "booleans")
    if rows >= 1000 and distinct > 0.5 * rows:
        return Kind("categorical", f"text; {distinct:,} different in {rows:,} rows: most are too rare for an id")
    return Kind("categorical", f"text, {distinct:,} different")


def _is_separator(values: Values, separator: str) -> bool:
    """Whether the values are lists: a bar is enough where it is in every hundredth row; commas and semicolons stand in
    names, too, and only where far fewer parts than wholes come up is it likely that they separate."""
    has = pc.match_substring(values.texts, separator).to_numpy(zero_copy_only=False)
    if values.counts[has].sum() < STRAYS * values.rows:
        return False
    if separator == "|":
        return True
    parts = pc.list_flatten(pc.split_pattern(values.texts, separator))
    return len(values.texts) >= 10 and 2 * len(pc.unique(parts)) <= len(values.texts)


def is_id_name(name: str) -> bool:
    words = _words(name)
    return bool(ID_WORDS & set(words)) or bool(ID_NAME.search("_".join(words)))


def is_time_name(name: str) -> bool:
    return bool(TIME_WORDS & set(_words(name))) or name.lower().endswith(("time", "timestamp", "date", "_at", "_ts"))


def _words(name: str) -> list[str]:
    """In lower case, of names written with blanks, underscores, dots or camel's humps."""
    return re.split(r"[^a-z0-9]+", re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower())


def _is_unix_time(values: Values, fits: Array) -> bool:
    """Whether the numbers are seconds, or thousandths, millionths, … of them, since 1970, and lie in 1980 ... 2100."""
    numbers = pc.cast(values.texts.filter(pa.array(fits)), pa.float64()).to_numpy()
    years = numbers / unix_units(numbers) / (365.25 * 86400)
    return bool(values.counts[fits][(years > 10) & (years < 130)].sum() >= (1 - STRAYS) * values.rows)


def settle(values: Values, columns: Columns, *, whole: bool) -> Columns | None:
    """The columns with the classes of the label, which has these values, or with a quantity for it; None where the
    values leave it open and not the `whole` file was looked at.

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
    names: tuple[str, ...] | None = pair
    if not inside or inside < (1 - STRAYS) * values.rows:
        if not whole:
            return None
        names = _names_of_classes(counts, spellings, columns, values.rows)
    if names is None:
        return replace(columns, task="regression")
    classes, aliases = _spelt(names, spellings)
    return replace(columns, classes=classes, aliases=columns.aliases | aliases)


def _names_of_classes(
    counts: dict[str, int], spellings: dict[str, dict[str, int]], columns: Columns, rows: int
) -> tuple[str, ...] | None:
    """In the order of their ids; None for a quantity."""
    names = sorted(counts, key=counts.__getitem__, reverse=True)
    shown = ", ".join(f"{name} ({counts[name]:,} rows)" for name in names[:5]) + (", …" if len(names) > 5 else "")
    what = f"the label (column {columns.label}) has the values {shown}"
    if len(names) == 1:
        raise DataError(
            f"the label (column {columns.label}) is {names[0]} in all {rows:,} rows: there is nothing to tell apart"
        )
    if not names:
        raise DataError(f"the label (column {columns.label}) has no value in any row")
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
        if all(numbers) and columns.task == "auto":
            return None
        needed = "where classes are needed" if all(numbers) else "and no numbers, where classes are needed"
        raise DataError(f"{what}, {len(names):,} different ones: a quantity, {needed}")
    return tuple(sorted(names, key=float if all(numbers) else lambda name: _commonest(spellings[name])))


def _spelt(names: tuple[str, ...], spellings: dict[str, dict[str, int]]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Each class under its commonest spelling, numbers under their canonical one; and the aliases: the others."""
    spelt = {n: n if is_number(n) or n not in spellings else _commonest(spellings[n]) for n in names}
    others = {text: spelt[name] for name in names for text in spellings.get(name, {}) if text != spelt[name]}
    # A class that no row shows may still come, spelt as its partner is.
    for name in names:
        if name not in spellings and (partner := next((n for n in names if n in spellings), None)):
            spelt[name] = _in_the_case_of(name, spelt[partner])
    return tuple(spelt[name] for name in names), {t: c for t, c in others.items() if not is_number(t)}


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
