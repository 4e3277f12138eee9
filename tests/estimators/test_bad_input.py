"""What cannot be fitted or predicted is one clear error, which names what and where, and changes nothing."""

import re

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from sklearn.exceptions import NotFittedError

from fastcross import DCN, DCNClassifier, DCNRegressor
from tests.estimators.helpers import SMALL, clicks


@pytest.fixture(scope="module")
def fitted():
    return DCNClassifier(**SMALL).fit(clicks(), "clicked")


def test_a_table_without_the_columns_of_training(fitted):
    table = clicks()
    with pytest.raises(ValueError, match="the table: no column age, tags; the columns are city, clicked"):
        fitted.predict(table.drop(columns=["age", "tags"]))
    with pytest.raises(ValueError, match="the table of eval_set: no column city; the columns are age, tags, clicked"):
        DCNClassifier(**SMALL).fit(table, "clicked", eval_set=(table.drop(columns="city"), "clicked"))
    with pytest.raises(ValueError, match="X has 2 features, but DCNClassifier is expecting 3 features as input"):
        fitted.predict(np.zeros((4, 2)))


def test_names_that_are_there_twice(fitted):
    table = clicks()
    table.columns = ["age", "age", "tags", "clicked"]
    with pytest.raises(ValueError, match="X: a column is there twice: age"):
        fitted.fit(table, "clicked")
    arrow = pa.Table.from_arrays([pa.array([1.0]), pa.array([2.0])], names=["a", "a"])
    with pytest.raises(ValueError, match="X: a column is there twice: a"):
        fitted.predict(arrow)


def test_values_of_several_types(fitted):
    table = clicks()
    table["city"] = pd.Series(["Rome", 7, None, True] * 100, dtype=object)
    message = (
        "X: column city holds values of several types: str in row 1, int in row 2, bool in row 4; make them one type"
    )
    with pytest.raises(ValueError, match=message):
        DCNClassifier(**SMALL).fit(table, "clicked")
    with pytest.raises(ValueError, match=message):
        fitted.predict(table)


def test_dicts_of_unequal_columns():
    columns = {"a": [1.0, 2.0], "b": [1.0]}
    with pytest.raises(ValueError, match=r"X: the columns must have as many rows; got \{'a': 2, 'b': 1\}"):
        DCNClassifier(**SMALL).fit(columns, [0, 1])


@pytest.mark.parametrize("kind", [DCNClassifier, DCNRegressor])
def test_labels_that_are_missing(kind):
    table = clicks().astype({"clicked": float})
    table.loc[6, "clicked"] = np.nan
    message = "X: Input y contains NaN: the label clicked is missing in row 7, of 400"
    with pytest.raises(ValueError, match=message):
        kind(**SMALL).fit(table, "clicked")
    with pytest.raises(ValueError, match=message):
        kind(**SMALL).fit(table.drop(columns="clicked"), table.clicked)
    words = table.clicked.map({0.0: "no", 1.0: "yes"})
    with pytest.raises(ValueError, match=message):
        kind(**SMALL).fit(table.drop(columns="clicked"), words)


def test_labels_that_cannot_be_learned():
    table = clicks()
    with pytest.raises(ValueError, match=r"needs at least two classes; the label clicked has one class, 1"):
        DCNClassifier(**SMALL).fit(table.assign(clicked=1), "clicked")
    with pytest.raises(ValueError, match="the label clicked must hold numbers; got 'Rome'"):
        DCNRegressor(**SMALL).fit(table.assign(clicked="Rome"), "clicked")
    with pytest.raises(ValueError, match="X: no column price; the columns are age, city, tags, clicked"):
        DCNClassifier(**SMALL).fit(table, "price")
    with pytest.raises(ValueError, match=r"requires y to be passed, .* the columns are age, city, tags$"):
        DCNClassifier(**SMALL).fit(table.drop(columns="clicked"))
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        DCNClassifier(**SMALL).fit(table, [0, 1])
    with pytest.raises(
        ValueError, match=r"the table of eval_set, row 1: the label \(column clicked\) must be 0 or 1; got 2"
    ):
        DCNClassifier(**SMALL).fit(table, "clicked", eval_set=(table.assign(clicked=2), "clicked"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w[:5], r"sample_weight must be \(400,\), one for each row of X; got \(5,\)"),
        (lambda w: np.where(np.arange(400) == 3, -2, w), "at least 0; got -2 in row 4 of X"),
        (lambda w: np.where(np.arange(400) == 3, np.nan, w), "at least 0; got nan in row 4 of X"),
        (lambda w: w.astype(str) + "kg", "sample_weight must hold numbers; got"),
        (lambda w: "mass", "X: no column mass to weigh rows by; the columns are age, city, tags"),
        (lambda w: 0 * w, "is zero in all 360 rows of the training part"),
    ],
    ids=["length", "negative", "nan", "text", "name", "zero"],
)
def test_weights_that_are_none(change, message):
    with pytest.raises(ValueError, match=message):
        DCNClassifier(**SMALL).fit(clicks(), "clicked", sample_weight=change(np.ones(400)))


