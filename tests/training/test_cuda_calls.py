"""What training asks of CUDA, and in which order: the calls are written down here, and no GPU answers them."""

import contextlib
import inspect

import pytest
import torch

from fastcross.batch import Batch
from fastcross.training import input as training_input
from fastcross.training.step import CudaGraphs, Outcome

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
    copies = training_input._Copies(DEVICE)
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
