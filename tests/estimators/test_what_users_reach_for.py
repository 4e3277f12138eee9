"""What users of scikit-learn reach for: importances, explanations, class weights, logits, histories, going on."""

import fcntl
import os
import pickle
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.feature_selection import SelectFromModel
from sklearn.metrics import roc_auc_score

from fastcross import DCNClassifier, DCNRegressor
from tests.estimators.helpers import SMALL, clicks

MORE = SMALL | {"epochs": 15, "lr": 0.03}


@pytest.fixture(scope="module")
def fitted():
    return DCNClassifier(**MORE).fit(clicks(), "clicked")


def test_feature_importances(fitted, tmp_path):
    """The label follows age and city; tags are noise."""
    importances = fitted.feature_importances_
    assert importances.sum() == pytest.approx(1)
    assert importances.argmax() == 0
    assert importances[0] > 2 * importances[2] > 0
    fitted.save(tmp_path / "run")
    for copy in (pickle.loads(pickle.dumps(fitted)), DCNClassifier.load(tmp_path / "run")):
        np.testing.assert_array_equal(copy.feature_importances_, importances)
    (tmp_path / "run" / "estimator.json").unlink()
    with pytest.raises(ValueError, match="the rows it was trained on are gone"):
        _ = DCNClassifier.load(tmp_path / "run").feature_importances_
    array = clicks()[["age"]].fillna(0).assign(noise=0.0).to_numpy()
    selected = SelectFromModel(DCNClassifier(**MORE)).fit(array, clicks().clicked)
    assert selected.get_support().tolist() == [True, False]


def test_explain(fitted):
    table = clicks()
    found = fitted.explain(table)
    assert (found.rows, sorted(found.names)) == (400, ["age", "age.missing", "city", "tags"])
    assert sum(found.degrees) + found.unexplained == pytest.approx(1, abs=1e-4)
    assert {*found.strongest(1)[0].fields} <= {"age", "age.missing", "city", "tags"}
    with pytest.raises(ValueError, match=r"explain takes apart the cross network of a DCN .*; got dnn"):
        DCNClassifier("dnn", deep_layers=[4], epochs=1).fit(table, "clicked").explain(table)


def test_class_weight():
    table = clicks()
    table = pd.concat([table[table.clicked == 0], table[table.clicked == 1].head(30)], ignore_index=True)
    plain, balanced, by_hand = (
        DCNClassifier(**MORE, class_weight=weight).fit(table, "clicked")
        for weight in (None, "balanced", {0: len(table) / 2 / (table.clicked == 0).sum(), 1: len(table) / 60})
    )
    assert balanced.predict(table).mean() > 2 * plain.predict(table).mean()
    np.testing.assert_allclose(balanced.predict_proba(table), by_hand.predict_proba(table), rtol=1e-6)
    weights = np.where(table.clicked == 1, len(table) / 60, len(table) / 2 / (table.clicked == 0).sum())
    weighted = DCNClassifier(**MORE).fit(table, "clicked", sample_weight=weights)
    np.testing.assert_allclose(balanced.predict_proba(table), weighted.predict_proba(table), rtol=1e-6)
    named = DCNClassifier(**MORE, class_weight="balanced").fit(table.assign(w=2.0), "clicked", sample_weight="w")
    np.testing.assert_allclose(balanced.predict_proba(table), named.predict_proba(table), rtol=1e-6)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ({2: 1.0}, r"class_weight names 2, which is no class; the classes are \[0, 1\]"),
        (3.0, 'class_weight must map classes to weights, or be "balanced"; got 3.0'),
        ({0: -1.0}, "sample_weight must be finite and at least 0; got -1"),
    ],
)
def test_class_weights_that_are_none(weight, message):
    with pytest.raises(ValueError, match=message):
        DCNClassifier(**SMALL, class_weight=weight).fit(clicks(), "clicked")


def test_logits_and_their_logarithms(fitted):
    table = clicks()
    z, p = fitted.decision_function(table), fitted.predict_proba(table)
    np.testing.assert_allclose(1 / (1 + np.exp(-z)), p[:, 1], rtol=1e-9)
    np.testing.assert_allclose(np.exp(fitted.predict_log_proba(table)), p, rtol=1e-9)
    np.testing.assert_array_equal(fitted.predict(table), (z > 0).astype(int))
    three = DCNClassifier(**SMALL).fit(table.assign(clicked=np.arange(400) % 3), "clicked")
    assert three.decision_function(table).shape == (400, 3)
    np.testing.assert_allclose(np.exp(three.predict_log_proba(table)), three.predict_proba(table), rtol=1e-9)


