"""DCNClassifier and DCNRegressor: what differs between a class and a quantity."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score, r2_score
from torch.nn.functional import logsigmoid

from fastcross.estimators.estimator import Array, Estimator, is_path

if TYPE_CHECKING:
    import pyarrow as pa

    from fastcross.data import Cache
    from fastcross.estimators.rows import Rows


@dataclass(eq=False, repr=False)
class DCNClassifier(ClassifierMixin, Estimator):
    """A class among two or more; ``classes_`` holds the labels in their order. See :class:`Estimator`.

    Args:
        class_weight: how much the rows of each class count, in the loss and in the metrics that are measured meanwhile:
            a dict, or "balanced"; None: all the same.
    """

    task = "classification"

    class_weight: Any = field(default=None, kw_only=True)

    def partial_fit(self, X: Any, y: Any = None, classes: Any = None, sample_weight: Any = None) -> Self:
        """Train one epoch on rows: the first call makes the model, later ones go on from it.

        Args:
            classes: all that will come, for the first call; None: those of y.
        """
        first = not hasattr(self, "run_")
        if first and classes is not None:
            self._set_classes(np.unique(classes))
        try:
            return self._partial_fit(X, y, sample_weight)
        except BaseException:
            if first and hasattr(self, "classes_"):
                del self.classes_
            raise

    def _rows(self, table: pa.Table, y: Any, weight: Any, place: str, classes: Array | None = None) -> Rows:
        from fastcross.estimators.rows import classified

        known = classes if classes is not None else None if hasattr(self, "run_") else getattr(self, "classes_", None)
        return classified(table, y, weight, place, type(self).__name__, known, self.class_weight)

    def _prepare(self, X: Any, y: Any, sample_weight: Any, eval_set: Any, path: Path, split: Any) -> Cache:
        if is_path(X) and self.class_weight is not None:
            raise ValueError(f"X is the file {X}; class_weight is for tables, positive_weight for files, too")
        return super()._prepare(X, y, sample_weight, eval_set, path, split)

    def _set_classes(self, classes: Array | None) -> None:
        self.classes_ = classes

    def decision_function(self, X: Any) -> Array:
        """(rows,) logits of the second of two classes, or (rows, classes)."""
        return self._predict(X).logits.double().numpy()

    def predict_proba(self, X: Any) -> Array:
        """(rows, classes): the probability of each class, in the order of ``classes_``."""
        from fastcross.training.metrics import probabilities

        p = probabilities(self._predict(X).logits).numpy()
        return np.stack([1 - p, p], axis=1) if p.ndim == 1 else p

    def predict_log_proba(self, X: Any) -> Array:
        """The logarithms of :meth:`predict_proba`, exact where a probability is all but 0."""
        z = torch.from_numpy(self.decision_function(X))
        return (torch.stack([logsigmoid(-z), logsigmoid(z)], dim=1) if z.dim() == 1 else z.log_softmax(dim=1)).numpy()

    def predict(self, X: Any) -> Array:
        """(rows,): the likeliest class."""
        z = self.decision_function(X)
        assert self.classes_ is not None
        return self.classes_[(z > 0).astype(int) if z.ndim == 1 else z.argmax(axis=1)]

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """The accuracy; y may name a column of X."""

        if is_path(X):
            return self._predict(X, labelled=True).summarise(regression=False)["accuracy"]
        X, y = self._with_labels(X, y)
        return float(accuracy_score(y, self.predict(X), sample_weight=sample_weight))


class DCNRegressor(RegressorMixin, Estimator):
    """A quantity, learned by its squared error. See :class:`Estimator`."""

    task = "regression"

    def partial_fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Train one epoch on rows: the first call makes the model and the label's scale, later ones go on from it."""
        return self._partial_fit(X, y, sample_weight)

    def _rows(self, table: pa.Table, y: Any, weight: Any, place: str, classes: Array | None = None) -> Rows:
        from fastcross.estimators.rows import measured

        return measured(table, y, weight, place, type(self).__name__)

    def predict(self, X: Any) -> Array:
        """(rows,): the quantity, in the label's own unit."""
        return self._predict(X).logits.double().numpy()

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """R²; y may name a column of X."""

        if is_path(X):
            return self._predict(X, labelled=True).summarise(regression=True)["r2"]
        X, y = self._with_labels(X, y)
        return float(r2_score(y, self.predict(X), sample_weight=sample_weight))


# Of __init__, not of __new__, which takes anything in order to name it: editors and scikit-learn look here.
for kind in (Estimator, DCNClassifier, DCNRegressor):
    options = [*inspect.signature(kind.__init__).parameters.values()][1:]
    kind.__signature__ = inspect.Signature(options)
