"""fastcross evaluate, predict, export, serve and convert: the uses of a trained model."""

import contextlib
import csv
import os
import warnings
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet

from fastcross.cli.parser import refuse
from fastcross.cli.printing import bar, bars, print_metrics, report_reading, show
from fastcross.data.prediction import PredictionRows, read_for_prediction
from fastcross.extras import require
from fastcross.files import atomic
from fastcross.training.metrics import evaluate as evaluate_part
from fastcross.training.metrics import predict_batches, predict_rows, probabilities
from fastcross.training.run_folder import Run, load_model, write_json

Array = npt.NDArray[Any]
SUFFIXES = (".csv", ".parquet", ".npy")  # of predictions
RUN_FILES = ("config.json", "result.json", "metrics.csv", "encoder/encoder.json")


def evaluate(args: Namespace) -> int:
    """The metrics of a model on a part of its data, on another cache, or on a file."""
    reads_file = bool(args.data) and not Path(args.data).is_dir()
    if reads_file:
        refuse(args, "a file, all rows of which are evaluated", ("part",))
    else:
        refuse(args, "a cache, whose rows are known to be good", ("on_error",))
    lost = False
    output = check_output(args.output, (".json",), args.run) if args.output else None
    trained = load_model(args.run)
    if reads_file:
        if args.cache:
            trained.open_cache(args.cache)
        with bars("evaluate") as progress:
            rows = read_for_prediction(
                args.data, trained.encoder, on_error=args.on_error, labelled=True, progress=progress
            )
            if output:
                refuse_overwriting(output, rows.paths)
            predicted = predict_rows(trained.model, rows)
        found = {args.data: predicted.summarise(regression=trained.schema.task == "regression")}
        lost = report_reading(rows)
    else:
        cache = trained.open_other_cache(args.data) if args.data else trained.open_cache(args.cache)
        with bar("evaluate", cache.sizes.get(args.part)) as shown:
            found = {args.part: evaluate_part(trained.model, cache, args.part, progress=shown.update)}
    print_metrics(found)
    if output:
        write_json(output, found)
    return 1 if lost else 0


def predict(args: Namespace) -> int:
    """Predict probabilities for the rows of a file, one output row per input row."""
    output = check_output(args.output, SUFFIXES, args.run)
    if args.id_column and output.suffix == ".npy":
        raise ValueError(f"--id-column has no effect on {output.name}: an array holds numbers alone")
    trained = load_model(args.run)
    if args.cache:
        trained.open_cache(args.cache)
    with bars() as progress:
        rows = read_for_prediction(
            args.data, trained.encoder, on_error=args.on_error, id_column=args.id_column, progress=progress
        )
        refuse_overwriting(output, rows.paths)
        classes = rows.encoder.classes
        regression = trained.schema.task == "regression"
        logits = (found.logits for found in predict_batches(trained.model, rows))
        found = ((each.double() if regression else probabilities(each)).numpy() for each in logits)
        with prediction_file(output, classes, args.id_column) as file:
            for numbers, ids, probability in align(rows, found):
                file.write(numbers + 1, ids, probability)
    lost = report_reading(rows)
    of_what = f"the class {classes[1]}" if len(classes) == 2 else f"the classes {', '.join(classes)}"
    what = f"of {rows.encoder.columns.label}" if regression else f"the probability of {of_what}"
    show(f"{rows.rows:,} predictions, {what}: {output}")
    return 1 if lost else 0


def align(rows: PredictionRows, found: Iterator[Array]) -> Iterator[tuple[Array, pa.Array | None, Array]]:
    """Numbers, ids and probabilities of all input rows, in order. A skipped row has no id, and NaN."""
    position, skipped_before = 0, 0
    waiting: list[pa.Array] = []
    shape: tuple[int, ...] = ()
    for probability in found:
        size, shape = len(probability), probability.shape[1:]
        skipped = np.array(rows.skipped[skipped_before:], np.int64)
        # All skipped rows before the last of these rows are known.
        good = np.setdiff1d(np.arange(position, position + size + len(skipped)), skipped)[:size]
        numbers = np.arange(position, good[-1] + 1)
        aligned = np.full((len(numbers), *shape), np.nan)
        aligned[good - position] = probability
        yield numbers, _take_ids(rows, waiting, good, numbers), aligned
        skipped_before += len(numbers) - size
        position = int(good[-1]) + 1
    if rest := rows.skipped[skipped_before:]:
        nothing = _take_ids(rows, waiting, np.empty(0, np.int64), np.array(rest))
        yield np.array(rest), nothing, np.full((len(rest), *shape), np.nan)


