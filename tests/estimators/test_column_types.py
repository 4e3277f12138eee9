"""A declared type is a declaration, and what is lost on the way in is a warning."""

import warnings

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from fastcross import DataWarning, DCNClassifier
from fastcross.cli.main import main
from tests.estimators.helpers import SMALL

ROWS = 400
DICTIONARY = pd.ArrowDtype(pa.dictionary(pa.int32(), pa.string()))


def table(**columns):
    rng = np.random.default_rng(0)
    x = rng.normal(size=ROWS)
    return pd.DataFrame({"x": x, **columns, "clicked": (x + rng.normal(size=ROWS) > 0).astype(int)})


def draw(values, seed=1):
    return np.random.default_rng(seed).choice(np.array(values, dtype=object), ROWS)


def fitted(data, **parameters):
    with warnings.catch_warnings():
        warnings.simplefilter("error", DataWarning)
        return DCNClassifier(**SMALL | parameters).fit(data, "clicked")


def kinds(estimator):
    columns = estimator.run_.trained.encoder.columns
    return {name: kind for kind in ("dense", "categorical", "bags", "datetimes") for name in getattr(columns, kind)}


def test_texts_are_categories_even_if_they_are_digits():
    """Thirteen strays refused MovieLens, and a text that had not been seen raised at prediction."""
    users = draw([str(i) for i in range(5)])
    data = table(user=users, film=pd.Series(draw(["17", "4", "x9"])))
    estimator = fitted(data)
    assert kinds(estimator) == {"x": "dense", "user": "categorical", "film": "categorical"}
    new = data.assign(user="somebody new")
    with pytest.warns(DataWarning, match=r"the model does not know, .*: user 100.0% \(in training 0.0%\)"):
        assert np.isfinite(estimator.predict_proba(new)).all()
    arrow = pa.table({"x": data.x, "user": pa.array(users), "clicked": data.clicked})
    assert kinds(fitted(arrow))["user"] == "categorical"


def test_types_of_pandas_and_arrow_are_declarations():
    rng = np.random.default_rng(3)
    numbers = rng.integers(0, 3, ROWS)
    flags = pd.array(draw([True, False]), dtype="boolean")
    flags[::9] = None
    data = table(
        cut=pd.cut(rng.normal(size=ROWS), [-9, -1, 0, 1, 9]),
        intervals=pd.arrays.IntervalArray.from_breaks([0, 1, 2, 3]).take(numbers),
        code=pd.Categorical(rng.integers(0, 3, ROWS) * 1.5),
        mixed=pd.Categorical.from_codes(numbers, [1, "a", (2, 3)]),
        flag=flags,
        month=pd.period_range("2020-01", periods=ROWS, freq="D"),
        zeros=pd.arrays.SparseArray(rng.integers(0, 2, ROWS) * rng.normal(size=ROWS)),
        lasts=pd.to_timedelta(rng.integers(0, 10**6, ROWS), unit="s"),
        arrow=pd.Series(pa.array(draw(["u", "v"])).dictionary_encode(), dtype=DICTIONARY),
    )
    estimator = fitted(data)
    assert kinds(estimator) == {
        **dict.fromkeys(("cut", "intervals", "code", "mixed", "flag", "arrow"), "categorical"),
        **dict.fromkeys(("x", "zeros", "lasts"), "dense"),
        "month": "datetimes",
    }
    assert estimator.run_.trained.encoder.categorical[0].values.to_pylist()[0].startswith("(")
    with warnings.catch_warnings():
        warnings.simplefilter("error", DataWarning)
        assert np.isfinite(estimator.predict_proba(data.head(3))).all()


def test_times_are_seconds():
    seconds = np.random.default_rng(0).integers(0, 10**6, ROWS)
    data = table(lasts=pd.to_timedelta(seconds, unit="s"))
    by_number = table(lasts=seconds.astype(float) + 0.0)
    ours, theirs = (fitted(d, columns={"dense": ["x", "lasts"]}).predict_proba(d) for d in (data, by_number))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("chosen", "categories"),
    [
        (["a"], {"a"}),
        ([0, 2], {"x", "b"}),
        ([False, True, True], {"a", "b"}),
        ("from_dtype", set()),
        ([], set()),
    ],
)
def test_categorical_features_as_in_scikit_learn(chosen, categories):
    rng = np.random.default_rng(0)
    data = table(a=rng.integers(0, 3, ROWS), b=rng.integers(0, 4, ROWS)).round({"x": 0})
    found = kinds(fitted(data, categorical_features=chosen))
    assert {name for name, kind in found.items() if kind == "categorical"} == categories
    assert set(found) == {"x", "a", "b"}
    array = data[["x", "a", "b"]].to_numpy()
    if not isinstance(chosen, str) and "a" not in chosen:
        estimator = DCNClassifier(**SMALL, categorical_features=chosen).fit(array, data.clicked)
        renamed = {"x0": "x", "x1": "a", "x2": "b"}
        assert {renamed[n] for n, kind in kinds(estimator).items() if kind == "categorical"} == categories


