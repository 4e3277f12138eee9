"""A fit is one call among others of its program: signals are that program's, and Ctrl-C ends it."""

import os
import signal
import threading

import numpy as np
import pytest
from sklearn.model_selection import cross_val_score

from fastcross import DCNClassifier
from tests.estimators.helpers import SMALL, clicks

LONG = SMALL | {"epochs": 150, "patience": 0}


def send(number, after):
    timer = threading.Timer(after, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()


def test_ctrl_c_ends_a_cross_validation():
    table = clicks()
    DCNClassifier(**SMALL).fit(table, "clicked")  # imports are done
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a worker of pytest's ignores Ctrl-C
    try:
        send(signal.SIGINT, 0.5)
        with pytest.raises(KeyboardInterrupt):
            cross_val_score(DCNClassifier(**LONG), table.drop(columns="clicked"), table.clicked, cv=3)
    finally:
        signal.signal(signal.SIGINT, before)


def test_sigterm_reaches_the_program_during_a_fit():
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        estimator = DCNClassifier(**LONG)
        send(signal.SIGTERM, 0.5)
        estimator.fit(clicks(), "clicked")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]
    assert np.isfinite(estimator.predict_proba(clicks())).all()
