"""From a table to a model: the one that `fastcross train` makes of the file, whatever holds the rows."""

import pickle
import time

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import fastcross
from fastcross import DCNClassifier, DCNRegressor
from fastcross.cli.main import main
from fastcross.models import MODELS
from fastcross.training import load_model
from tests.estimators.helpers import SMALL, clicks

FLAGS = "--cross-layers 1 --deep-layers 8 --embedding-dim 2 --epochs 2 --batch-size 64 --min-frequency 2 --threads 1"
SAME = [*FLAGS.split(), "--preset", "paper", "--split", "random:0.9,0.1,0"]


@pytest.fixture(scope="module")
def fitted():
    return DCNClassifier(**SMALL).fit(clicks(), "clicked")


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("label", ["clicked", "price"])
def test_fit_is_train_bit_for_bit(tmp_path, label, weighted):
    table = clicks().assign(price=np.random.default_rng(1).normal(size=400) * 5e4, w=np.arange(400) % 3 + 0.5)
    others = ["price" if label == "clicked" else "clicked"] + ([] if weighted else ["w"])
    table = table.drop(columns=others)
    pq.write_table(pa.Table.from_pandas(table, preserve_index=False), tmp_path / "t.parquet")
    weight = ["--weight", "w"] if weighted else []
    arguments = ["train", "--data", str(tmp_path / "t.parquet"), "--cache", str(tmp_path / "cache"), "--label", label]
    assert main([*arguments, "--run", str(tmp_path / "run"), *SAME, *weight]) == 0
    kind = DCNClassifier if label == "clicked" else DCNRegressor
    estimator = kind(**SMALL).fit(table, label, sample_weight="w" if weighted else None)
    theirs, ours = load_model(tmp_path / "run").model.state_dict(), estimator.run_.trained.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    features = table.drop(columns=label)
    given = kind(**SMALL).fit(
        features.drop(columns="w") if weighted else features,
        table[label],
        sample_weight=table.w.to_numpy() if weighted else None,
    )
    again = given.run_.trained.model.state_dict()
    assert all(torch.equal(again[name], theirs[name]) for name in theirs)
    by_path = kind(**SMALL).fit(tmp_path / "t.parquet", label, sample_weight="w" if weighted else None)
    again = by_path.run_.trained.model.state_dict()
    assert all(torch.equal(again[name], theirs[name]) for name in theirs)


def test_whatever_holds_the_rows(fitted):
    table = clicks()
    expected = fitted.predict_proba(table)
    arrow = pa.Table.from_pandas(table, preserve_index=False)
    forms = {
        "arrow": arrow,
        "batch": arrow.combine_chunks().to_batches()[0],
        "dict": {name: table[name].to_numpy() for name in table},
    }
    for name, form in forms.items():
        estimator = DCNClassifier(**SMALL).fit(form, "clicked")
        np.testing.assert_array_equal(estimator.predict_proba(form), expected, err_msg=name)
        np.testing.assert_array_equal(fitted.predict_proba(form), expected, err_msg=name)
    assert list(fitted.feature_names_in_) == ["age", "city", "tags"]


def test_rows_of_polars(fitted):
    polars = pytest.importorskip("polars")
    table = clicks()
    form = polars.from_arrow(pa.Table.from_pandas(table, preserve_index=False))
    np.testing.assert_array_equal(fitted.predict_proba(form), fitted.predict_proba(table))
    again = DCNClassifier(**SMALL).fit(form.drop("clicked"), form["clicked"])
    np.testing.assert_array_equal(again.predict_proba(form), fitted.predict_proba(table))
    mixed = form.with_columns(polars.Series("city", [1, "a"] * 200, dtype=polars.Object))
    with pytest.raises(ValueError, match="X: column city holds values of several types: int in row 1, str in row 2"):
        fitted.predict(mixed)


def test_columns_are_inferred_and_told(fitted, capsys):
    assert "tags  multi-valued several values with | between them" in fitted.report_
    assert capsys.readouterr().out == ""
    declared = {"dense": ["age"], "categorical": ["tags"], "drop": ["city"]}
    DCNClassifier(**SMALL, columns=declared, verbose=True).fit(clicks(), "clicked")
    said = capsys.readouterr().out
    assert "tags  categorical  declared" in said
    assert "step 10: train loss" in said


def test_unseen_and_missing_values_as_in_the_command_line(fitted, tmp_path):
    new = clicks(40, seed=9).drop(columns="clicked")
    new.loc[3, "city"] = "Atlantis"
    new.loc[4, "age"] = np.nan
    new.loc[5, "tags"] = None
    fitted.save(tmp_path / "run")
    new.to_parquet(tmp_path / "new.parquet")
    assert main(["predict", str(tmp_path / "run"), str(tmp_path / "new.parquet"), "--output", f"{tmp_path}/p.npy"]) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "p.npy"), fitted.predict_proba(new)[:, 1])
    np.testing.assert_array_equal(fitted.predict_proba(tmp_path / "new.parquet"), fitted.predict_proba(new))


