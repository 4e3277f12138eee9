"""DCNClassifier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.utils.validation import check_is_fitted

from fastcross.estimators.base import Array, Estimator

if TYPE_CHECKING:
    import pyarrow as pa

    from fastcross.estimators.rows import Rows


class DCNClassifier(ClassifierMixin, Estimator):
    """A class among two or more, with the parameters of :class:`~fastcross.estimators.parameters.Parameters`.

    ``classes_`` holds the labels in their order.
    """

    task = "classification"

    def _rows(self, table: pa.Table, y: Any, weight: Any, place: str, known: Rows | None = None) -> Rows:
        from fastcross.estimators.rows import classified

        return classified(table, y, weight, place, type(self).__name__, None if known is None else known.classes)

    def _set_classes(self, classes: Array | None) -> None:
        self.classes_ = classes

    def predict_proba(self, X: Any) -> Array:
        """(rows, classes): the probability of each class, in the order of ``classes_``."""
        from fastcross.training.metrics import probabilities

        p = probabilities(self._predict(X).logits).numpy()
        return np.stack([1 - p, p], axis=1) if p.ndim == 1 else p

    def predict(self, X: Any) -> Array:
        """(rows,): the likeliest class."""
        check_is_fitted(self, "run_")
        assert self.classes_ is not None
        return self.classes_[self.predict_proba(X).argmax(axis=1)]

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """The accuracy; y may name a column of X."""
        from fastcross.estimators.tables import is_path

        if is_path(X):
            return self._predict(X, labelled=True).summarise(regression=False)["accuracy"]
        X, y = self._with_labels(X, y)
        return float(accuracy_score(y, self.predict(X), sample_weight=sample_weight))
