"""Ids and bins back into what a person would write, through the encoder that made them."""

import numpy as np
import numpy.typing as npt

from fastcross.batch import Batch
from fastcross.data.encoder import Encoder
from fastcross.data.vocabulary import Vocabulary


class Describer:
    """(field, key) -> text, for the fields in the order of x0 and the keys of values.py."""

    def __init__(self, encoder: Encoder, edges: npt.NDArray[np.float64]) -> None:
        self.schema, self.ids, self.edges = encoder.schema, (*encoder.categorical, *encoder.bags), edges
        self.transforms, self.standardise = encoder.columns.transforms, encoder.standardise

    def __call__(self, field: int, key: object) -> str:
        single = len(self.schema.cardinalities)
        if field < single:
            return self._value(field, int(key))  # type: ignore[call-overload]
        if field < len(self.ids):
            assert isinstance(key, tuple)
            return "{" + ", ".join(self._value(field, each) for each in key) + "}"
        return self._range(field - len(self.ids), int(key))  # type: ignore[call-overload]

    def row(self, batch: Batch) -> dict[str, str]:
        """The values of a batch's only row, by field."""
        single = [self._value(f, int(i)) for f, i in enumerate(batch.categorical[0].tolist())]
        bags = [self(len(single) + i, tuple(bag.values.tolist())) for i, bag in enumerate(batch.bags)]
        dense = [f"{self._raw(i, value):.4g}" for i, value in enumerate(batch.dense[0].tolist())]
        return dict(zip(self.schema.names, (*single, *bags, *dense), strict=True))

    def _value(self, field: int, key: int) -> str:
        ids = self.ids[field]
        if not isinstance(ids, Vocabulary):
            return f"#{key}" if key else "(missing)"
        if key == 0:
            return "(rare)"
        text = ids.values[key - 1].as_py()
        return "(missing)" if text is None else str(text)

    def _range(self, column: int, key: int) -> str:
        """A dense field's bin between two edges; several edges may meet in one value."""
        low = self._raw(column, self.edges[column, key - 1]) if key else None
        high = self._raw(column, self.edges[column, key]) if key < self.edges.shape[1] else None
        if low is None:
            return f"below {high:.4g}"
        return f"{low:.4g} and above" if high is None else f"{low:.4g} to {high:.4g}"

    def _raw(self, column: int, value: float) -> float:
        """What stood in the table: the transform of a dense column undone."""
        x = value / float(self.standardise.scale[column] or 1) + float(self.standardise.mean[column])
        return float(np.sign(x) * np.expm1(abs(x))) if self.transforms[column] == "log" else x
