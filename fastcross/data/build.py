"""From the rows of a table to a cache.

The text is parsed once. Parsing (several threads) leaves codes into per-block dictionaries in a spool; then the
number of rows is known, the rows are dealt to the parts, the vocabularies are counted on the training part, and the
codes become ids. Memory holds a few blocks and one column's distinct values at a time, whatever the size of the
input. (Only a label whose values are neither 0 and 1 nor another well-known pair takes a reading of its own.)

The cache is built in a folder beside its final place and moved there when complete.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fastcross._version import __version__
from fastcross.data.cache import FORMAT_VERSION, Cache
from fastcross.data.columns import Columns
from fastcross.data.encoder import Encoder
from fastcross.data.errors import DataError, Problems
from fastcross.data.fit import fit_ids, fit_standardisation
from fastcross.data.formats.table import Table
from fastcross.data.inputs import read_in_order
from fastcross.data.kinds import Values
from fastcross.data.labels import check_both, check_varies, settle
from fastcross.data.split import PARTS, Split, assign_parts
from fastcross.data.spool import Spool
from fastcross.data.write import write_parts
from fastcross.files import building, write_checked_json

Progress = Callable[[str, int, int], None]
MANY = 100_000  # different values of a label that are enough to know that it is a quantity


@dataclass(frozen=True)
class Inputs:
    """What a cache is made from: the places of the rows, their sizes, and how the manifest names them."""

    paths: list[Path]
    sizes: list[int]
    described: list[dict[str, Any]]
    fingerprint: str  # of all that the cache depends on


def build(
    table: Table,
    inputs: Inputs,
    cache_path: Path,
    division: Split,
    configuration: dict[str, Any],
    problems: Problems,
    report: Progress,
    known: Encoder | None = None,
) -> Cache:
    """The cache of a table; with a `known` encoder, one that has grown from it."""
    if table.columns.classes is None and not table.columns.is_regression:
        table = _settle_label(table, inputs, report)
    columns, label = table.columns, table.columns.label or ""
    started = time.time()
    with building(cache_path) as folder:
        spool = Spool(folder / "spool", columns)
        try:
            rows_of_files = _read_all(table, inputs, spool, problems, report)
        except DataError as error:
            raise _explained(error, table) from None
        times = spool.time() if columns.time else None
        part = assign_parts(sum(rows_of_files), division, configuration["seed"], rows_of_files, times)
        label_facts = _quantity(spool, part, label) if columns.is_regression else _classes(spool, part, label)
        weight_facts = {"weight": _weight(spool, part)} if columns.sample_weight else {}
        report("count", 0, 1)
        categorical, bags = fit_ids(spool, part, configuration["min_frequency"], configuration["hash_buckets"], known)
        # Rows to predict need no time: it only divided these.
        columns_of_rows = replace(columns, time=None, time_as="number")
        standardise = known.standardise if known else fit_standardisation(spool, part)
        encoder = Encoder(configuration["format"], columns_of_rows, standardise, categorical, bags)
        files = write_parts(spool, part, encoder.standardise, folder, report)
        shutil.rmtree(spool.folder)
        encoder.save(folder / "encoder")
        manifest = {
            "format_version": FORMAT_VERSION,
            "fastcross": __version__,
            "fingerprint": inputs.fingerprint,
            "inputs": inputs.described,
            "configuration": configuration,
            "schema": encoder.schema.to_dict(),
            "encoder": encoder.fingerprint,
            "sizes": dict(zip(PARTS, np.bincount(part, minlength=3).tolist(), strict=True)),
            "label": {"column": label, "classes": encoder.classes, **label_facts},
            **weight_facts,
            "findings": [finding.to_dict() for finding in table.findings],
            "looked_at": table.looked_at,
            "split": division.describe(columns.time),
            "skipped": {"rows": len(problems), "examples": problems.examples, "truncated": problems.truncated},
            "seconds": round(time.time() - started, 3),
            "files": files,
        }
        write_checked_json(folder / "manifest.json", manifest)
    return Cache.open(cache_path)


def _classes(spool: Spool, part: npt.NDArray[Any], label: str) -> dict[str, Any]:
    counts, classes = _count_classes(spool, part), spool.columns.classes or ()
    check_both(counts.sum(axis=0), classes, label, "")
    check_both(counts[0], classes, label, " of the training part")
    return {"rows": counts.tolist()}


def _quantity(spool: Spool, part: npt.NDArray[Any], label: str) -> dict[str, Any]:
    """Its mean and standard deviation over the training part, by which the model scales it."""
    of_all = np.concatenate([spool.label(i) for i, _ in spool.blocks()])
    check_varies(of_all.min(), of_all.max(), label, "")
    values = of_all[part == 0]
    if not len(values):
        raise DataError(f"the label (column {label}) is absent in all rows of the training part")
    check_varies(values.min(), values.max(), label, " of the training part")
    rows = np.bincount(part, minlength=len(PARTS))
    return {"rows": rows[:, None].tolist(), "mean": float(values.mean()), "deviation": float(values.std())}


def _weight(spool: Spool, part: npt.NDArray[Any]) -> dict[str, Any]:
    name = spool.columns.sample_weight
    total = sum(float(spool.beside(i)["weight"][part[rows] == 0].sum(dtype=np.float64)) for i, rows in spool.blocks())
    rows = int((part == 0).sum())
    if not total > 0:
        raise DataError(f"the weight (column {name}) is zero in all {rows:,} rows of the training part")
    return {"column": name, "mean": total / rows}


def _settle_label(table: Table, inputs: Inputs, report: Progress) -> Table:
    """The table with the classes of its label, or a quantity for one, from a reading of that column alone."""
    label = table.columns.label
    assert label is not None
    only = table.with_columns(Columns(categorical=(label,)), labelled=False)
    counts: Counter[str] = Counter()
    total, before = sum(inputs.sizes), 0
    for path, size in zip(inputs.paths, inputs.sizes, strict=True):
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
    settled = settle(values, label, whole=True, task=table.columns.task)
    assert settled is not None
    return table.with_columns(settled.of(table.columns), labelled=True)


def _read_all(table: Table, inputs: Inputs, spool: Spool, problems: Problems, report: Progress) -> list[int]:
    """Spool every file; returns the rows of each."""
    total, before, rows_of_files = sum(inputs.sizes), 0, []
    for path, size in zip(inputs.paths, inputs.sizes, strict=True):
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


def _count_classes(spool: Spool, part: np.ndarray) -> np.ndarray:
    """(parts, classes): the rows of each."""
    size = len(spool.columns.classes or ())
    counts = np.zeros(len(PARTS) * size, np.int64)
    for i, rows in spool.blocks():
        counts += np.bincount(part[rows] * np.int64(size) + spool.label(i), minlength=len(counts))
    return counts.reshape(len(PARTS), size)