def test_categorical_features_from_dtype_and_of_files(tmp_path):
    rng = np.random.default_rng(0)
    data = table(a=pd.Categorical(rng.integers(0, 3, ROWS)), b=rng.integers(0, 4, ROWS), c=draw(["u", "v"]))
    expected = {"x": "dense", "a": "categorical", "b": "dense", "c": "categorical"}
    assert kinds(fitted(data, categorical_features="from_dtype")) == expected
    data.to_csv(tmp_path / "t.csv", index=False)
    estimator = DCNClassifier(**SMALL, categorical_features=["x"]).fit(tmp_path / "t.csv", "clicked")
    assert kinds(estimator)["x"] == "categorical"


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (["z"], "categorical_features name no column z; the columns are x"),
        ([3], "categorical_features must be positions below 1; got 3"),
        ([True, False], "categorical_features must be a mask of 1 columns; got 2"),
        (0.5, r"categorical_features must be names, positions, a mask or \"from_dtype\"; got 0.5"),
    ],
)
def test_categorical_features_that_are_none(chosen, message):
    with pytest.raises(ValueError, match=message):
        fitted(table(), categorical_features=chosen)


def test_numbers_in_the_spelling_of_people_are_numbers(tmp_path):
    value = np.random.default_rng(0).integers(1000, 9_999_999, ROWS) / 100
    written = {
        "dollars": [f"${v:,.2f}" for v in value],
        "percent": [f"{v:.2f} %" for v in value],
        "comma": [f"{v:.2f}".replace(".", ",") for v in value],
        "euros": [f"{v:,.2f} €".replace(",", "_").replace(".", ",").replace("_", ".") for v in value],
    }
    plain = table(v=value)
    expected = fitted(plain).predict_proba(plain)
    for name, texts in written.items():
        data = table(v=texts)
        estimator = fitted(data)
        assert kinds(estimator)["v"] == "dense", name
        np.testing.assert_array_equal(estimator.predict_proba(data), expected, err_msg=name)
        np.testing.assert_array_equal(estimator.predict_proba(plain), expected, err_msg=name)
        data.to_csv(tmp_path / "t.csv", index=False)
        from_file = DCNClassifier(**SMALL).fit(tmp_path / "t.csv", "clicked")
        np.testing.assert_array_equal(from_file.predict_proba(tmp_path / "t.csv"), expected, err_msg=name)
    with pytest.raises(ValueError, match="column v must be a number; got"):
        estimator.predict(data.assign(v="1200.5"))


def test_columns_that_say_nothing_are_warned_of():
    rng = np.random.default_rng(0)
    data = table(
        user=[str(i) for i in rng.integers(0, 2000, ROWS)],
        vector=[list(rng.normal(size=3)) for _ in range(ROWS)],
        price=[f"${i}" if i % 40 else "on request" for i in range(ROWS)],
    )
    with pytest.warns(DataWarning) as caught:
        DCNClassifier(**SMALL | {"min_frequency": 10}).fit(data, "clicked")
    said = "\n".join(str(warning.message) for warning in caught)
    assert "fewer than 10 training rows each (min_frequency): user (" in said
    assert "column vector (multi-valued): lists of numbers are taken for sets" in said
    assert "column price (categorical): 10 of 400 values are no numbers, such as 'on request'" in said
    assert kinds(fitted(table(user=data.user), min_frequency=1))["user"] == "categorical"


def test_a_text_that_never_comes_again_is_warned_of():
    data = pd.concat([table()] * 3, ignore_index=True).assign(name=[f"n{i}" for i in range(3 * ROWS)])
    with pytest.warns(DataWarning, match=r"column name \(dropped\): another text in each of 1,200 rows: it is left"):
        DCNClassifier(**SMALL).fit(data, "clicked")


def test_types_that_differ_between_fit_and_predict(tmp_path, capsys):
    """Ints, then bools: probabilities moved by .067 without a word."""
    data = table(flag=np.random.default_rng(0).integers(0, 2, ROWS))
    estimator = fitted(data)
    with pytest.warns(DataWarning, match="column flag held numbers in training and holds booleans here"):
        estimator.predict_proba(data.assign(flag=data.flag.astype(bool)))
    estimator.save(tmp_path / "run")
    data.assign(flag=data.flag.astype(bool)).to_parquet(tmp_path / "new.parquet")
    assert main(["predict", str(tmp_path / "run"), str(tmp_path / "new.parquet"), "--output", f"{tmp_path}/p.npy"]) == 0
    assert "warning: column flag held numbers in training and holds booleans here" in capsys.readouterr().err
    with warnings.catch_warnings():
        warnings.simplefilter("error", DataWarning)
        estimator.predict_proba(data.assign(flag=data.flag.astype(float)))


def test_values_that_were_as_rare_in_training_are_no_news():
    users = [f"u{i}" for i in np.random.default_rng(0).zipf(1.3, ROWS)]
    data = table(user=users)
    estimator = fitted(data, min_frequency=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DataWarning)
        estimator.predict_proba(data)
        estimator.predict_proba(data.head(1))
