"""DCNRegressor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sklearn.base import RegressorMixin
from sklearn.metrics import r2_score

from fastcross.estimators.base import Array, Estimator

if TYPE_CHECKING:
    import pyarrow as pa

    from fastcross.estimators.rows import Rows


class DCNRegressor(RegressorMixin, Estimator):
    """A quantity, learned by its squared error, with the parameters of
    :class:`~fastcross.estimators.parameters.Parameters`."""

    task = "regression"

    def _rows(self, table: pa.Table, y: Any, weight: Any, place: str, known: Rows | None = None) -> Rows:
        from fastcross.estimators.rows import measured

        return measured(table, y, weight, place, type(self).__name__)

    def predict(self, X: Any) -> Array:
        """(rows,): the quantity, in the label's own unit."""
        return self._predict(X).logits.double().numpy()

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """R²; y may name a column of X."""
        from fastcross.estimators.tables import is_path

        if is_path(X):
            return self._predict(X, labelled=True).summarise(regression=True)["r2"]
        X, y = self._with_labels(X, y)
        return float(r2_score(y, self.predict(X), sample_weight=sample_weight))