def test_history_and_number_of_epochs(fitted, tmp_path):
    short = DCNClassifier(**SMALL | {"patience": 0}).fit(clicks(), "clicked")
    assert short.n_iter_ == 2
    assert [row["epoch"] for row in short.history_] == [1, 2]
    assert {"step", "train_loss", "validation_logloss", "validation_auc"} <= set(short.history_[0])
    short.save(tmp_path / "run")
    assert DCNClassifier.load(tmp_path / "run").history_ == short.history_


def test_learning_rate_is_lr(fitted):
    table = clicks()
    same = DCNClassifier(**{name: value for name, value in MORE.items() if name != "lr"}, learning_rate=0.03)
    np.testing.assert_array_equal(same.fit(table, "clicked").predict_proba(table), fitted.predict_proba(table))
    with pytest.raises(ValueError, match=r"lr and learning_rate are one parameter; got 0.03 and 0.1"):
        DCNClassifier(**MORE, learning_rate=0.1).fit(table, "clicked")


def test_partial_fit_learns_on(tmp_path):
    table = clicks(1200, seed=3)
    estimator = DCNClassifier(**MORE | {"lr": 0.01})
    parts = [table.iloc[i : i + 200] for i in range(0, 1200, 200)]
    scores = []
    for part in parts:
        estimator.partial_fit(part.drop(columns="clicked"), part.clicked, classes=[0, 1])
        scores.append(roc_auc_score(clicks().clicked, estimator.decision_function(clicks())))
        assert estimator.n_iter_ == 1
    assert scores[-1] > scores[0] + 0.02, scores
    new = parts[0].assign(city="Atlantis", clicked=np.arange(200) % 2)
    assert "Atlantis" not in estimator.run_.trained.encoder.categorical[0].values.to_pylist()
    copy = pickle.loads(pickle.dumps(estimator))
    for each in (estimator, copy):
        each.partial_fit(new, "clicked")
        assert "Atlantis" in each.run_.trained.encoder.categorical[0].values.to_pylist()
    with pytest.raises(ValueError, match=r"the label .* must be 0 or 1; got 7"):
        estimator.partial_fit(new.assign(clicked=np.arange(200) % 2 * 7), "clicked")
    before = estimator.predict_proba(table)
    with pytest.raises(ValueError, match="no column age"):
        estimator.partial_fit(new.drop(columns="age"), "clicked")
    np.testing.assert_array_equal(estimator.predict_proba(table), before)


def test_the_first_part_may_lack_a_class():
    table = clicks().assign(clicked=np.arange(400) % 3)
    first, second = table[table.clicked < 2], table[table.clicked > 0]
    estimator = DCNClassifier(**SMALL).partial_fit(first.drop(columns="clicked"), first.clicked, classes=[0, 1, 2])
    assert estimator.classes_.tolist() == [0, 1, 2]
    estimator.partial_fit(second.drop(columns="clicked"), second.clicked)
    assert estimator.predict_proba(table).shape == (400, 3)


def test_warm_start_goes_on(fitted):
    table = clicks()
    cold, warm = (DCNClassifier(**SMALL, warm_start=warm).fit(table, "clicked") for warm in (False, True))
    for _ in range(6):
        cold.fit(table, "clicked")
        warm.fit(table, "clicked")
    assert warm.score(table, "clicked") > cold.score(table, "clicked") + 0.05


def test_a_regression_goes_on_in_its_own_unit():
    table = clicks().assign(clicked=lambda t: 1000 + 300 * t.age.fillna(0))
    estimator = DCNRegressor(**MORE).partial_fit(table.drop(columns="clicked"), table.clicked)
    for _ in range(12):
        estimator.partial_fit(table.drop(columns="clicked").head(200), table.clicked.head(200))
    assert estimator.score(table, "clicked") > 0.5


def test_verbose_shows_a_bar_on_a_terminal():
    here = Path(__file__).resolve().parent
    script = "from helpers import SMALL, clicks; from fastcross import DCNClassifier; "
    script += "DCNClassifier(**SMALL, verbose=True).fit(clicks(), 'clicked')"
    path = f"{here.parents[1]}:{here}"
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    done = subprocess.run(
        [sys.executable, "-c", script], stderr=slave, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    os.close(slave)
    shown = os.read(master, 1 << 16).decode()
    assert done.returncode == 0
    assert b"step 10: train loss" in done.stdout
    assert "rows/s" in shown
