"""Numbers on their way into a model: what is chosen for a column, and what comes out at its oddest."""

import numpy as np
import pytest

pytest.importorskip("pyarrow")
import pyarrow as pa

from fastcross.data import Columns, DataError, Encoder, prepare, read_for_prediction
from fastcross.data.numbers import WIDEST
from fastcross.data.prediction import RowEncoder

N = 3000
RNG = np.random.default_rng(0)
ODD = [0.0, -0.0, 1e-30, -1e-30, 1.5, 1e6, -1e9, 3e38, -3e38, 2.0, 7.0, 99.0, np.nan]
TABLES = {
    "normal": RNG.normal(size=N),
    "lognormal": np.exp(3 * RNG.normal(size=N)),
    "Cauchy": 1e-5 * RNG.standard_cauchy(N),
    "money": np.where(RNG.random(N) < 0.9, 0, np.exp(12 + 2 * RNG.normal(size=N))),
    "one outlier": np.where(np.arange(N) == 7, 1e30, RNG.normal(size=N)),
    "gaps": np.where(RNG.random(N) < 0.2, np.nan, RNG.normal(5, 2, N)),
    "constant": np.full(N, 0.1),
    "rare flag": (np.arange(N) % 500 == 0).astype(float),
    "few": RNG.choice([1, 2, 7], N).astype(float),
}


def table(rows=slice(None)):
    columns = {name: pa.array(values[rows], from_pandas=True) for name, values in TABLES.items()}
    return pa.table({"label": np.arange(N)[rows] % 2, **columns})


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    columns = Columns.declare("label", dense=[name for name in TABLES if name != "few"])
    return prepare([table()], tmp_path_factory.mktemp("numbers") / "cache", columns=columns, split="time:1,0,0")


def record(cache, name):
    return cache.encoder.numbers.records[cache.encoder.columns.dense.index(name)]


def test_what_is_chosen(cache):
    logged = {name for name in TABLES if record(cache, name).log}
    assert logged == {"lognormal", "Cauchy", "money", "one outlier"}, "a rare flag has tails that no logarithm mends"
    assert cache.schema.dense_names[-1] == "gaps.missing"
    assert cache.schema.categorical_names == ("few.level",)
    batch = next(cache.batches("train", N))
    x = dict(zip(cache.schema.dense_names, batch.dense.double().numpy().T, strict=True))
    for name in TABLES:
        assert np.abs(x[name]).max() <= WIDEST
        if name not in ("constant", "rare flag", "one outlier"):  # the others are not cut off
            there = ~np.isnan(TABLES[name])
            np.testing.assert_allclose([x[name][there].mean(), x[name][there].std()], [0, 1], atol=1e-5)
    assert (x["constant"] == 0).all()
    np.testing.assert_array_equal(x["gaps.missing"], np.isnan(TABLES["gaps"]))
    assert (x["gaps"][np.isnan(TABLES["gaps"])] == 0).all(), "the mean"
    ordinary = np.delete(x["one outlier"], 7)
    assert ordinary.std() > 0.3, "one value does not press all others together"


def test_the_report_says_what_was_chosen(cache):
    assert "lognormal    dense        declared; sign(x) · log(1 + |x| / " in cache.report
    assert "gaps         dense        declared; standardised, " in cache.report
    assert "missing values flagged" in cache.report
    assert (
        "few          dense        integers with few values: 3; categories, too (4 ids); standardised" in cache.report
    )


def odd_table():
    """Every odd value in every column."""
    return pa.table({name: pa.array(ODD, from_pandas=True) for name in TABLES})


