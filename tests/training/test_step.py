"""A captured step is the step itself, bit for bit; values that are not finite and losses that explode stop it."""

import contextlib
import inspect
import math

import pytest
import torch

from fastcross import optim
from fastcross.batch import Batch, Schema
from fastcross.models import MODELS
from fastcross.models.base import model_class
from fastcross.training import run_folder
from fastcross.training.checkpoint import CheckpointError
from fastcross.training.config import CAPTURABLE, TrainingConfig
from fastcross.training.experiment import Experiment
from fastcross.training.loop import Trainer
from fastcross.training.run_folder import Run
from fastcross.training.step import (
    ALONE,
    WARM_UP,
    CapturedStep,
    CudaGraphs,
    Outcome,
    Processes,
    TrainingError,
    _Copies,
    captured_step,
    obstacle,
)
from tests.training.helpers import assert_same_weights, small_dcn, tiny_experiment, weights
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
        return model_class(name)(cache.schema.cardinalities, len(cache.schema.dense_names), 4, **options)

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


DEVICE = torch.device("cpu")


@pytest.fixture
def calls(monkeypatch):
    """A list of all calls; streams have names."""
    found = []

    class Stream:
        def __init__(self, device=None, name="own"):
            self.name = name

        def wait_stream(self, other):
            found.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event):
            found.append(f"{self.name} waits for {event}")

        def record_event(self):
            found.append(f"{self.name} records")
            return f"what {self.name} recorded"

    class Graph:
        def replay(self):
            found.append("replay")

    @contextlib.contextmanager
    def on(stream):
        found.append(f"on {stream.name}")
        yield
        found.append("off")

    @contextlib.contextmanager
    def recording(graph, *args, **options):
        inspect.signature(graph_type).bind(graph, *args, **options)
        assert options["capture_error_mode"] == "thread_local"  # "global" forbids the reading thread to allocate
        with on(options["stream"]):
            yield

    graph_type, current = torch.cuda.graph, Stream(name="current")
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: found.append("pin") or tensor)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: found.append(f"used on {stream.name}"))
    return found


def test_a_batch_is_waited_for_by_the_stream_that_uses_it(calls):
    copies = _Copies(DEVICE)
    sent = copies.send(Batch(torch.zeros(2, 1), torch.zeros(2, 1).long(), label=torch.zeros(2)))
    assert calls == ["on own", "pin", "pin", "pin", "own records", "off"]
    calls.clear()
    assert len(copies.receive(sent)) == 2
    assert calls == ["current waits for what own recorded", *["used on current"] * 3]


def test_a_step_warms_up_and_is_recorded_on_one_stream(calls):
    outcome = Outcome(*torch.zeros(3))
    graphs = CudaGraphs(DEVICE)

    def step():
        calls.append("step")
        return outcome

    assert graphs.warm_up(step) is outcome
    assert calls == ["own waits for current", "on own", "step", "off", "current waits for own"]
    calls.clear()
    replay = graphs.record(step)
    assert calls == ["on own", "step", "off"]
    assert replay() is replay() is outcome
    assert calls[3:] == ["replay", "replay"]


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
