"""What a server answers from: a run, and where there are items a ranker; it is loaded, and replaced, as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import nn

from fastcross.data.blocks import first_sentence
from fastcross.data.columns import Columns, DataError
from fastcross.data.encoder import Vocabulary
from fastcross.data.formats.reading import Problems, detect_format
from fastcross.data.formats.text import TextTable, read_csv, read_dialect
from fastcross.data.prediction import RowEncoder
from fastcross.explain.explanation import Part, example_parts, mean_x0
from fastcross.files import undisturbed
from fastcross.models.dcn import DCN
from fastcross.models.fold import is_rank_one
from fastcross.serving.linear import Deep, linear_layers
from fastcross.serving.ranker import Ranker
from fastcross.training.metrics import probabilities
from fastcross.training.run_folder import Run, load_model

Array = npt.NDArray[np.float64]
BASELINE_BATCHES, BASELINE_ROWS = 16, 1024  # of the training rows, over which the fields' means are taken
MOST_FIELDS = 64  # of a model whose rows are explained: 42,000 triples
SHOWN = 30  # values of a column that the page suggests


class Column(NamedTuple):
    """An input of the model."""

    name: str
    kind: str  # dense, categorical, multi-valued, weights or date-time
    examples: list[str]  # some of the values that it knows


class Served:
    """A trained run as requests see it.

    Args:
        run: the run folder, or the best.safetensors in it.
        items: a table (CSV, Parquet) of items to rank, or a file that :meth:`Ranker.save` wrote.
        key: the column of the table that holds the items' names; None numbers them from 0.
    """

    def __init__(self, run: str, items: str | None = None, key: str | None = None) -> None:
        self.trained = load_model(run)
        self.model, encoder = self.trained.model, self.trained.encoder
        self.name = Path(run if Path(run).is_dir() else Path(run).parent).absolute().name
        self.encode = RowEncoder(encoder)
        self.device = next(self.model.parameters()).device
        self.classes, self.regression = encoder.classes, encoder.columns.is_regression
        self.output = "prediction" if self.regression else "probability"
        self.unseen: dict[str, int] = {}  # per column, how many values the vocabulary did not know so far
        self.metrics: dict[str, dict[str, float]] = {
            part: values for part, values in (Run(self.trained.path).result or {}).items() if isinstance(values, dict)
        }
        self.ranker = None if items is None else read_ranker(items, key, self)
        self.baseline = self._baseline()
        if isinstance(self.model, DCN) and len(self.model.deep):
            self.model.deep = nn.Sequential(Deep(linear_layers(self.model.deep)))
        self._warm_up()

    @property
    def columns(self) -> list[Column]:
        """In the order of the row encoder."""
        columns, encoder = self.trained.encoder.columns, self.trained.encoder
        vocabularies = (*encoder.categorical, *encoder.bags)
        known = dict(zip((*columns.categories, *(columns.bags or ())), vocabularies, strict=True))
        kinds = {"categorical": columns.categorical, "multi-valued": columns.bags, "dense": columns.dense}
        kinds |= {"date-time": columns.datetimes, "weights": tuple(columns.weights.values())}
        found = []
        for kind, names in kinds.items():
            for name in names or ():
                ids = known.get(name)
                values = ids.values[:SHOWN].to_pylist() if isinstance(ids, Vocabulary) else []
                found.append(Column(name, kind, [value for value in values if value is not None]))
        return found

    @property
    def explainable(self) -> bool:
        """Whether a row's logit has exact parts."""
        if not isinstance(self.model, DCN) or not (self.model.parallel and is_rank_one(self.model)):
            return False
        return len(self.model.embedding.columns()) <= MOST_FIELDS

    def predict(self, rows: Sequence[Mapping[str, Any]]) -> Array:
        """A probability, or a quantity, per row: (n,), or (n, C) for C classes. A DataError names row and column."""
        batch, unseen = self.encode(rows)
        batch = batch.to(self.device)
        with torch.inference_mode():
            logits = self.model(batch.dense, batch.categorical, batch.bags).float().cpu()
            found = (logits.double() if self.regression else probabilities(logits)).numpy()
        finite = np.isfinite(found) if found.ndim == 1 else np.isfinite(found).all(1)
        if not finite.all():
            row = int(np.flatnonzero(~finite)[0]) + 1
            raise DataError(f"row {row}: the model's answer is not a finite number; its values are too large")
        self._count(unseen)
        return found

    def rank(
        self, context: Mapping[str, Any], k: int, items: Sequence[str | int] | None, output: int
    ) -> list[tuple[Any, float]]:
        """The k best items for a context, best first, with their scores: logits, or quantities."""
        assert self.ranker is not None
        batch, unseen = self.ranker.context_encoder([context])
        found = self.ranker.top(batch, k, items=items, output=output)
        if not np.isfinite([score for _, score in found]).all():
            raise DataError("row 1: an item's score is not a finite number; the context's values are too large")
        self._count(unseen)
        return found

    def explain(self, row: Mapping[str, Any], output: int) -> list[Part]:
        """The exact parts of a row's logit, or of its quantity; they add up to it."""
        assert isinstance(self.model, DCN)
        if not 0 <= output < self.model.config.num_outputs:
            raise DataError(f"class must be one of {self.model.config.num_outputs}, from 0; got {output}")
        batch, _ = self.encode([row])
        names = self.trained.encoder.schema.names
        parts = example_parts(self.model, batch.to(self.device), self.baseline, names, output=output)
        if not np.isfinite([part.effect for part in parts]).all():
            raise DataError("row 1: the logit is not a finite number; its values are too large")
        return parts

    def _count(self, unseen: Mapping[str, int]) -> None:
        for name, count in unseen.items():
            self.unseen[name] = self.unseen.get(name, 0) + count

    def _baseline(self) -> torch.Tensor:
        """(d,): the mean of x0 over training rows, if the cache is still there; 0 if not."""
        if not isinstance(self.model, DCN) or not self.explainable:
            return torch.zeros(0)
        try:
            cache = self.trained.open_cache()
        except (ValueError, OSError):  # it is gone, or is another one now
            return self.model.logits.weight.new_zeros(self.model.embedding.out_features).double()
        batches = islice(cache.batches("train", BASELINE_ROWS), BASELINE_BATCHES)
        return mean_x0(self.model, (batch.to(self.device) for batch in batches))

    def _warm_up(self) -> None:
        """The first call of each kind is slow."""
        nothing = dict.fromkeys(self.encode.names)
        for rows in (1, 2, 64):
            self.predict([nothing] * rows)
        if self.ranker is not None and len(self.ranker):
            self.rank(nothing, 1, None, 0)
        if self.explainable:
            self.explain(nothing, 0)
        self.unseen.clear()


