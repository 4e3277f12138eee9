"""Parquet, and tables in memory, which are the rows of a Parquet file without the file; the columns are declared or
inferred."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from fastcross.data.blocks import BadRow, Block, as_text, find_bad, first_sentence, to_block
from fastcross.data.columns import Columns, DataError
from fastcross.data.formats.reading import Head, Problems, check_distinct, check_present
from fastcross.data.inference import Finding, Sample, complete

PLACES = (Path("the table"), Path("the table of eval_set"))  # what errors call tables in memory
SAMPLED_ROWS = 1 << 14  # from the beginning and the end of each row group that is looked at
PIECES = 8  # that columns are inferred from, beside the first
PARQUET_ROWS = 1 << 16  # of a block


@dataclass(frozen=True)
class ParquetTable:
    columns: Columns
    labelled: bool = True
    carry: str | None = None
    findings: tuple[Finding, ...] = ()
    looked_at: str = ""

    def chunks(self, path: Path, problems: Problems) -> Iterator[tuple[tuple[int, pa.Table], int]]:
        names = self.columns.read(self.labelled, self.carry)
        row = 1
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                check_present(path, names, tuple(file.schema_arrow.names))
                size = path.stat().st_size
                for batch in file.iter_batches(PARQUET_ROWS, columns=list(names)):
                    row += len(batch)
                    done = size * (row - 1) // max(file.metadata.num_rows, 1)
                    yield (row - len(batch), pa.Table.from_batches([batch])), done
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path}, row {row}: not a readable Parquet file ({first_sentence(error)})") from None

    def block(self, path: Path, chunk: tuple[int, pa.Table], problems: Problems) -> Block:
        row, table = chunk

        def convert(rows: pa.Table) -> Block:
            return to_block(rows, self.columns, labelled=self.labelled, carry=self.carry)

        try:
            return convert(table)
        except (pa.ArrowException, BadRow):
            pass
        bad = find_bad(lambda lo, hi: convert(table.slice(lo, hi - lo)), 0, len(table), ())
        for i in sorted(bad):
            problems.add(path, row + i, bad[i], unit="row")
        keep = pa.array([i for i in range(len(table)) if i not in bad], pa.int64())
        return replace(convert(table.take(keep)), skipped=sorted(bad))

    def schema(self, path: Path) -> pa.Schema:
        return pyarrow.parquet.read_schema(path)

    def with_columns(self, columns: Columns, labelled: bool) -> ParquetTable:
        return replace(self, columns=columns, labelled=labelled)


@dataclass(frozen=True)
class Parquet:
    missing: tuple[str, ...] = ()

    def recognises(self, head: Head) -> bool:
        return head.start.startswith(b"PAR1") or head.path.suffix.lower() in (".parquet", ".pq")

    def open(self, path: Path, columns: Columns | None) -> ParquetTable:
        sample = sample_parquet(path)
        completed, findings = complete(columns or Columns(), sample)
        return ParquetTable(completed, findings=findings, looked_at=sample.where)

    def open_for_prediction(self, path: Path, columns: Columns, labelled: bool, carry: str | None) -> ParquetTable:
        return ParquetTable(columns, labelled, carry)


FORMAT = Parquet()


@dataclass(frozen=True)
class MemoryTable(ParquetTable):
    """Tables one after the other, each known by its place."""

    tables: dict[Path, pa.Table] = field(default_factory=dict)

    @classmethod
    def open(cls, tables: Sequence[pa.Table], columns: Columns | None) -> MemoryTable:
        """Columns that are not declared are inferred from the rows of the first table."""
        sample = sample_table(tables[0])
        completed, findings = complete(columns or Columns(), sample)
        placed = dict(zip(PLACES, tables, strict=False))
        for place, table in placed.items():
            check_distinct(place, table.column_names)
            check_present(place, completed.read(True), tuple(table.column_names))
        return cls(completed, findings=findings, looked_at=sample.where, tables=placed)

    @classmethod
    def for_prediction(cls, table: pa.Table, columns: Columns, labelled: bool, carry: str | None) -> MemoryTable:
        check_distinct(PLACES[0], table.column_names)
        check_present(PLACES[0], columns.read(labelled, carry), tuple(table.column_names))
        return cls(columns, labelled, carry, tables={PLACES[0]: table})

    def schema(self, path: Path) -> pa.Schema:
        return self.tables[path].schema

    def chunks(self, path: Path, problems: Problems) -> Iterator[tuple[tuple[int, pa.Table], int]]:
        table = self.tables[path].select(list(self.columns.read(self.labelled, self.carry)))
        for first in range(0, len(table), PARQUET_ROWS):
            rows = table.slice(first, PARQUET_ROWS)
            yield (first + 1, rows), table.nbytes * (first + len(rows)) // len(table)


def sample_parquet(path: Path) -> Sample:
    pieces = {}  # by the number of the first row
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            check_distinct(path, file.schema_arrow.names)
            groups, rows, schema = file.metadata.num_row_groups, file.metadata.num_rows, file.schema_arrow
            starts = [1]
            for group in range(groups):
                starts.append(starts[-1] + file.metadata.row_group(group).num_rows)
            for group in sorted({round(i * (groups - 1) / PIECES) for i in range(PIECES + 1)}) if groups else ():
                last = (starts[group + 1] - starts[group] - 1) // SAMPLED_ROWS
                wanted = {0, last // 2, last} if groups < 3 else {0}  # the later ones cost a reading of the whole group
                for i, batch in enumerate(file.iter_batches(SAMPLED_ROWS, row_groups=[group])):
                    if i in wanted:
                        pieces[starts[group] + i * SAMPLED_ROWS] = pa.Table.from_batches([batch])
                    if i == max(wanted):
                        break
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file ({first_sentence(error)})") from None
    if not rows:
        raise DataError(f"{path}: the file has no rows")
    return _sample(path, pieces or {1: schema.empty_table()}, rows)


def sample_table(table: pa.Table) -> Sample:
    """As many rows from all over the table as are looked at in a Parquet file of several row groups."""
    check_distinct(PLACES[0], table.column_names)
    if not len(table):
        raise DataError(f"{PLACES[0]}: no rows")
    whole = len(table) <= (PIECES + 1) * SAMPLED_ROWS
    starts = [0] if whole else [(len(table) - SAMPLED_ROWS) * i // PIECES for i in range(PIECES + 1)]
    pieces = {first + 1: table.slice(first, len(table) if whole else SAMPLED_ROWS) for first in starts}
    return _sample(PLACES[0], pieces, len(table))


def _sample(place: Path, pieces: dict[int, pa.Table], rows: int) -> Sample:
    """Of a table with so many rows, the pieces by the numbers of their first ones."""

    def row_of(column: str, value: str) -> int | None:
        for first, piece in pieces.items():
            if (found := pc.index(as_text(piece[column]), value).as_py()) >= 0:
                return first + found
        return None

    table = pa.concat_tables(pieces.values())
    whole = len(table) == rows
    of_all = f"all {rows:,} rows" + ("" if place in PLACES else f" of {place.name}")
    where = of_all if whole else f"{len(table):,} rows from all over {place.name}"
    return Sample(str(place), table, whole, "row", row_of, where, typed=True)
