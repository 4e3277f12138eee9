"""Training on the Triton path in the interpreter: a wrong id is named with its step; a recorded step is the loop's."""

import os

import numpy as np
import pyarrow as pa
import pytest

if os.environ.get("TRITON_INTERPRET", "") in ("", "0"):
    pytest.skip("for Triton's interpreter", allow_module_level=True)

from fastcross.data import Columns
from fastcross.data.preparation import prepare
from fastcross.training.config import TrainingConfig
from fastcross.training.loop import Trainer
from fastcross.training.metrics import predict_logits
from fastcross.training.step import TrainingError
from tests.training.helpers import assert_same_weights, small_dcn
from tests.training.recorded import capturable, replaying, train

NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """64 rows of three features and a number, all for training."""
    generator = np.random.default_rng(0)
    rows = {name: generator.integers(0, 6, 64).astype(str) for name in NAMES}
    rows |= {"x": generator.normal(size=64), "label": generator.integers(0, 2, 64)}
    columns = Columns.declare(label="label", dense=["x"], categorical=NAMES)
    folder = tmp_path_factory.mktemp("tiny") / "cache"
    return prepare([pa.table(rows)], folder, columns=columns, split="random:1,0,0", min_frequency=1)


@pytest.fixture
def poisoned(tiny, monkeypatch):
    """The third batch of an epoch has an id that is not there."""
    batches = tiny.batches

    def with_a_wrong_id(*arguments, **options):
        for i, batch in enumerate(batches(*arguments, **options)):
            if i == 2:
                batch.categorical[5, 1] = 999
            yield batch

    monkeypatch.setattr(tiny, "batches", with_a_wrong_id)
    return tiny


def triton_dcn(cache):
    return small_dcn(cache, backend="triton")


def test_an_id_that_is_not_there_is_named_with_its_step(poisoned):
    """Three steps before anybody reads the loss."""
    trainer = Trainer(triton_dcn(poisoned), poisoned, TrainingConfig(batch_size=8, max_steps=8))
    trainer.divergence.interval = 6
    found = rf"step 3 \(epoch 1, .*\): feature 1 has {poisoned.schema.cardinalities[1]} ids, .*; got id 999 in row 5"
    with pytest.raises(TrainingError, match=found):
        trainer.fit()
    assert trainer.step == 5


def test_a_fault_is_not_told_of_a_batch_that_may_be_another(tiny, monkeypatch):
    """Two batches have a wrong id before anybody reads: the least row is told, and that it may be of a later batch."""
    batches = tiny.batches

    def with_wrong_ids(*arguments, **options):
        for i, batch in enumerate(batches(*arguments, **options)):
            if i in (2, 4):
                batch.categorical[7 - i, 1] = 900 + i
            yield batch

    monkeypatch.setattr(tiny, "batches", with_wrong_ids)
    for interval, found in ((6, r"got id 904 in row 3, in this step or up to 3 later$"), (3, "902 in row 5$")):
        trainer = Trainer(triton_dcn(tiny), tiny, TrainingConfig(batch_size=8, max_steps=8))
        trainer.divergence.interval = interval
        with pytest.raises(TrainingError, match=rf"step 3 \(epoch 1, .*\): feature 1 .*{found}"):
            trainer.fit()


def test_so_it_is_where_a_model_predicts(poisoned):
    with pytest.raises(ValueError, match=r"feature 1 has .*; got id 999 in row 5"):
        predict_logits(triton_dcn(poisoned), poisoned.batches("train", 8))


def test_a_recorded_step_with_sparse_gradients_is_the_eager_one(tiny, monkeypatch):
    options = {"make": triton_dcn, "updated_by": capturable("adam"), "interval": 4, "batch_size": 8, "max_steps": 7}
    eager = train(tiny, monkeypatch, **options)
    captured = train(tiny, monkeypatch, replaying, **options)
    assert_same_weights(captured[0], eager[0])
    assert captured[1] == eager[1]