def _take_ids(rows: PredictionRows, waiting: list[pa.Array], good: Array, numbers: Array) -> pa.Array | None:
    """The ids of the next rows that were read, aligned with ``numbers``."""
    if rows.id_column is None:
        return None
    waiting += rows.id_blocks
    rows.id_blocks.clear()
    ids = pa.concat_arrays(waiting)
    waiting[:] = [ids.slice(len(good))]
    places = np.full(len(numbers), -1)
    places[good - numbers[0]] = np.arange(len(good))
    return ids.take(pa.array(places, mask=places < 0))


class Writer(Protocol):
    def write(self, rows: Array, ids: pa.Array | None, probability: Array) -> None:
        """The next rows: their numbers, their ids, and (n,) or (n, C) probabilities, NaN where a row has none."""


@contextlib.contextmanager
def prediction_file(path: Path, classes: Sequence[str], id_column: str | None = None) -> Iterator[Writer]:
    """Writes predictions in the format of the file's suffix. The file appears when the block ends without error.

    CSV and Parquet have the columns `row` (from 1), the id column if there is one, and probabilities: of the second of
    two classes, or of each class. A regression's column is `prediction`. Names of classes are in the columns' names,
    and a column `class` has the likeliest class. A row that could not be read has its number only. NumPy's format is an
    array (rows,) or (rows, classes), with NaN for such rows.
    """
    names = _column_names(classes, id_column)
    with atomic(path) as temporary, contextlib.ExitStack() as stack:
        if path.suffix == ".npy":
            array = _ArrayFile(stack.enter_context(open(temporary, "wb")), len(classes))
            yield array
            array.finish()
        elif path.suffix == ".parquet":
            yield _ParquetFile(temporary, names, classes, stack)
        else:
            file = stack.enter_context(open(temporary, "w", newline="", encoding="utf-8"))
            yield _CsvFile(file, names, classes)


def _column_names(classes: Sequence[str], id_column: str | None) -> list[str]:
    plain = tuple(classes) == ("0", "1")
    shown = classes[1:] if len(classes) == 2 else classes
    predicted = ["probability"] if plain else [*(f"probability_{name}" for name in shown), "class"]
    predicted = predicted if classes else ["prediction"]
    if id_column in predicted:
        raise ValueError(f"the id column {id_column} has the name of a column of the output")
    if id_column is None:
        return ["row", *predicted]
    return ["row_number" if id_column == "row" else "row", id_column, *predicted]


class _ArrayFile:
    """An .npy file that grows. Its header is rewritten at the end, when the number of rows is known."""

    def __init__(self, file: IO[bytes], num_classes: int) -> None:
        self.file, self.shape, self.rows = file, () if num_classes in (0, 2) else (num_classes,), 0
        self._write_header()
        self.start = file.tell()

    def write(self, rows: Array, ids: pa.Array | None, probability: Array) -> None:
        self.file.write(np.ascontiguousarray(probability, np.float64).tobytes())
        self.rows += len(rows)

    def finish(self) -> None:
        self.file.seek(0)
        self._write_header()
        assert self.file.tell() == self.start, "NumPy leaves room in the header for any number of rows"

    def _write_header(self) -> None:
        description = {"descr": "<f8", "fortran_order": False, "shape": (self.rows, *self.shape)}
        np.lib.format.write_array_header_1_0(self.file, description)


class _ParquetFile:
    """A Parquet file, opened with the first rows, which have the type of the ids."""

    def __init__(self, path: Path, names: list[str], classes: Sequence[str], stack: contextlib.ExitStack) -> None:
        self.path, self.names, self.classes, self.stack = path, names, classes, stack
        self.file: pyarrow.parquet.ParquetWriter | None = None

    def write(self, rows: Array, ids: pa.Array | None, probability: Array) -> None:
        columns = [pa.array(rows, pa.int64()), *([ids] if ids is not None else [])]
        by_class = probability.reshape(len(probability), -1).T
        columns += [pa.array(column, pa.float64(), from_pandas=True) for column in by_class]
        if self.names[-1] == "class":
            columns.append(pa.array(_likeliest(probability, self.classes), pa.string()))
        table = pa.Table.from_arrays(columns, self.names)
        if self.file is None:
            self.file = self.stack.enter_context(pyarrow.parquet.ParquetWriter(self.path, table.schema))
        self.file.write_table(table)


