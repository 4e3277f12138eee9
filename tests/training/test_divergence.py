"""Values that are not finite and losses that explode stop a training, which says where and what."""

import math

import pytest
import torch

from fastcross.training.config import TrainingConfig
from fastcross.training.loop import Trainer
from fastcross.training.step import TrainingError
from tests.training.helpers import small_dcn, weights


def test_a_parameter_that_is_not_finite_is_named(cache):
    model = small_dcn(cache)
    with torch.no_grad():
        model.cross.weight[1, 3] = math.inf
    with pytest.raises(TrainingError, match=r"step 1 \(epoch 1, batch 1 of 26\).* first: the parameter cross"):
        Trainer(model, cache, TrainingConfig(batch_size=128)).fit()


def test_a_gradient_that_is_not_finite_is_named(cache):
    model = small_dcn(cache)
    healthy = weights(model)
    model.deep[0].weight.register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(TrainingError, match=r"gradient norm nan; not finite first: the gradient of deep\.0\.weight"):
        Trainer(model, cache, TrainingConfig(batch_size=128)).fit()
    trained = weights(model)
    assert torch.equal(healthy["deep.0.weight"], trained["deep.0.weight"])  # the step was not taken


def test_a_table_gradient_that_is_not_finite_is_named(cache):
    model = small_dcn(cache)
    model.embedding.tables[3].register_hook(
        lambda gradient: gradient * math.nan if not gradient.is_sparse else gradient.coalesce() * math.nan
    )
    with pytest.raises(TrainingError, match=r"the gradient of embedding\.tables\.3"):
        Trainer(model, cache, TrainingConfig(batch_size=128)).fit()


def test_an_input_that_is_not_finite_is_named(cache, monkeypatch):
    batches = cache.batches

    def poisoned(part, *arguments, **options):
        for i, batch in enumerate(batches(part, *arguments, **options)):
            if part == "train" and i == 4:
                batch.dense[7, 2] = math.nan
            yield batch

    monkeypatch.setattr(cache, "batches", poisoned)
    with pytest.raises(TrainingError, match=r"step 5 .*: the loss is nan.*the dense features of the batch"):
        Trainer(small_dcn(cache), cache, TrainingConfig(batch_size=128)).fit()


def test_an_exploding_loss_stops(cache):
    model = small_dcn(cache)
    with torch.no_grad():
        model.logits.weight *= 1e6
    with pytest.raises(TrainingError, match=r"exploded to .*above the limit of 1000; .* logits\.weight"):
        Trainer(model, cache, TrainingConfig(batch_size=128)).fit()