@pytest.mark.parametrize("kind", [DCNClassifier, DCNRegressor])
def test_what_is_not_fitted(kind, tmp_path):
    estimator = kind(**SMALL)
    for call in (estimator.predict, estimator.save, estimator.export):
        with pytest.raises(NotFittedError, match=f"This {kind.__name__} instance is not fitted yet"):
            call(tmp_path / "x.onnx")
    with pytest.raises(NotFittedError):
        estimator.score(clicks(), "clicked")


def test_a_path_and_a_table_at_once(tmp_path):
    table, path = clicks(), tmp_path / "t.parquet"
    table.to_parquet(path)
    estimator = DCNClassifier(**SMALL)
    with pytest.raises(ValueError, match=r"X is the file .*t\.parquet, and y a Series beside it: name a column of it"):
        estimator.fit(path, table.clicked)
    with pytest.raises(ValueError, match="and sample_weight a ndarray beside it: name a column of it"):
        estimator.fit(path, "clicked", np.ones(400))
    with pytest.raises(ValueError, match="and eval_set a tuple beside it: the rows of a file are divided by split"):
        estimator.fit(path, "clicked", eval_set=(table, "clicked"))
    with pytest.raises(ValueError, match=r"X is a table, and eval_set the file .*: give both as tables"):
        estimator.fit(table, "clicked", eval_set=(path, "clicked"))
    with pytest.raises(ValueError, match=r"eval_set must be \(X, y\) or \(X, y, sample_weight\); got DataFrame"):
        estimator.fit(table, "clicked", eval_set=table)


def test_parameters_that_no_model_has():
    with pytest.raises(ValueError, match="the model lr has no option cross_layers"):
        DCNClassifier("lr", cross_layers=2).fit(clicks(), "clicked")
    with pytest.raises(ValueError, match="there is no model 'xgboost'"):
        DCNClassifier("xgboost").fit(clicks(), "clicked")
    with pytest.raises(ValueError, match="columns names label 'price', and the call 'clicked'"):
        DCNClassifier(**SMALL, columns={"label": "price"}).fit(clicks(), "clicked")
    with pytest.raises(ValueError, match="positive_weight is for a label of two classes"):
        DCNRegressor(**SMALL, positive_weight=2.0).fit(clicks().assign(clicked=np.arange(400)), "clicked")


def test_a_fit_that_fails_leaves_what_was_fitted(fitted):
    before, table = fitted.predict_proba(clicks()), clicks()
    with pytest.raises(ValueError, match="no column"):
        fitted.fit(np.zeros((4, 2)), "clicked")
    with pytest.raises(ValueError, match="the table of eval_set"):
        fitted.fit(table[["age", "clicked"]], "clicked", eval_set=(table[["city", "clicked"]], "clicked"))
    assert list(fitted.feature_names_in_) == ["age", "city", "tags"]
    np.testing.assert_array_equal(fitted.predict_proba(clicks()), before)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"crosslayers": 2}, "DCNClassifier has no parameter crosslayers; did you mean cross_layers?"),
        ({"min_frequency": "3"}, "min_frequency must be an integer or None; got '3'"),
        ({"hash_buckets": 1.5}, "hash_buckets must be an integer or None; got 1.5"),
        ({"split_seed": "a"}, "split_seed must be an integer; got 'a'"),
        ({"columns": 5}, "columns must be Columns, Mapping or None; got 5"),
        ({"deep_layers": 32}, "deep_layers must be a sequence of integers; got 32"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_parameters_of_another_type_are_named(parameters, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        DCNClassifier(**SMALL | parameters).fit(clicks(), "clicked")


def test_layers_that_are_written_as_on_the_command_line(tmp_path):
    estimator = DCNClassifier(**SMALL | {"deep_layers": "8x2"}).fit(clicks(), "clicked")
    assert estimator.run_.trained.model.config.deep_layers == (8, 8)
    assert DCN([3], 1, deep_layers="32,16").config.deep_layers == (32, 16)
    with pytest.raises(
        TypeError,
        match=r"deep_layers must be a sequence of integers; expected layer sizes as in .* got 'wide'",
    ):
        DCN([3], 1, deep_layers="wide")
