"""Dates in a DataFrame: learned from, and the same in predict, ONNX, importance and explanation."""

import numpy as np
import pandas as pd
import pytest

from fastcross import DCNClassifier
from fastcross.data import Encoder, read_for_prediction
from fastcross.explain.explanation import Speller

ROWS = 1000


@pytest.fixture(scope="module")
def fitted():
    rng = np.random.default_rng(0)
    at = pd.to_datetime("2019-05-03") + pd.to_timedelta(rng.integers(0, 1500, ROWS), unit="D")
    X = pd.DataFrame({"at": at, "x": rng.normal(size=ROWS)})
    X.loc[::10, "at"] = pd.NaT
    y = ((at.month % 3 == 0) ^ (at.year > 2020)).astype(int)
    return DCNClassifier(random_state=0, epochs=20, batch_size=64).fit(X, y), X, y


def test_month_and_year_are_learned(fitted):
    model, X, y = fitted
    dated = X["at"].notna()
    assert model.score(X[dated], y[dated]) > 0.85  # 0.56 with hour and weekday
    importances = dict(zip(model.feature_names_in_, model.feature_importances_, strict=True))
    assert importances["at"] > 0.8, "all of its parts move together"


def test_onnx_takes_the_date(fitted, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    model, X, _ = fitted
    session = onnxruntime.InferenceSession(model.export(tmp_path / "m.onnx").path)
    raw = {"at": X["at"].to_numpy().astype("datetime64[s]").astype(float), "x": X["x"].to_numpy()}
    np.testing.assert_allclose(session.run(None, raw)[0], model.predict_proba(X)[:, 1], rtol=0, atol=1e-6)


def test_days_are_spelt_as_dates(fitted, tmp_path):
    model, X, _ = fitted
    model.save(tmp_path / "run")
    encoder = Encoder.load(tmp_path / "run/encoder")
    (batch,) = read_for_prediction(model._table(X.iloc[1:2]), encoder)
    edges = np.zeros((len(encoder.schema.dense_names), 1))
    edges[encoder.schema.dense_names.index("at.days")] = batch.dense[0, encoder.schema.dense_names.index("at.days")]
    spell, moment = Speller(encoder, edges), X["at"].iloc[1]
    row = spell.row(batch)
    assert (row["at.days"], row["at.year"], row["at.month"]) == (
        f"{moment:%Y-%m-%d}",
        str(moment.year),
        str(moment.month),
    )
    field = encoder.schema.names.index("at.days")
    assert (spell(field, 0), spell(field, 1)) == (f"below {moment:%Y-%m-%d}", f"{moment:%Y-%m-%d} and above")
