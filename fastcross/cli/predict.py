"""fastcross predict: probabilities for the rows of a file."""

from argparse import Namespace
from pathlib import Path

import numpy as np
from torch import Tensor

from fastcross.cli.printing import report_reading, show
from fastcross.data import read_for_prediction
from fastcross.files import atomic
from fastcross.training.evaluate import predict as predict_logits
from fastcross.training.metrics import probabilities
from fastcross.training.trained import load_model


def predict(args: Namespace) -> int:
    output = Path(args.output)
    if output.suffix not in (".csv", ".npy"):
        raise ValueError(f"the output must end in .csv or .npy; got {output.name}")
    trained = load_model(args.run)
    rows = read_for_prediction(args.data, trained.open_cache(args.cache), on_error=args.on_error)
    logits, _ = predict_logits(trained.model, rows)
    write_probabilities(output, probabilities(logits))
    report_reading(rows)
    show(f"{len(logits):,} predictions: {output}")
    return 0


def write_probabilities(output: Path, probability: Tensor) -> None:
    """One line per row: the probability of a click, or of each class."""
    with atomic(output) as temporary:
        if output.suffix == ".npy":
            with open(temporary, "wb") as file:
                np.save(file, probability.numpy())
            return
        columns = ["probability"] if probability.dim() == 1 else [f"class_{i}" for i in range(probability.shape[1])]
        table = probability.reshape(len(probability), -1).numpy()
        np.savetxt(temporary, table, fmt="%.9g", delimiter=",", header=",".join(columns), comments="")
