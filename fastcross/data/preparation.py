"""`prepare`: from files to a cache.

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
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fastcross._version import __version__
from fastcross.data.cache import FORMAT_VERSION, Cache
from fastcross.data.columns import Columns
from fastcross.data.encoder import Encoder
from fastcross.data.errors import DataError, Problems
from fastcross.data.fit import fit_ids, fit_standardisation, load_to_grow
from fastcross.data.formats import detect_format, get_format
from fastcross.data.formats.table import Table
from fastcross.data.inputs import Source, read_in_order, resolve_paths
from fastcross.data.kinds import Values
from fastcross.data.labels import check_both, settle
from fastcross.data.split import PARTS, Split, assign_parts
from fastcross.data.spool import Spool
from fastcross.data.write import write_parts
from fastcross.files import building, write_checked_json

Progress = Callable[[str, int, int], None]


def prepare(
    source: Source,
    cache_path: str | PathLike[str],
    *,
    format: str = "auto",
    split: str | Sequence[float] = "time",
    seed: int = 0,
    min_frequency: int = 10,
    hash_buckets: int | None = None,
    columns: Columns | str | dict[str, Any] | None = None,
    time_column: str | None = None,
    on_error: str = "stop",
    progress: Progress | bool = False,
    grow: str | PathLike[str] | None = None,
) -> Cache:
    """Read `source` (a file, a pattern, a list) into a cache at `cache_path`, or reuse the cache that is there already.

    A cache is reused when the inputs (sizes and times of change) and the arguments are those it was made with, and
    rebuilt otherwise. split: see Split.parse; columns: see Columns (csv and parquet; a string names the label
    column); time_column: orders the rows for a split by time where the file does not; on_error: "stop" at the first
    bad row with a DataError, or "skip" and count them in manifest["skipped"]; progress: True, or a function of
    (stage, done, total). What was inferred, and how the rows were divided, is in the cache's `report`.

    grow: the folder of an encoder. Its format, columns, classes and statistics stand, all of its ids stay,
    and values that it has not, but that are frequent enough here, get the ids after them.
    """
    known = None if grow is None else load_to_grow(grow)
    if known and (format != "auto" or columns is not None or hash_buckets is not None or time_column is not None):
        raise ValueError("grow keeps its encoder's: it takes no format, columns, hash_buckets and time_column")
    paths, cache_path = resolve_paths(source), Path(cache_path)
    problems, division = Problems(on_error), Split.parse(split)
    if min_frequency < 0 or (hash_buckets is not None and not 1 <= hash_buckets < 1 << 31):
        raise ValueError(f"need min_frequency >= 0 and 1 <= hash_buckets < 2^31; got {min_frequency}, {hash_buckets}")
    if division.kind == "files" and len(paths) < 2:
        raise ValueError(f'split="files" needs at least two files; got {len(paths)}')
    if time_column is not None and division.kind != "time":
        raise ValueError(f'time_column orders the rows of split="time"; got split {str(division)!r}')
    format = detect_format(paths[0]) if format == "auto" else format
    declared = None if columns is None else Columns.make(columns)
    if time_column is not None:
        declared = replace(declared or Columns(), time=time_column)
    configuration = {
        "format": format,
        "split": str(division),
        "seed": seed,
        "min_frequency": min_frequency,
        "hash_buckets": hash_buckets,
        "columns": declared.to_dict() if declared else None,
        "on_error": on_error,
    }
    if known:
        configuration |= {"format": known.format, "grow": known.fingerprint}
    inputs = [{"name": path.name, "size": path.stat().st_size, "mtime_ns": path.stat().st_mtime_ns} for path in paths]
    identity = [FORMAT_VERSION, [(i["size"], i["mtime_ns"]) for i in inputs], configuration]
    fingerprint = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    if (cache := _reusable(cache_path, fingerprint)) is not None:
        return cache
    report = progress if callable(progress) else _print_progress if progress else _no_progress
    if known:
        table = get_format(known.format).open_for_prediction(paths[0], known.columns, True, None)
    else:
        table = get_format(format).open(paths[0], declared)
    if table.columns.classes is None:
        table = _settle_label(table, paths, report)
    label = table.columns.label or ""
    started = time.time()
    with building(cache_path) as folder:
        spool = Spool(folder / "spool", table.columns)
        try:
            rows_of_files = _read_all(table, paths, spool, problems, report)
        except DataError as error:
            raise _explained(error, table) from None
        times = spool.time() if table.columns.time else None
        part = assign_parts(sum(rows_of_files), division, seed, rows_of_files, times)
        counts = _count_classes(spool, part)
        check_both(counts.sum(axis=0), table.columns.classes or (), label, "")
        check_both(counts[0], table.columns.classes or (), label, " of the training part")
        report("count", 0, 1)
        categorical, bags = fit_ids(spool, part, min_frequency, hash_buckets, known)
        # Rows to predict need no time: it only divided these.
        columns_of_rows = replace(table.columns, time=None, time_as="number")
        standardise = known.standardise if known else fit_standardisation(spool, part)
        encoder = Encoder(known.format if known else format, columns_of_rows, standardise, categorical, bags)
        files = write_parts(spool, part, encoder.standardise, folder, report)
        shutil.rmtree(spool.folder)
        encoder.save(folder / "encoder")
        manifest = {
            "format_version": FORMAT_VERSION,
            "fastcross": __version__,
            "fingerprint": fingerprint,
            "inputs": inputs,
            "configuration": configuration,
            "schema": encoder.schema.to_dict(),
            "encoder": encoder.fingerprint,
            "sizes": dict(zip(PARTS, np.bincount(part, minlength=3).tolist(), strict=True)),
            "label": {"column": label, "classes": encoder.classes, "rows": counts.tolist()},
            "findings": [finding.to_dict() for finding in table.findings],
            "looked_at": table.looked_at,
            "split": division.describe(table.columns.time),
            "skipped": {"rows": len(problems), "examples": problems.examples, "truncated": problems.truncated},
            "seconds": round(time.time() - started, 3),
            "files": files,
        }
        write_checked_json(folder / "manifest.json", manifest)
    return Cache.open(cache_path)


def _reusable(path: Path, fingerprint: str) -> Cache | None:
    """The cache of this fingerprint, if it is there and sound; refuses to replace a folder that is something else."""
    if not path.exists():
        return None
    if not path.is_dir() or (any(path.iterdir()) and not (path / "manifest.json").exists()):
        raise DataError(f"{path}: exists and is not a cache; name another folder, or remove it")
    try:
        cache = Cache.open(path, fingerprint=fingerprint)
        cache.verify()
    except DataError:
        return None
    return cache


def _settle_label(table: Table, paths: list[Path], report: Progress) -> Table:
    """The table with the classes of its label, from a reading of that column alone."""
    label = table.columns.label
    assert label is not None
    only = table.with_columns(Columns(categorical=(label,)), labelled=False)
    counts: Counter[str] = Counter()
    total, before = sum(path.stat().st_size for path in paths), 0
    for path in paths:
        for block, read_bytes in read_in_order(only, path, Problems("skip")):
            (coded,) = block.categorical
            times = np.bincount(coded.codes, minlength=len(coded.dictionary)).tolist()
            for text, count in zip(coded.dictionary.to_pylist(), times, strict=True):
                if text is not None:
                    counts[text.strip()] += count
            report("label", before + read_bytes, total)
        before += path.stat().st_size
    values = Values(pa.array(list(counts), pa.string()), np.array(list(counts.values())), counts.total())
    settled = settle(values, label, whole=True)
    assert settled is not None
    aliases = table.columns.aliases | settled.aliases
    return table.with_columns(replace(table.columns, classes=settled.classes, aliases=aliases), labelled=True)


def _read_all(table: Table, paths: list[Path], spool: Spool, problems: Problems, report: Progress) -> list[int]:
    """Spool every file; returns the rows of each."""
    total, before, rows_of_files = sum(path.stat().st_size for path in paths), 0, []
    for path in paths:
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
        before += path.stat().st_size
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


def _count_classes(spool: Spool, part: np.ndarray) -> np.ndarray:
    """(parts, classes): the rows of each."""
    size = len(spool.columns.classes or ())
    counts = np.zeros(len(PARTS) * size, np.int64)
    for i, rows in spool.blocks():
        counts += np.bincount(part[rows] * np.int64(size) + spool.label(i), minlength=len(counts))
    return counts.reshape(len(PARTS), size)


def _no_progress(stage: str, done: int, total: int) -> None:
    pass


def _print_progress(stage: str, done: int, total: int) -> None:
    sys.stderr.write(f"\r{stage} {100 * done / max(total, 1):5.1f} %" + ("\n" if done == total else ""))
    sys.stderr.flush()