class _CsvFile:
    def __init__(self, file: IO[str], names: list[str], classes: Sequence[str]) -> None:
        self.writer, self.names, self.classes = csv.writer(file, lineterminator="\n"), names, classes
        self.writer.writerow(names)

    def write(self, rows: Array, ids: pa.Array | None, probability: Array) -> None:
        by_class = probability.reshape(len(probability), -1).T.tolist()
        columns: list[Iterable[Any]] = [rows.tolist(), *([ids.to_pylist()] if ids is not None else [])]
        columns += [["" if p != p else f"{p:.9g}" for p in column] for column in by_class]
        if self.names[-1] == "class":
            columns.append(_likeliest(probability, self.classes))
        self.writer.writerows(zip(*columns, strict=True))


def _likeliest(probability: Array, classes: Sequence[str]) -> list[str | None]:
    """The name of each row's likeliest class; None for a row without probabilities."""
    absent = np.isnan(probability if probability.ndim == 1 else probability[:, 0])
    choice = probability >= 0.5 if probability.ndim == 1 else np.nan_to_num(probability).argmax(axis=1)
    return [None if missing else classes[int(i)] for i, missing in zip(choice, absent, strict=True)]


def export(args: Namespace) -> int:
    """Write the model and its encoder to a file for serving."""
    from fastcross.interop.serving import export_run  # with torch.export, which takes a while to import
    from fastcross.models.fold import fold

    output = check_output(args.output, (".pt2", ".onnx"), args.run)
    if output.suffix == ".pt2":
        refuse(args, "a .pt2 file, which takes encoded values always", ("encoded",))
    trained = load_model(args.run, "cpu")
    model = fold(trained.model) if args.fold else trained.model
    with warnings.catch_warnings():
        if not args.debug:  # PyTorch's exporter warns about its own code
            warnings.simplefilter("ignore")
        exported = export_run(model, trained.encoder, output, encoded=args.encoded)
    beside = f", its encoder: {exported.encoder}" if exported.encoder else ""
    show(f"exported: {output}{beside}; its inputs, for any batch size:")
    ports = (*exported.inputs, exported.output)
    widths = [
        max(len(text) for text in texts) for texts in zip(*((p.name, p.type, p.shape) for p in ports), strict=True)
    ]
    for port in ports:
        if port is exported.output:
            show("its output:")
        columns = (text.ljust(width) for text, width in zip((port.name, port.type, port.shape), widths, strict=True))
        show(f"  {'  '.join(columns)}  {port.meaning}")
    return 0


def convert(args: Namespace) -> int:
    """Convert the checkpoints of a run from one file to shards, or back."""
    from fastcross.distributed.sharding import convert_run  # with torch.distributed.checkpoint

    names = convert_run(Run(args.run), args.to, Path(args.output))
    show(f"checkpoints {' and '.join(names)}, {args.to}: {args.output}")
    return 0


def check_output(output: str | Path, suffixes: Sequence[str], run: str | Path) -> Path:
    """The path to write to. Raises ValueError if it is not writable, or would overwrite a file of the run.

    This is called before minutes of prediction, not after.
    """
    path = Path(output)
    if path.suffix not in suffixes:
        raise ValueError(f"the output must end in {' or '.join(suffixes)}; got {path.name}")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} to write {path.name} to")
    if path.is_dir():
        raise ValueError(f"the output must be a file; {path} is a folder")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ValueError(f"the folder {path.parent} cannot be written to")
    refuse_overwriting(path, (Path(run) / name for name in RUN_FILES))
    return path


def refuse_overwriting(output: Path, inputs: Iterable[str | Path]) -> None:
    """Raise if the output is one of the inputs, also by another name or link."""
    for file in inputs:
        if output.exists() and Path(file).exists() and output.samefile(file):
            raise ValueError(f"the output {output} would overwrite {file}, which is read; choose another file")


def serve(args: Namespace) -> int:
    require("serving", "serve")
    from fastcross.serving.served import Served
    from fastcross.serving.server import serve as serve_run

    if args.key and not args.items:
        raise ValueError("--key has no effect without --items")
    serve_run(
        lambda: Served(args.run, args.items, args.key),
        host=args.host,
        port=args.port,
        threads=args.threads or max(1, (os.cpu_count() or 1) - 1),
        log=show,
        max_batch=args.max_batch,
        max_delay=args.max_delay_ms / 1000,
        max_queue=args.queue,
    )
    return 0
