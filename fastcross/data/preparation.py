"""`prepare`: from files, or tables in memory, to a cache.

The text is parsed once. Parsing (several threads) leaves codes into per-block dictionaries in a spool; then the
number of rows is known, the rows are dealt to the parts, the vocabularies are counted on the training part, and the
codes become ids. Memory holds a few blocks and one column's distinct values at a time, whatever the size of the
input. (Only a label whose values are neither 0 and 1 nor another well-known pair takes a reading of its own.)

The cache is built in a folder beside its final place and moved there when complete.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fastcross._version import __version__
from fastcross.batch import Schema
from fastcross.data.blocks import Spool, map_in_order
from fastcross.data.cache import FORMAT_VERSION, OWN_FILES, PARTS, ArrayWriter, Cache, Split, assign_parts
from fastcross.data.columns import PARTS_OF_DATES, Columns, DataError
from fastcross.data.encoder import Encoder, fit_ids, load_to_grow
from fastcross.data.formats.parquet import PLACES, MemoryTable
from fastcross.data.formats.reading import (
    Problems,
    Source,
    Table,
    check_kind,
    detect_format,
    get_format,
    read_in_order,
    resolve_paths,
)
from fastcross.data.inference import Values, settle
from fastcross.data.numbers import fit_numbers
from fastcross.defaults import PAPER_FREQUENCY, least_frequency
from fastcross.files import building, write_checked_json

Array = npt.NDArray[Any]
MANY = 100_000  # different values of a label that are enough to know that it is a quantity
SAMPLES, SAMPLE_BYTES = 64, 16384  # of a file, by which it is noticed that it has changed
Progress = Callable[[str, int, int], None]


def prepare(
    source: Source | Sequence[pa.Table],
    cache_path: str | PathLike[str],
    *,
    format: str = "auto",
    split: str | Sequence[float] = "time",
    seed: int = 0,
    min_frequency: int | None = PAPER_FREQUENCY,
    hash_buckets: int | None = None,
    columns: Columns | str | dict[str, Any] | None = None,
    time_column: str | None = None,
    on_error: str = "stop",
    progress: Progress | bool = False,
    grow: str | PathLike[str] | None = None,
) -> Cache:
    """Read `source` (a file, a pattern, a list) into a cache at `cache_path`, or reuse the cache that is there already.

    A cache is reused when the inputs (sizes, times of change, a sample of their bytes) and the arguments are those it
    was made with, and rebuilt otherwise. min_frequency: values in fewer training rows share one id; None: 3 to 10, by
    the number of training rows. split: see Split.parse; columns: see Columns (csv and parquet; a string names the label
    column); time_column: orders the rows for a split by time where the file does not; on_error: "stop" at the
    first bad row with a DataError, or "skip" and count them in manifest["skipped"]; progress: True, or a function of
    (stage, done, total). What was inferred, and how the rows were divided, is in the cache's `report`.

    The source may also be tables in memory: one, or two of which the first trains and the second validates, and `split`
    has no say. The cache is what a Parquet file of these rows would give, but it is made anew each time.

    grow: the folder of an encoder. Its format, columns, classes and statistics stand, all of its ids stay,
    and values that it has not, but that are frequent enough here, get the ids after them. Tables may be given its
    columns with other names for label and weight.
    """
    source, cache_path = source if isinstance(source, str | PathLike) else list(source), Path(cache_path)
    tables = [each for each in source if isinstance(each, pa.Table)] if isinstance(source, list) else []
    known = None if grow is None else load_to_grow(grow)
    foreign = format != "auto" or hash_buckets is not None or time_column is not None
    if known and (foreign or (columns is not None and not tables)):
        raise ValueError("grow keeps its encoder's: it takes no format, columns, hash_buckets and time_column")
    paths = list(PLACES[: len(tables)]) if tables else resolve_paths(source)
    problems = Problems(on_error)
    division = Split("tables", (1.0, 1.0, 0.0)) if len(tables) > 1 else Split.parse(split)
    if division.kind == "files" and len(paths) < 2:
        raise ValueError(f'split="files" needs at least two files; got {len(paths)}')
    if tables:
        format = "parquet"
        identity: Any = uuid.uuid4().hex
        inputs = [{"name": str(path), "size": table.nbytes} for path, table in zip(paths, tables, strict=True)]
    else:
        format = detect_format(paths[0]) if format == "auto" else format
        check_kind(paths, known.format if known else format)
        identity = [(path.stat().st_size, path.stat().st_mtime_ns, _sample_digest(path)) for path in paths]
        inputs = [
            {"name": path.name, "size": size, "mtime_ns": changed, "sample": sample}
            for path, (size, changed, sample) in zip(paths, identity, strict=True)
        ]
    declared = _declared(columns, time_column, division)
    configuration = _configuration(format, division, seed, min_frequency, hash_buckets, declared, on_error)
    if known:
        configuration |= {"format": known.format, "grow": known.fingerprint}
    # What a date becomes is not in the configuration, and caches that know less of it are made anew.
    digest = json.dumps([FORMAT_VERSION, PARTS_OF_DATES, identity, configuration], sort_keys=True).encode()
    fingerprint = hashlib.sha256(digest).hexdigest()
    if (cache := _reusable(cache_path, fingerprint)) is not None:
        return cache

    def opened(columns: Columns | None) -> Table:
        return MemoryTable.open(tables, columns) if tables else get_format(format).open(paths[0], columns)

    if known and not tables:
        table = get_format(known.format).open_for_prediction(paths[0], known.columns, True, None)
    else:
        table = opened(declared)
    unordered: list[str] = []
    if format != "criteo":  # whose rows are in the order of time
        table, unordered = _in_order(table, division, lambda time: opened(replace(declared or Columns(), time=time)))
    origin = {
        "fingerprint": fingerprint,
        "inputs": inputs,
        "configuration": configuration,
        "warnings": unordered,
    }
    sizes = {path: entry["size"] for path, entry in zip(paths, inputs, strict=True)}
    return _build(table, sizes, cache_path, division, origin, problems, _reporter(progress), known)


def _in_order(table: Table, division: Split, reopen: Callable[[str], Table]) -> tuple[Table, list[str]]:
    """The table, for a split by time with the one column that holds times; what is to be said where there is none."""
    if division.kind != "time" or table.columns.time or division.fractions[0] == 1:
        return table, []
    times = [finding for finding in table.findings if finding.is_time]
    if len(times) == 1 and not times[0].missing:
        return reopen(times[0].column), []
    names = ", ".join(finding.column for finding in times)
    why = "no column of times was recognised" if not times else f"{names} has gaps" if len(times) == 1 else ""
    why = why or f"several columns hold times: {names}"
    return table, [
        f"the split by time takes the rows in the order they stand in, for {why}; name the column that orders them "
        "(--time-column, time_column), or divide at random (--split random)"
    ]


def _declared(
    columns: Columns | str | dict[str, Any] | None, time_column: str | None, division: Split
) -> Columns | None:
    if time_column is not None and division.kind != "time":
        raise ValueError(f'time_column orders the rows of split="time"; got split {str(division)!r}')
    declared = None if columns is None else Columns.make(columns)
    return declared if time_column is None else replace(declared or Columns(), time=time_column)


def _configuration(
    format: str,
    division: Split,
    seed: int,
    min_frequency: int | None,
    hash_buckets: int | None,
    declared: Columns | None,
    on_error: str,
) -> dict[str, Any]:
    if (min_frequency is not None and min_frequency < 0) or (
        hash_buckets is not None and not 1 <= hash_buckets < 1 << 31
    ):
        raise ValueError(f"need min_frequency >= 0 and 1 <= hash_buckets < 2^31; got {min_frequency}, {hash_buckets}")
    return {
        "format": format,
        "split": str(division),
        "seed": seed,
        "min_frequency": min_frequency,
        "hash_buckets": hash_buckets,
        "columns": declared.to_dict() if declared else None,
        "on_error": on_error,
    }


def _reporter(progress: Progress | bool) -> Progress:
    return progress if callable(progress) else _print_progress if progress else lambda stage, done, total: None


def _reusable(path: Path, fingerprint: str) -> Cache | None:
    """The cache of this fingerprint, if it is there and sound; refuses to replace a folder that is something else."""
    if not path.exists():
        return None
    if not path.is_dir() or (any(path.iterdir()) and not (path / "manifest.json").exists()):
        raise DataError(f"{path}: exists and is not a cache; name another folder, or remove it")
    if foreign := sorted(item.name for item in path.iterdir() if item.name not in OWN_FILES):
        raise DataError(
            f"{path}: the folder of this cache holds other things, too ({', '.join(foreign[:5])}); move them"
        )
    try:
        cache = Cache.open(path, fingerprint=fingerprint)
        cache.verify()
    except DataError:
        return None
    return cache


def _print_progress(stage: str, done: int, total: int) -> None:
    sys.stderr.write(f"\r{stage} {100 * done / max(total, 1):5.1f} %" + ("\n" if done == total else ""))
    sys.stderr.flush()


def _sample_digest(path: Path) -> str:
    """Of the bytes at 64 places: a file that was replaced may have the size and the time of the one before."""
    digest, size = hashlib.sha256(), path.stat().st_size
    with open(path, "rb") as file:
        for i in range(SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * i // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _build(
    table: Table,
    sizes: dict[Path, int],
    cache_path: Path,
    division: Split,
    origin: dict[str, Any],
    problems: Problems,
    report: Progress,
    known: Encoder | None = None,
) -> Cache:
    """The cache of a table; with a `known` encoder, one that has grown from it.

    sizes: of each file in bytes; origin: what the manifest says of inputs and configuration, and the warnings so far.
    """
    if table.columns.classes is None and not table.columns.is_regression:
        table = _settle_label(table, sizes, report)
    configuration = origin["configuration"]
    parts = known.columns.parts if known else table.columns.all_parts()
    if table.columns.datetimes:
        table = table.with_columns(replace(table.columns, parts=parts), labelled=True)
    columns, label = table.columns, table.columns.label or ""
    started = time.time()
    with building(cache_path) as folder:
        spool = Spool(folder / "spool", columns)
        try:
            rows_of_files = _read_all(table, sizes, spool, problems, report)
        except DataError as error:
            raise _explained(error, table) from None
        times = spool.time() if columns.time else None
        part = assign_parts(sum(rows_of_files), division, configuration["seed"], rows_of_files, times)
        label_facts = _quantity(spool, part, label) if columns.is_regression else _classes(spool, part, label)
        if known and known.label_scale:
            label_facts |= dict(zip(("mean", "deviation"), known.label_scale, strict=True))
        weight_facts = {"weight": _weight(spool, part)} if columns.sample_weight else {}
        report("count", 0, 1)
        least = configuration["min_frequency"]
        least = least_frequency(int((part == 0).sum())) if least is None else least
        categorical, bags = fit_ids(spool, part, least, configuration["hash_buckets"], known)
        # Rows to predict need no time: it only divided these.
        columns_of_rows = replace(columns, time=None, time_as="number")
        numbers = known.numbers if known else fit_numbers(spool, part)
        encoder = Encoder(configuration["format"], columns_of_rows, numbers, categorical, bags)
        if columns.is_regression:
            encoder = replace(encoder, label_scale=(label_facts["mean"], label_facts["deviation"]))
        encoder = encoder if known else encoder.without_constants()
        files = _write_parts(spool, part, encoder, folder, report)
        shutil.rmtree(spool.folder)
        encoder.save(folder / "encoder")
        manifest = {
            "format_version": FORMAT_VERSION,
            "fastcross": __version__,
            **origin,
            "configuration": {**configuration, "min_frequency": least},
            "schema": encoder.schema.to_dict(),
            "encoder": encoder.fingerprint,
            "sizes": dict(zip(PARTS, np.bincount(part, minlength=3).tolist(), strict=True)),
            "label": {"column": label, "classes": encoder.classes, **label_facts},
            **weight_facts,
            "findings": [finding.to_dict() for finding in table.findings],
            "numbers": {
                name: record.description
                for name, record in zip(encoder.columns.quantities, encoder.numbers.records, strict=True)
            },
            "looked_at": table.looked_at,
            "warnings": [*origin["warnings"], *_without_ids(encoder, least)],
            "split": division.describe(columns.time),
            "skipped": {"rows": len(problems), "examples": problems.examples, "truncated": problems.truncated},
            "seconds": round(time.time() - started, 3),
            "files": files,
        }
        write_checked_json(folder / "manifest.json", manifest)
    return Cache.open(cache_path)


def _without_ids(encoder: Encoder, least: int) -> list[str]:
    """The columns whose values are nearly all rare."""
    schema, rare = encoder.schema, encoder.rare
    sizes = (*schema.cardinalities, *schema.bag_cardinalities)
    sized = zip((*schema.categorical_names, *schema.bag_names), sizes, strict=True)
    mute = [f"{name} ({rare[name]:.0%} of its values)" for name, size in sized if size <= 2 and rare.get(name)]
    if not mute:
        return []
    return [
        f"no value, or one alone, has an id of its own, for the others are in fewer than {least} training rows each "
        f"(min_frequency): {', '.join(mute)}; the model learns next to nothing of them"
    ]


def _classes(spool: Spool, part: Array, label: str) -> dict[str, Any]:
    classes = spool.columns.classes or ()
    counts: Array = np.zeros(len(PARTS) * len(classes), np.int64)
    for i, rows in spool.blocks():
        counts += np.bincount(part[rows] * np.int64(len(classes)) + spool.label(i), minlength=len(counts))
    counts = counts.reshape(len(PARTS), len(classes))
    _check_both(counts.sum(axis=0), classes, label, "")
    _check_both(counts[0], classes, label, " of the training part")
    return {"rows": counts.tolist()}


def _quantity(spool: Spool, part: Array, label: str) -> dict[str, Any]:
    """Its mean and standard deviation over the training part, by which the model scales it."""
    of_all = np.concatenate([spool.label(i) for i, _ in spool.blocks()])
    _check_varies(of_all.min(), of_all.max(), label, "")
    values = of_all[part == 0]
    if not len(values):
        raise DataError(f"the label (column {label}) is absent in all rows of the training part")
    _check_varies(values.min(), values.max(), label, " of the training part")
    rows = np.bincount(part, minlength=len(PARTS))
    return {"rows": rows[:, None].tolist(), "mean": float(values.mean()), "deviation": float(values.std())}


def _check_both(counts: Array, classes: tuple[str, ...], label: str, rows: str) -> None:
    """Raise DataError where fewer than two classes have rows."""
    present = [name for name, count in zip(classes, counts.tolist(), strict=True) if count]
    if len(present) < 2:
        raise DataError(
            f"the label (column {label}) is {present[0] if present else 'absent'} in all {int(counts.sum()):,} rows"
            f"{rows}: there is nothing to tell apart"
        )


def _check_varies(smallest: float, largest: float, label: str, rows: str) -> None:
    """Raise DataError where a quantity is the same in all rows."""
    if not smallest < largest:
        raise DataError(f"the label (column {label}) is {largest:g} in all rows{rows}: there is nothing to tell apart")


def _weight(spool: Spool, part: Array) -> dict[str, Any]:
    name = spool.columns.sample_weight
    total = sum(float(spool.beside(i)["weight"][part[rows] == 0].sum(dtype=np.float64)) for i, rows in spool.blocks())
    rows = int((part == 0).sum())
    if not total > 0:
        raise DataError(f"the weight (column {name}) is zero in all {rows:,} rows of the training part")
    return {"column": name, "mean": total / rows}


def _settle_label(table: Table, sizes: dict[Path, int], report: Progress) -> Table:
    """The table with the classes of its label, or a quantity for one, from a reading of that column alone."""
    label = table.columns.label
    assert label is not None
    only = table.with_columns(Columns(categorical=(label,)), labelled=False)
    counts: Counter[str] = Counter()
    total, before = sum(sizes.values()), 0
    for path, size in sizes.items():
        for block, read_bytes in read_in_order(only, path, Problems("skip")):
            if len(counts) > MANY:
                break
            (coded,) = block.categorical
            times = np.bincount(coded.codes, minlength=len(coded.dictionary)).tolist()
            for text, count in zip(coded.dictionary.to_pylist(), times, strict=True):
                if text is not None:
                    counts[text.strip()] += count
            report("label", before + read_bytes, total)
        before += size
    values = Values(pa.array(list(counts), pa.string()), np.array(list(counts.values())), counts.total())
    columns = settle(values, table.columns, whole=True)
    assert columns is not None
    return table.with_columns(columns, labelled=True)


def _read_all(table: Table, sizes: dict[Path, int], spool: Spool, problems: Problems, report: Progress) -> list[int]:
    """Spool every file; returns the rows of each."""
    total, before, rows_of_files = sum(sizes.values()), 0, []
    for path, size in sizes.items():
        rows = 0
        for block, read_bytes in read_in_order(table, path, problems):
            if not block.rows:
                if len(problems) > 1000 and not sum(spool.rows):
                    raise DataError(f"not one row could be read; is this the right format?\n{problems}")
                continue
            spool.append(block)
            rows += block.rows
            report("read", before + read_bytes, total)
        if not rows:
            raise DataError(f"{path}: no rows" + (f"; {problems}" if problems else ""))
        rows_of_files.append(rows)
        before += size
    spool.close()
    return rows_of_files


def _explained(error: DataError, table: Table) -> DataError:
    """The error, and the inference behind it where it comes from a column that few values contradict."""
    for finding in table.findings:
        if finding.warning and f"column {finding.column} " in str(error):
            return DataError(
                f"{error} ({finding.warning}; mend it, skip bad rows, or declare the column to be categorical)"
            )
    return error


def _write_parts(
    spool: Spool, part: Array, encoder: Encoder, folder: Path, progress: Progress
) -> dict[str, dict[str, int]]:
    """Encode every block and append its rows to their parts; returns size and checksum of each file."""
    columns, numbers = encoder.columns, encoder.numbers
    # The spool has more features than the encoder where parts of dates do not vary.
    categories = [spool.columns.categories.index(name) for name in columns.categories]
    quantities = [spool.columns.quantities.index(name) for name in columns.quantities]

    def encode(block: tuple[int, slice]) -> list[dict[str, Array]]:
        i, rows = block
        categorical = np.empty((spool.rows[i], len(categories)), np.int32)
        codes = spool.codes(i)
        for c, of_spool in enumerate(categories):
            categorical[:, c] = spool.categorical[of_spool].ids(i)[codes[of_spool]]
        dense = numbers(spool.dense(i)[:, quantities])
        arrays = {"dense": dense, "categorical": categorical, "label": spool.label(i)}
        arrays |= spool.beside(i)
        chosen = [part[rows] == p for p in range(len(PARTS))]
        encoded = [{name: a if mask.all() else a[mask] for name, a in arrays.items()} for mask in chosen]
        for c, files in enumerate(spool.bags):
            counts, values = spool.bag(c, i, "counts"), files.ids(i)[spool.bag(c, i, "codes")]
            for p, mask in enumerate(chosen):
                each = np.repeat(mask, counts)
                encoded[p][f"bag{c}.values"] = values[each]
                encoded[p][f"bag{c}.bounds"] = np.cumsum(counts[mask], dtype=np.int64)
                if "weights" in files.files:
                    encoded[p][f"bag{c}.weights"] = spool.bag(c, i, "weights")[each]
        return encoded

    with ExitStack() as stack:
        writers = [_writers(spool, part, p, encoder.schema, folder / name, stack) for p, name in enumerate(PARTS)]
        totals = np.zeros((len(PARTS), len(spool.bags)), np.int64)
        done = 0
        for encoded in map_in_order(encode, spool.blocks()):
            for p, arrays in enumerate(encoded):
                for c in range(len(spool.bags)):
                    arrays[f"bag{c}.bounds"] += totals[p, c]
                    totals[p, c] += len(arrays[f"bag{c}.values"])
                for name, array in arrays.items():
                    writers[p][name].append(array)
                done += len(arrays["label"])
            progress("write", done, len(part))
        for writer in (writer for of_part in writers for writer in of_part.values()):
            assert writer.rows == writer.shape[0], (writer.rows, writer.shape)
        return {
            f"{part_name}/{name}.npy": {"bytes": writer.bytes, "crc32": writer.crc32}
            for part_name, of_part in zip(PARTS, writers, strict=True)
            for name, writer in of_part.items()
        }


def _writers(
    spool: Spool, part: Array, p: int, schema: Schema, folder: Path, stack: ExitStack
) -> dict[str, ArrayWriter]:
    """The files of one part."""
    folder.mkdir()
    columns, n = spool.columns, int((part == p).sum())
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {
        "dense": ((n, len(schema.dense_names)), np.float32),
        "categorical": ((n, len(schema.categorical_names)), np.int32),
        "label": ((n,), _label_dtype(columns)),
    }
    shapes |= {"weight": ((n,), np.float32)} if columns.sample_weight else {}
    shapes |= {"group": ((n,), np.int64)} if columns.group else {}
    for c, bag in enumerate(columns.bags or ()):
        values = sum(int(spool.bag(c, i, "counts")[part[rows] == p].sum()) for i, rows in spool.blocks())
        shapes[f"bag{c}.values"] = ((values,), np.int32)
        shapes[f"bag{c}.bounds"] = ((n + 1,), np.int64)
        if bag in columns.weights:
            shapes[f"bag{c}.weights"] = ((values,), np.float32)
    writers = {}
    for name, (shape, dtype) in shapes.items():
        writers[name] = ArrayWriter(folder / f"{name}.npy", shape, dtype)
        stack.callback(writers[name].close)
        if name.endswith(".bounds"):
            writers[name].append(np.zeros(1, dtype))
    return writers


def _label_dtype(columns: Columns) -> type:
    if columns.is_regression:
        return np.float64
    return np.uint8 if len(columns.classes or ()) <= 256 else np.int32