def read_ranker(path: str, key: str | None, served: Served) -> Ranker:
    """The ranker of a file of items."""
    if path.endswith(".safetensors"):
        if key is not None:
            raise ValueError(f"--key has no effect on {path}: its items have their names")
        return Ranker.load(path, served.trained)
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    columns = served.trained.encoder.columns
    return Ranker(served.trained, undisturbed(path, lambda: read_table(Path(path), columns, key)), key=key)


def read_table(path: Path, columns: Columns, key: str | None) -> pa.Table:
    """The columns of a CSV or Parquet file that the model reads, typed as in training, and the names."""
    import pyarrow.parquet

    wanted = {*columns.inputs, *columns.weights.values(), *({key} if key else ())}
    try:
        if detect_format(path) == "parquet":
            names = pyarrow.parquet.read_schema(path).names
            return pyarrow.parquet.read_table(path, columns=[name for name in names if name in wanted])
        dialect = read_dialect(path)
        number = pa.int64() if columns.integers else pa.float64()
        numbers = {*(columns.dense or ())} - {*columns.decimals, key}
        types = {name: number if name in numbers else pa.string() for name in dialect.names if name in wanted}
        blocks = TextTable(dialect, columns).chunks(path, Problems())
        parts = [read_csv(block.data, dialect, types) for block, _ in blocks if block.data.strip()]
    except pa.ArrowException as error:
        raise DataError(f"{path}: not a readable table ({first_sentence(error)})") from None
    return pa.concat_tables([*parts, pa.schema(list(types.items())).empty_table()])
