"""fastcross predict: probabilities for the rows of a file."""

from argparse import Namespace

import numpy as np

from fastcross.cli.outputs import check_output, refuse_overwriting
from fastcross.cli.prediction_file import SUFFIXES, prediction_file
from fastcross.cli.printing import bar, report_reading, show
from fastcross.data import read_for_prediction
from fastcross.training.evaluate import predict_batches
from fastcross.training.metrics import probabilities
from fastcross.training.trained import load_model


def predict(args: Namespace) -> int:
    output = check_output(args.output, SUFFIXES, args.run)
    trained = load_model(args.run)
    cache = trained.open_cache(args.cache)
    rows = read_for_prediction(args.data, cache, on_error=args.on_error)
    refuse_overwriting(output, rows.paths)
    done = 0
    with prediction_file(output, cache.encoder.classes) as file, bar("predict", None) as shown:
        for logits, _ in predict_batches(trained.model, rows):
            file.write(np.arange(done + 1, done + 1 + len(logits)), None, probabilities(logits).numpy())
            done += len(logits)
            shown.update(len(logits))
    report_reading(rows)
    show(f"{done:,} predictions: {output}")
    return 0
