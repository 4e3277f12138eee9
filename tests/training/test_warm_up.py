"""Nothing is compiled while a training is timed."""

import time

import pytest
import torch

from fastcross import optim
from fastcross.batch import Bag
from fastcross.models import MODELS
from fastcross.training import TrainingConfig, loop
from fastcross.training.loop import Trainer
from fastcross.training.warm_up import compile_kernels
from tests.training.helpers import small_dcn

compile = pytest.importorskip("fastcross.kernels.cpu.compile")


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_finds_all_its_kernels_compiled(name, optimizer, monkeypatch):
    """In 0.1 the first step compiled for 17 s, which `rows/s` then counted."""
    model = MODELS[name]((5, 7), 2, 4, bag_cardinalities=(6,))
    bag = Bag(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 1, 2]), torch.rand(3))
    monkeypatch.setattr(compile, "_kernels", {})
    compile_kernels(model)
    made = set(compile._kernels)
    assert made
    rows = optim.configure(model, name=optimizer)
    logits = model(torch.randn(4, 2), torch.randint(0, 5, (4, 2)), (bag,))
    model.loss(logits, torch.tensor([0.0, 1.0, 1.0, 0.0])).backward()
    rows.step()
    assert set(compile._kernels) == made


def test_a_model_without_kernels_has_none_to_compile(monkeypatch):
    monkeypatch.setattr(compile, "_kernels", {})
    compile_kernels(MODELS["dcn"]((5, 7), 2, 4, backend="torch"))
    compile_kernels(torch.nn.Linear(2, 3))
    assert not compile._kernels


def test_the_clock_starts_afterwards(cache, monkeypatch):
    monkeypatch.setattr(loop, "compile_kernels", lambda model: time.sleep(2))
    result = Trainer(small_dcn(cache), cache, TrainingConfig(batch_size=128, max_steps=1)).fit()
    assert result["seconds"] < 2