def test_rows_by_whichever_way_are_the_same(cache, tmp_path):
    cache.encoder.save(tmp_path / "encoder")
    (batch,) = read_for_prediction(odd_table(), Encoder.load(tmp_path / "encoder"))
    assert batch.dense.isfinite().all()
    assert batch.dense.abs().max() <= WIDEST
    rows = [{name: value if value == value else None for name in TABLES} for value in ODD]
    of_rows, unseen = RowEncoder(cache.encoder)(rows)
    assert of_rows.dense.equal(batch.dense)
    assert of_rows.categorical.equal(batch.categorical)
    assert (batch.categorical[:, 0] > 0).tolist() == [value in (2.0, 7.0) for value in ODD]
    assert unseen == {"few.level": len(ODD) - 3}
    with pytest.raises(DataError, match="column normal must be finite; got inf"):
        list(read_for_prediction(pa.table({name: [np.inf] for name in TABLES}), cache))


def test_onnx_is_the_same(cache, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from fastcross.interop.serving import export_run
    from tests.interop.test_serving import model_of

    model = model_of(cache.encoder)
    session = onnxruntime.InferenceSession(export_run(model, cache.encoder, tmp_path / "model.onnx").path)
    raw = {name: np.array(ODD) for name in TABLES}
    (found,) = session.run(["probability"], raw)
    (batch,) = read_for_prediction(odd_table(), cache)
    expected = model(batch.dense, batch.categorical).double().sigmoid().detach().numpy()
    assert len(set(np.round(expected, 6).tolist())) > 5
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    (beyond,) = session.run(["probability"], {name: np.array([np.inf, -np.inf]) for name in TABLES})
    np.testing.assert_allclose(beyond, found[[ODD.index(3e38), ODD.index(-3e38)]], rtol=0, atol=1e-6)


@pytest.mark.parametrize("transform", ["log", "standard"])
def test_transforms_that_are_asked_for(tmp_path, transform):
    names = ("lognormal", "gaps")
    columns = Columns("label", names, (), (), transform=transform)
    batch = next(prepare([table()], tmp_path / "cache", columns=columns, split="time:1,0,0").batches("train", N))
    for i, name in enumerate(names):
        x = TABLES[name]
        x = np.copysign(np.log1p(np.abs(x)), x) if transform == "log" else x
        expected = np.nan_to_num((x - np.nanmean(x)) / np.nanstd(x), nan=0.0)
        np.testing.assert_allclose(batch.dense[:, i], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(batch.dense[:, 2], np.isnan(TABLES["gaps"]))


def test_numbers_as_they_are(tmp_path):
    columns = Columns("label", ("normal", "gaps"), (), (), transform="none")
    cache = prepare([table()], tmp_path / "cache", columns=columns, split="time:1,0,0")
    (batch,) = read_for_prediction(pa.table({"normal": [1e30, -5.0], "gaps": [None, 2.5]}), cache)
    np.testing.assert_array_equal(batch.dense, np.array([[1e30, 0, 1], [-5, 2.5, 0]], np.float32))


def test_what_is_chosen_depends_on_the_training_part_alone(tmp_path):
    half = N // 2
    spoilt = table().to_pydict()
    spoilt["normal"][half:] = [1e9 * value for value in spoilt["normal"][half:]]
    caches = [
        prepare([rows], tmp_path / str(i), columns="label", split="time:0.5,0.25,0.25")
        for i, rows in enumerate((table(), pa.table(spoilt)))
    ]
    assert caches[0].encoder.numbers == caches[1].encoder.numbers


def test_levels_must_be_numbers(tmp_path):
    with pytest.raises(DataError, match="levels must name dense columns; got few"):
        prepare([table()], tmp_path / "cache", columns=Columns("label", ("normal",), ("few",), (), levels=("few",)))


def test_a_stray_value_among_few_integers_makes_them_categories(tmp_path):
    """As a number it would be a bad row."""
    lines = "".join(f"{i % 2},{'?!' if i == 900 else i % 5}\n" for i in range(1000))
    (tmp_path / "t.csv").write_text(f"label,stars\n{lines}")
    cache = prepare(tmp_path / "t.csv", tmp_path / "cache")
    assert cache.schema.categorical_names == ("stars",)
    assert "column stars (categorical): 1 of 1,000 values are no numbers, such as '?!'" in cache.report
