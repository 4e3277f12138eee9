"""A captured step takes the steps of the loop, bit for bit, and says in one line where it cannot be captured."""

import pytest
import torch

from fastcross import optim
from fastcross.batch import Schema
from fastcross.models import MODELS
from fastcross.training import run_folder
from fastcross.training.checkpoint import CheckpointError
from fastcross.training.config import CAPTURABLE, TrainingConfig
from fastcross.training.experiment import Experiment
from fastcross.training.loop import Trainer
from fastcross.training.processes import ALONE, Processes
from fastcross.training.run_folder import Run
from fastcross.training.step import WARM_UP, CapturedStep, captured_step, obstacle
from tests.training.helpers import assert_same_weights, small_dcn, tiny_experiment
from tests.training.recorded import capturable, replaying, train


class AsItIs:
    """Records nothing: a replay takes the step itself, on the buffers."""

    recorded = 0

    def warm_up(self, step):
        return step()

    def record(self, step):
        self.recorded += 1
        return step


class Refusing(AsItIs):
    def record(self, step):
        raise RuntimeError("operation not permitted when stream is capturing\nand a second line")


def with_dropout(cache):
    return small_dcn(cache, dropout=0.4)


@pytest.mark.parametrize("optimizer", ["adam", "adagrad", "sgd"])
def test_on_its_own_buffers_it_is_the_eager_loop_bit_for_bit(optimizer, cache, monkeypatch):
    eager = train(cache, monkeypatch, make=with_dropout, optimizer=optimizer, evaluate_every=4)
    graphs = AsItIs()
    captured = train(cache, monkeypatch, graphs, make=with_dropout, optimizer=optimizer, evaluate_every=4)
    assert graphs.recorded == 1
    assert_same_weights(captured[0], eager[0])
    assert captured[1] == eager[1]


def dense_dcn(cache):
    """Every gradient of its own size, as a recorded step needs it; on a GPU sparse ones are, too."""
    return small_dcn(cache, dropout=0.4, sparse_gradients=False, backend="cpu")


@pytest.mark.parametrize("optimizer", CAPTURABLE)
def test_replayed_without_python_it_is_still_the_eager_loop(optimizer, cache, monkeypatch):
    """The learning rate, the number of the step, dropout and the batch all change; losses are read six at a time."""
    options = {"make": dense_dcn, "updated_by": capturable(optimizer), "interval": 6}
    eager = train(cache, monkeypatch, **options)
    captured = train(cache, monkeypatch, replaying, **options)
    assert_same_weights(captured[0], eager[0])
    assert captured[1] == eager[1]


@pytest.mark.parametrize("name", MODELS)
def test_so_it_is_for_every_model(name, cache, monkeypatch):
    """With regularisation, and positive rows that count for more."""
    own = {
        "dcn": {"cross_layers": 2, "deep_layers": (8,)},
        "deep_crossing": {"residual_units": 1, "input_dim": 8, "cross_dim": 8},
        "dnn": {"deep_layers": (8,)},
        "lr": {"crosses": ((0, 1),)},
        "wide_deep": {"crosses": ((0, 1), (2, 3)), "deep_layers": (8,)},
    }

    def make(cache):
        torch.manual_seed(0)
        options = {"l2": 0.01, "sparse_gradients": False, "backend": "cpu"} | own.get(name, {})
        return MODELS[name](cache.schema.cardinalities, len(cache.schema.dense_names), 4, **options)

    options = {"make": make, "updated_by": capturable("adam"), "interval": 4, "positive_weight": 2.5}
    eager = train(cache, monkeypatch, **options)
    captured = train(cache, monkeypatch, replaying, **options)
    assert_same_weights(captured[0], eager[0])
    assert captured[1] == eager[1]


def test_a_rate_that_is_a_number_would_be_frozen(cache, monkeypatch):
    """Which is why such an optimiser is refused."""
    options = {
        "make": dense_dcn,
        "updated_by": lambda model: optim.configure(model, 0.02, "sgd", sparse_gradients=False, backend="torch"),
    }
    eager = train(cache, monkeypatch, **options)
    captured = train(cache, monkeypatch, replaying, **options)
    assert not torch.equal(captured[0]["cross.weight"], eager[0]["cross.weight"])


def test_what_cannot_be_recorded_trains_on_after_one_line(cache, monkeypatch):
    lines = []
    eager = train(cache, monkeypatch)
    refused = train(cache, monkeypatch, Refusing(), lines)
    assert_same_weights(refused[0], eager[0])
    told = [line for line in lines if "CUDA graph" in line]
    assert told == [
        "the steps are not captured in a CUDA graph: RuntimeError: operation not permitted when stream is capturing"
    ]


def test_a_batch_of_another_size_takes_the_step_as_it_is(cache):
    batches = cache.batches("train", 100)
    taken = []
    graphs = AsItIs()
    trainer = Trainer(small_dcn(cache), cache, TrainingConfig(batch_size=100))

    def step(batch):
        taken.append(batch)
        return trainer.one_step(batch)

    captured = CapturedStep(step, 100, graphs)
    for _ in range(WARM_UP + 2):
        captured(next(batches))
    assert graphs.recorded == 1
    assert taken[-1] is captured.buffers
    longer = next(cache.batches("train", 120))
    captured(longer)
    assert taken[-1] is longer
    captured(next(batches))
    assert taken[-1] is captured.buffers


def test_obstacles_are_known_before_the_first_step(cache):
    model = small_dcn(cache)
    ready, usual = capturable("adam")(model), optim.configure(model)
    schema = Schema(("x",), ("y",), (3,))
    bags = Schema(("x",), (), (), ("genres",), (5,))
    assert obstacle(ready, schema, ALONE) is None
    assert "genres has another number of values" in obstacle(ready, bags, ALONE)
    assert "several processes" in obstacle(ready, schema, Processes())
    assert "learning rate" in obstacle(usual, schema, ALONE)


def test_on_a_cpu_nothing_is_captured_or_said(cache):
    lines = []
    for graph in ("auto", "off"):
        trainer = Trainer(small_dcn(cache), cache, TrainingConfig(graph=graph))
        assert captured_step(trainer.one_step, lines.append) is None
    assert lines == []


def test_a_run_folder_from_before_there_was_a_graph_is_read_and_goes_on(cache, tmp_path):
    plan = tiny_experiment(cache)
    result = plan.run(tmp_path / "run")
    config = Run(tmp_path / "run").config
    assert config["training"].pop("graph") == "auto"
    run_folder._write(tmp_path / "run" / "config.json", config)
    assert Experiment.load(tmp_path / "run").training.graph == "auto"
    assert plan.run(tmp_path / "run", go_on=True) == result
    without = tiny_experiment(cache, graph="off")
    assert Experiment.from_dict(without.to_dict()) == without
    with pytest.raises(CheckpointError, match="another configuration"):
        without.run(tmp_path / "run", go_on=True)
