"""`prepare`: from files to a cache; `prepare_table`: from tables in memory. build.py has the work that both share."""

from __future__ import annotations

import hashlib
import json
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import pyarrow as pa

from fastcross.data.build import Inputs, build
from fastcross.data.cache import FORMAT_VERSION, OWN_FILES, Cache
from fastcross.data.columns import Columns
from fastcross.data.errors import DataError, Problems
from fastcross.data.fit import load_to_grow
from fastcross.data.formats import detect_format, get_format
from fastcross.data.inputs import Source, check_kind, resolve_paths, sample_digest
from fastcross.data.memory import PLACES, MemoryTable
from fastcross.data.split import Split

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

    A cache is reused when the inputs (sizes, times of change, a sample of their bytes) and the arguments are those it
    was made with, and rebuilt otherwise. split: see Split.parse; columns: see Columns (csv and parquet; a string names
    the label column); time_column: orders the rows for a split by time where the file does not; on_error: "stop" at the
    first bad row with a DataError, or "skip" and count them in manifest["skipped"]; progress: True, or a function of
    (stage, done, total). What was inferred, and how the rows were divided, is in the cache's `report`.

    grow: the folder of an encoder. Its format, columns, classes and statistics stand, all of its ids stay,
    and values that it has not, but that are frequent enough here, get the ids after them.
    """
    known = None if grow is None else load_to_grow(grow)
    if known and (format != "auto" or columns is not None or hash_buckets is not None or time_column is not None):
        raise ValueError("grow keeps its encoder's: it takes no format, columns, hash_buckets and time_column")
    paths, cache_path = resolve_paths(source), Path(cache_path)
    problems, division = Problems(on_error), Split.parse(split)
    if division.kind == "files" and len(paths) < 2:
        raise ValueError(f'split="files" needs at least two files; got {len(paths)}')
    format = detect_format(paths[0]) if format == "auto" else format
    check_kind(paths, known.format if known else format)
    declared = _declared(columns, time_column, division)
    configuration = _configuration(format, division, seed, min_frequency, hash_buckets, declared, on_error)
    if known:
        configuration |= {"format": known.format, "grow": known.fingerprint}
    inputs = [
        {
            "name": path.name,
            "size": path.stat().st_size,
            "mtime_ns": path.stat().st_mtime_ns,
            "sample": sample_digest(path),
        }
        for path in paths
    ]
    identity = [FORMAT_VERSION, [(i["size"], i["mtime_ns"], i["sample"]) for i in inputs], configuration]
    fingerprint = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    if (cache := _reusable(cache_path, fingerprint)) is not None:
        return cache
    inputs_of_cache = Inputs(paths, [path.stat().st_size for path in paths], inputs, fingerprint)
    if known:
        table = get_format(known.format).open_for_prediction(paths[0], known.columns, True, None)
    else:
        table = get_format(format).open(paths[0], declared)
    return build(table, inputs_of_cache, cache_path, division, configuration, problems, _reporter(progress), known)


def prepare_table(
    tables: Sequence[pa.Table],
    cache_path: str | PathLike[str],
    *,
    split: str | Sequence[float] = "time",
    seed: int = 0,
    min_frequency: int = 10,
    hash_buckets: int | None = None,
    columns: Columns | str | dict[str, Any] | None = None,
    time_column: str | None = None,
    on_error: str = "stop",
    progress: Progress | bool = False,
) -> Cache:
    """A cache of a table in memory; of two, the first trains and the second validates, and `split` has no say.

    The other arguments are those of `prepare`, and the cache is what `prepare` would make of a Parquet file of the
    same rows, but that it is made anew each time.
    """
    problems, division = (
        Problems(on_error),
        Split.parse(split) if len(tables) == 1 else Split("tables", (1.0, 1.0, 0.0)),
    )
    if division.kind == "files":
        raise ValueError('split="files" needs at least two files; got a table')
    declared = _declared(columns, time_column, division)
    configuration = _configuration("parquet", division, seed, min_frequency, hash_buckets, declared, on_error)
    inputs = [{"name": str(place), "size": table.nbytes} for place, table in zip(PLACES, tables, strict=False)]
    sizes = [table.nbytes for table in tables]
    inputs_of_cache = Inputs([*PLACES[: len(tables)]], sizes, inputs, uuid.uuid4().hex)
    opened = MemoryTable.open(tables, declared)
    return build(opened, inputs_of_cache, Path(cache_path), division, configuration, problems, _reporter(progress))


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
    min_frequency: int,
    hash_buckets: int | None,
    declared: Columns | None,
    on_error: str,
) -> dict[str, Any]:
    if min_frequency < 0 or (hash_buckets is not None and not 1 <= hash_buckets < 1 << 31):
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
    return progress if callable(progress) else _print_progress if progress else _no_progress


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


def _no_progress(stage: str, done: int, total: int) -> None:
    pass


def _print_progress(stage: str, done: int, total: int) -> None:
    sys.stderr.write(f"\r{stage} {100 * done / max(total, 1):5.1f} %" + ("\n" if done == total else ""))
    sys.stderr.flush()
