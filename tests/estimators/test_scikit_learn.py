"""The estimators keep scikit-learn's conventions, by its own checks, and work in its tools."""

import warnings
from dataclasses import fields

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import make_regression
from sklearn.impute import SimpleImputer
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from fastcross import DCNClassifier, DCNRegressor
from fastcross.models import MODELS
from fastcross.training.config import TrainingConfig
from fastcross.training.experiment import model_options
from tests.estimators.helpers import SMALL, clicks

# Few rows need few, large steps; without a validation part every row trains, as the checks expect.
QUICK = {
    "cross_layers": 1,
    "deep_layers": [16],
    "batch_size": 32,
    "epochs": 100,
    "max_steps": 100,
    "lr": 0.03,
    "patience": 0,
    "evaluate_every": 1000,
    "split": "random:1,0,0",
    "threads": 1,
    "backend": "torch",
}
NOT_APPLICABLE = {
    "check_sample_weight_equivalence_on_dense_data": "rows are dealt to batches: a row of weight 2 is in one of them, "
    "a row that is there twice in two, and a row of weight 0 takes another's place",
    "check_methods_subset_invariance": "float32: the last bit of a sum depends on the number of rows beside it",
}


@pytest.mark.parametrize("kind", [DCNClassifier, DCNRegressor])
def test_check_estimator(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of checks that are skipped, and of columns that checks misname on purpose
        results = check_estimator(kind(**QUICK), expected_failed_checks=NOT_APPLICABLE)
    assert sum(result["status"] == "passed" for result in results) > 50
    assert {result["check_name"] for result in results if result["status"] == "xfail"} <= set(NOT_APPLICABLE)


def test_in_a_pipeline_and_cross_validated():
    table = clicks()
    pipeline = make_pipeline(SimpleImputer(), StandardScaler(), DCNClassifier(**SMALL | {"epochs": 10, "lr": 0.03}))
    numbers = table[["age"]].assign(square=table.age**2)
    assert pipeline.fit(numbers, table.clicked).score(numbers, table.clicked) > 0.6
    estimator = DCNClassifier(**SMALL | {"epochs": 10, "lr": 0.03})
    scores = cross_val_score(estimator, table.drop(columns="clicked"), table.clicked, cv=2, scoring="roc_auc")
    assert scores.min() > 0.7


def test_in_a_grid_search():
    X, y = make_regression(200, 4, random_state=0)
    search = GridSearchCV(DCNRegressor(**SMALL), {"lr": [1e-9, 0.03]}, cv=2).fit(X, y)
    assert search.best_params_ == {"lr": 0.03}
    assert search.best_estimator_.predict(X).shape == (200,)


def test_clone_takes_the_parameters_alone():
    estimator = DCNClassifier("fm", embedding_dim=3, epochs=1, random_state=4)
    copy = clone(estimator.fit(np.random.default_rng(0).normal(size=(60, 2)), np.arange(60) % 2))
    assert copy.get_params() == estimator.get_params()
    assert not hasattr(copy, "classes_")


def test_parameters_are_options_of_the_command_line():
    """Under the same names, but for those of one process, of files and of Python."""
    from fastcross.cli.parser import build_parser

    options = vars(build_parser().parse_args(["train"]))
    own = {"random_state", "verbose", "categorical_features", "class_weight", "learning_rate", "warm_start"}
    parameters = set(DCNClassifier().get_params())
    assert parameters - own <= set(options)
    of_training = {entry.name for entry in fields(TrainingConfig)} - {"seed", "checkpoint_seconds"}
    of_models = {name for model in MODELS for name in model_options(model)}
    assert (of_training | of_models) & set(options) <= parameters
    assert not hasattr(DCNClassifier, "checkpoint_seconds")
