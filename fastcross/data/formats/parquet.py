"""Parquet; the columns are declared or inferred."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from fastcross.data.blocks import Block, to_block
from fastcross.data.columns import Columns
from fastcross.data.errors import BadRow, DataError, Problems
from fastcross.data.formats.samples import sample_parquet
from fastcross.data.formats.table import Head, check_present, find_bad, first_sentence
from fastcross.data.inference import Finding, complete

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
