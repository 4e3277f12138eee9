"""Tables in memory: the rows of a Parquet file, without the file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from fastcross.data.blocks import Block, as_text
from fastcross.data.columns import Columns
from fastcross.data.errors import DataError, Problems
from fastcross.data.formats.parquet import PARQUET_ROWS, ParquetTable
from fastcross.data.formats.samples import PARQUET_ROWS as SAMPLED_ROWS
from fastcross.data.formats.samples import PIECES
from fastcross.data.formats.table import check_distinct, check_present
from fastcross.data.inference import Finding, Sample, complete

PLACES = (Path("the table"), Path("the table of eval_set"))  # what errors call them


@dataclass(frozen=True)
class MemoryTable:
    """Tables one after the other, each known by its place; what a block is, is Parquet's business."""

    tables: dict[Path, pa.Table]
    parquet: ParquetTable

    @classmethod
    def open(cls, tables: Sequence[pa.Table], columns: Columns | None) -> MemoryTable:
        """Columns that are not declared are inferred from the rows of the first table."""
        sample = sample_table(tables[0])
        completed, findings = complete(columns or Columns(), sample)
        placed = dict(zip(PLACES, tables, strict=False))
        for place, table in placed.items():
            check_distinct(place, table.column_names)
            check_present(place, completed.read(True), tuple(table.column_names))
        return cls(placed, ParquetTable(completed, findings=findings, looked_at=sample.where))

    @classmethod
    def for_prediction(cls, table: pa.Table, columns: Columns, labelled: bool, carry: str | None) -> MemoryTable:
        check_distinct(PLACES[0], table.column_names)
        check_present(PLACES[0], columns.read(labelled, carry), tuple(table.column_names))
        return cls({PLACES[0]: table}, ParquetTable(columns, labelled, carry))

    @property
    def columns(self) -> Columns:
        return self.parquet.columns

    @property
    def findings(self) -> tuple[Finding, ...]:
        return self.parquet.findings

    @property
    def looked_at(self) -> str:
        return self.parquet.looked_at

    def chunks(self, path: Path, problems: Problems) -> Iterator[tuple[tuple[int, pa.Table], int]]:
        table = self.tables[path].select(list(self.columns.read(self.parquet.labelled, self.parquet.carry)))
        for first in range(0, len(table), PARQUET_ROWS):
            rows = table.slice(first, PARQUET_ROWS)
            yield (first + 1, rows), table.nbytes * (first + len(rows)) // len(table)

    def block(self, path: Path, chunk: tuple[int, pa.Table], problems: Problems) -> Block:
        return self.parquet.block(path, chunk, problems)

    def with_columns(self, columns: Columns, labelled: bool) -> MemoryTable:
        return replace(self, parquet=self.parquet.with_columns(columns, labelled))


def sample_table(table: pa.Table) -> Sample:
    """As many rows from all over the table as are looked at in a Parquet file of several row groups."""
    check_distinct(PLACES[0], table.column_names)
    if not len(table):
        raise DataError(f"{PLACES[0]}: no rows")
    whole = len(table) <= (PIECES + 1) * SAMPLED_ROWS
    last = 0 if whole else len(table) - SAMPLED_ROWS
    starts = sorted({last * i // PIECES for i in range(PIECES + 1)})
    pieces = [table] if whole else [table.slice(first, SAMPLED_ROWS) for first in starts]

    def row_of(column: str, value: str) -> int | None:
        for first, piece in zip(starts, pieces, strict=True):
            if (found := pc.index(as_text(piece[column]), value).as_py()) >= 0:
                return first + found + 1
        return None

    found = pa.concat_tables(pieces)
    where = f"all {len(found):,} rows" if whole else f"{len(found):,} rows from all over {PLACES[0]}"
    return Sample(str(PLACES[0]), found, whole, "row", row_of, where)
