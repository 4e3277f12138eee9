"""fastcross predict: probabilities for the rows of a file, one row of output for each row of input."""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fastcross.cli.outputs import check_output, refuse_overwriting
from fastcross.cli.prediction_file import SUFFIXES, prediction_file
from fastcross.cli.printing import bars, report_reading, show
from fastcross.data import read_for_prediction
from fastcross.data.prediction_rows import PredictionRows
from fastcross.training.metrics import predict_batches, probabilities
from fastcross.training.run_folder import load_model

Array = npt.NDArray[Any]


def predict(args: Namespace) -> int:
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
    """Numbers, ids and probabilities of all rows of the input in order; a row that was skipped has no id and NaN."""
    position, skipped_before = 0, 0
    waiting: list[pa.Array] = []
    shape: tuple[int, ...] = ()
    for probability in found:
        size, shape = len(probability), probability.shape[1:]
        skipped = np.array(rows.skipped[skipped_before:], np.int64)
        # The last of these rows comes after all that were skipped before it.
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
    """The ids of the next rows that were read, at their places among ``numbers``."""
    if rows.id_column is None:
        return None
    waiting += rows.id_blocks
    rows.id_blocks.clear()
    ids = pa.concat_arrays(waiting)
    waiting[:] = [ids.slice(len(good))]
    places = np.full(len(numbers), -1)
    places[good - numbers[0]] = np.arange(len(good))
    return ids.take(pa.array(places, mask=places < 0))
