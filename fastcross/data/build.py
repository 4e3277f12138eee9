"""`prepare`: from files to a cache.

The text is parsed once. Parsing (several threads) leaves codes into per-block dictionaries in a spool; then the
number of rows is known, the rows are dealt to the parts, the vocabularies are counted on the training part, and the
codes become ids. Memory holds a few blocks and one column's distinct values at a time, whatever the size of the
input.

The cache is built in a folder beside its final place and moved there when complete.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from fastcross._version import __version__
from fastcross.data.atomic import building, reusable
from fastcross.data.cache import FORMAT_VERSION, Cache
from fastcross.data.columns import Columns
from fastcross.data.convert import Block
from fastcross.data.encode import fit_ids, fit_standardisation, write_parts
from fastcross.data.encoder import Encoder
from fastcross.data.errors import DataError, Problems
from fastcross.data.parallel import map_in_order
from fastcross.data.sources import Source, detect_format, open_table, resolve_paths
from fastcross.data.split import PARTS, Split, assign_parts
from fastcross.data.spool import Spool
from fastcross.data.table import Table
from fastcross.files import write_checked_json

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
    on_error: str = "stop",
    progress: Progress | bool = False,
) -> Cache:
    """Read `source` (a file, a pattern, a list) into a cache at `cache_path`, or reuse the cache that is there already.

    A cache is reused when the inputs (sizes and times of change) and the arguments are those it was made with, and
    rebuilt otherwise. split: see Split.parse; columns: see Columns (csv and parquet; a string names the label
    column); on_error: "stop" at the first bad row with a DataError, or "skip" and count them in manifest["skipped"];
    progress: True, or a function of (stage, done, total).
    """
    paths, cache_path = resolve_paths(source), Path(cache_path)
    problems, division = Problems(on_error), Split.parse(split)
    if min_frequency < 0 or (hash_buckets is not None and not 1 <= hash_buckets < 1 << 31):
        raise ValueError(f"need min_frequency >= 0 and 1 <= hash_buckets < 2^31; got {min_frequency}, {hash_buckets}")
    if division.kind == "files" and len(paths) < 2:
        raise ValueError(f'split="files" needs at least two files; got {len(paths)}')
    format = detect_format(paths[0]) if format == "auto" else format
    declared = None if columns is None else Columns.make(columns)
    configuration = {
        "format": format,
        "split": str(division),
        "seed": seed,
        "min_frequency": min_frequency,
        "hash_buckets": hash_buckets,
        "columns": declared.to_dict() if declared else None,
        "on_error": on_error,
    }
    inputs = [{"name": path.name, "size": path.stat().st_size, "mtime_ns": path.stat().st_mtime_ns} for path in paths]
    identity = [FORMAT_VERSION, [(i["size"], i["mtime_ns"]) for i in inputs], configuration]
    fingerprint = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    if reusable(cache_path, fingerprint):
        return Cache.open(cache_path)
    report = progress if callable(progress) else _print_progress if progress else _no_progress
    table = open_table(paths[0], format, declared)
    started = time.time()
    with building(cache_path) as folder:
        spool = Spool(folder / "spool", table.columns)
        rows_of_files = _read_all(table, paths, spool, problems, report)
        part = assign_parts(sum(rows_of_files), division, seed, rows_of_files)
        report("count", 0, 1)
        categorical, bags = fit_ids(spool, part, min_frequency, hash_buckets)
        encoder = Encoder(format, table.columns, fit_standardisation(spool, part), categorical, bags)
        write_parts(spool, part, encoder.standardise, folder, report)
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
            "skipped": {"rows": len(problems), "examples": problems.examples},
            "seconds": round(time.time() - started, 3),
            "files": {str(f.relative_to(folder)): f.stat().st_size for f in sorted(folder.rglob("*.*")) if f.is_file()},
        }
        write_checked_json(folder / "manifest.json", manifest)
    return Cache.open(cache_path)


def read_in_order(table: Table, path: Path, problems: Problems) -> Iterator[tuple[Block, int]]:
    """The blocks of a file, parsed on several threads, in order, with the bytes of the file read so far."""

    def parse(chunk: tuple[Any, int]) -> tuple[Block, Problems, int]:
        found = Problems(problems.on_error)
        return table.block(path, chunk[0], found), found, chunk[1]

    stream = Problems("skip")  # a stream that breaks off is reported after the bad rows before it
    for block, found, read_bytes in map_in_order(parse, table.chunks(path, stream)):
        problems.extend(found)
        yield block, read_bytes
    if stream and problems.on_error == "stop":
        raise DataError(stream.examples[0])
    problems.extend(stream)


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


def _no_progress(stage: str, done: int, total: int) -> None:
    pass


def _print_progress(stage: str, done: int, total: int) -> None:
    sys.stderr.write(f"\r{stage} {100 * done / max(total, 1):5.1f} %" + ("\n" if done == total else ""))
    sys.stderr.flush()