def test_saved_loaded_pickled(fitted, tmp_path):
    table = clicks()
    fitted.save(tmp_path / "run")
    assert (tmp_path / "run" / "curves.png").stat().st_size > 1000
    content = pickle.dumps(fitted)
    assert b"torch" not in content.replace(b'"backend": "torch"', b"")  # no tensors, and no code of theirs
    for copy in (DCNClassifier.load(tmp_path / "run"), pickle.loads(content)):
        np.testing.assert_array_equal(copy.predict_proba(table), fitted.predict_proba(table))
        assert copy.classes_.tolist() == [0, 1]
        assert copy.classes_.dtype == fitted.classes_.dtype
        assert copy.get_params() | {"device": "auto"} == fitted.get_params()
        assert copy.score(table, "clicked") == fitted.score(table, "clicked")
    with pytest.raises(ValueError, match=r"is there already; save\(path, overwrite=True\) replaces a run"):
        fitted.save(tmp_path / "run")
    DCNClassifier(**SMALL | {"random_state": 1}).fit(table, "clicked").save(tmp_path / "run", overwrite=True)
    assert DCNClassifier.load(tmp_path / "run").random_state == 1
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="is no run folder"):
        fitted.save(tmp_path / "other", overwrite=True)
    with pytest.raises(ValueError, match="the label is one of binary; DCNRegressor is for regression"):
        DCNRegressor.load(tmp_path / "run")


def test_a_run_of_the_command_line_is_loaded(tmp_path):
    table = clicks().assign(clicked=np.where(clicks().clicked, "yes", "no"))
    table.to_csv(tmp_path / "t.csv", index=False)
    arguments = ["train", "--data", str(tmp_path / "t.csv"), "--cache", str(tmp_path / "cache"), "--label", "clicked"]
    assert main([*arguments, "--run", str(tmp_path / "run"), *SAME]) == 0
    estimator = DCNClassifier.load(tmp_path / "run")
    assert set(estimator.predict(table)) <= {"no", "yes"}
    assert estimator.score(table, "clicked") == pytest.approx(estimator.score(tmp_path / "t.csv"))
    assert (estimator.model, estimator.epochs, estimator.cross_layers) == ("dcn", 2, 1)


@pytest.mark.parametrize("model", list(MODELS))
def test_every_model(model):
    X = np.random.default_rng(0).normal(size=(200, 3))
    estimator = DCNClassifier(model, epochs=2, threads=1, random_state=1).fit(
        X, np.array(["a", "b", "c"])[np.arange(200) % 3]
    )
    assert estimator.predict_proba(X).shape == (200, 3)
    assert set(estimator.predict(X)) <= {"a", "b", "c"}


def test_eval_set_tells_when_to_stop():
    table, other = clicks(), clicks(100, seed=5)
    settings = SMALL | {"lr": 0.5, "epochs": 40, "patience": 2, "monitor": "auc"}
    estimator = DCNClassifier(**settings).fit(table, "clicked", eval_set=(other, "clicked"))
    assert estimator.result_["stopped_early"]
    assert "the table trains, that of eval_set validates; rows: train 400, validation 100" in estimator.report_
    labels = other.clicked.rename("another name")
    features = other.drop(columns="clicked")
    weighted = DCNClassifier(**SMALL).fit(
        table.drop(columns="clicked"), table.clicked, np.ones(400), [(features, labels, np.full(100, 2.0))]
    )
    assert weighted.result_["validation"]["auc"] > 0


def test_exported_it_serves_raw_values(fitted, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    fitted.export(tmp_path / "model.onnx")
    table = clicks(50, seed=3).fillna({"age": 0.0, "city": "Rome"})
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    inputs = {port.name: table[port.name].to_numpy() for port in session.get_inputs()}
    inputs = {name: x.astype(object) if name != "age" else x for name, x in inputs.items()}
    (p,) = session.run(["probability"], inputs)
    np.testing.assert_allclose(p, fitted.predict_proba(table)[:, 1], atol=1e-6)


def test_names_are_looked_up_at_their_first_use():
    assert fastcross.DCNClassifier is DCNClassifier
    assert "DCNRegressor" in dir(fastcross)


def test_a_single_row_takes_two_milliseconds_and_no_threads(monkeypatch):
    rng = np.random.default_rng(0)
    numbers, words = rng.normal(size=(600, 6)), rng.choice(list("abcdefgh"), (600, 8))
    table = pd.DataFrame(numbers).add_prefix("n").join(pd.DataFrame(words).add_prefix("c"))
    estimator = DCNClassifier(max_steps=1, threads=1).fit(table, np.arange(600) % 2)
    monkeypatch.setattr("fastcross.data.blocks.ThreadPoolExecutor", None)
    row = table.head(1)
    seconds = []
    for _ in range(100):
        begun = time.process_time()
        estimator.predict_proba(row)
        seconds.append(time.process_time() - begun)
    assert min(seconds) <= 0.003  # 2 ms on a core of its own
