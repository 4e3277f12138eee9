"""What a model and its training are unless you say otherwise: arithmetic on the number of rows and the columns.

The paper's own values are for 45 million rows (section 4.2). From five million training rows on they stand; on fewer
rows they overfit, and ten passes are too few steps. So, with n training rows:

deep_layers    two of ½ √n units, to a power of two within 32 … 1024: in the second a weight for four rows
cross_layers   one, two from a hundred thousand rows on, three from a million: high degrees overfit first
dropout        0.1
batch_norm     no: batches of a few dozen rows give a coarse mean, and without it the model costs a third less
embedding_dim  the paper's 6 · cardinality^(1/4), and at most 8 (from 100,000 rows on 8 · √(n / 100,000))
embedding_std  0.1: an id starts near the mean of its column, not as a guess that many rows must correct
deep_start     0: the deep network comes into the logits after the cross network, or it takes all that both could learn
min_frequency  one per hundred thousand rows, within 3 … 10: the row of an id is learned from so many rows at least
batch_size     n / 40 within 32 … 512: forty steps per epoch, and 512 from twenty thousand rows on
epochs         100; fewer if that is more than fifty million rows in all, but at least the paper's 10
patience       8 evaluations, one per epoch: those of few validation rows are noisy

A logistic regression takes larger steps, and more of them. All else is as in the paper: Adam at 0.001, constant,
without weight decay. How the constants were chosen, and on which tables: docs/estimators.md.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

PRESETS = ("data", "paper")
LARGE = 5_000_000  # training rows from which on the paper's values stand
PAPER_FREQUENCY = 10
FOLLOW = ("batch_size", "epochs", "patience", "lr")  # fields of the training that follow from the data
LINEAR = {"lr": 0.01, "epochs": 300}  # a logistic regression


def defaults(model: str, rows: int, cardinalities: Sequence[int] = ()) -> dict[str, Any]:
    """By name, what the number of training rows and the columns say of a model and its training.

    A name that the model has not is left to the caller, who knows the models. Empty: everything is the paper's.

    Args:
        model: its name.
        rows: of the training part.
        cardinalities: number of ids of each categorical column, multi-valued ones last.
    """
    if rows >= LARGE:
        return {}
    width = power_of_two(math.sqrt(rows) / 2, 32, 1024)
    most = max(8, round(8 * math.sqrt(rows / 100_000)))
    found: dict[str, Any] = {
        "deep_layers": [width, width],
        "cross_layers": clamp(int(math.log10(max(rows, 1))) - 3, 1, 6),
        "dropout": 0.1,
        "batch_norm": False,
        "embedding_dim": [min(most, paper_dim(cardinality)) for cardinality in cardinalities],
        "embedding_std": 0.1,
        "deep_start": 0.0,
        "input_dim": width,
        "cross_dim": width,
        "batch_size": clamp(rows // 40, 32, 512),
        "epochs": clamp(50_000_000 // max(rows, 1), 10, 100),
        "patience": 8,
    }
    if not cardinalities:
        del found["embedding_dim"], found["embedding_std"]
    elif model == "fm":
        del found["embedding_dim"], found["embedding_std"]  # it has one dimension for all columns, and starts at 0.01
    return found | LINEAR if model == "lr" else found


def least_frequency(rows: int) -> int:
    """Rarer values share one id."""
    return PAPER_FREQUENCY if rows >= LARGE else clamp(rows // 100_000, 3, PAPER_FREQUENCY)


def paper_dim(cardinality: int) -> int:
    """Section 4.2: 6 · cardinality^(1/4), rounded to the nearest integer."""
    return max(1, round(6 * cardinality**0.25))


def clamp(value: int, low: int, high: int) -> int:
    return min(high, max(low, value))


def power_of_two(value: float, low: int, high: int) -> int:
    """The nearest one by its logarithm."""
    return clamp(2 ** round(math.log2(max(value, 1))), low, high)


def spelled(chosen: Mapping[str, Any]) -> str:
    """As in "dropout 0.2, deep_layers 64,64"."""
    texts = {name: _widths(value) if isinstance(value, list) else value for name, value in chosen.items()}
    return ", ".join(f"{name} {value}" for name, value in texts.items())


def _widths(values: Sequence[int]) -> str:
    """Of dozens of columns, the range."""
    return ",".join(map(str, values)) if len(values) <= 6 else f"{min(values)} to {max(values)}"
