"""A training step as one CUDA graph: its launches are recorded once, and replayed by a single one.

    the first WARM_UP batches    train as usual, on a side stream: what is compiled or allocated at first use is so then
    the next one                 is copied into buffers, and the step on these is recorded, which computes nothing
    it and all others            are copied into the buffers, and the recorded step is replayed

A batch of another size takes the step as it is. So every batch is trained on once, and in its turn. What changes from
step to step lies in tensors that the recorded step reads: the batch, the learning rate, the number of the step.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from fastcross.batch import Batch, Schema
from fastcross.optim import Optimizer
from fastcross.training.dataset import Show
from fastcross.training.divergence import Outcome
from fastcross.training.processes import ALONE, Processes
from fastcross.training.step import Step

WARM_UP = 3
Replay = Callable[[], Outcome]


class Graphs(Protocol):
    """What a device does for a step to be recorded."""

    def warm_up(self, step: Replay) -> Outcome: ...

    def record(self, step: Replay) -> Replay: ...


class CudaGraphs:
    """Recorded on a stream of its own, with a pool of memory of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    def warm_up(self, step: Replay) -> Outcome:
        """Takes the step on the stream that will record it, before whatever the caller does next."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            found = step()
        current.wait_stream(self.stream)
        return found

    def record(self, step: Replay) -> Replay:
        """A function that does again what the step has launched, with what is in its operands then."""
        graph = torch.cuda.CUDAGraph()
        # "thread_local": meanwhile another thread may allocate memory, as the one that reads ahead does.
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            found = step()

        def replay() -> Outcome:
            graph.replay()
            return found

        return replay


class CapturedStep:
    """``step`` for batches of ``rows`` rows, recorded by ``graphs``; the results are those of ``step`` itself.

    What cannot be recorded is said once, to ``show``, and from then on the steps are taken as they are.
    """

    def __init__(self, step: Callable[[Batch], Outcome], rows: int, graphs: Graphs, show: Show | None = None) -> None:
        self.step, self.rows, self.graphs, self.show = step, rows, graphs, show
        self.warm_ups, self.given_up = 0, False
        self._replay: Replay | None = None

    def __call__(self, batch: Batch) -> Outcome:
        if self.given_up or len(batch) != self.rows:
            return self.step(batch)
        if self.warm_ups < WARM_UP:
            self.warm_ups += 1
            return self.graphs.warm_up(lambda: self.step(batch))
        if self._replay is None:
            try:
                self._record(batch)
            except Exception as error:
                self.given_up = True
                _tell(self.show, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
                return self.step(batch)
        assert self._replay is not None
        for buffer, tensor in zip(self.buffers.tensors, batch.tensors, strict=True):
            buffer.copy_(tensor)
        found = self._replay()
        # The next replay writes to the same places, perhaps before anybody has looked at these two numbers.
        return Outcome(found.logits, found.loss.clone(), found.norm.clone())

    def _record(self, batch: Batch) -> None:
        self.buffers = batch.map(torch.clone)
        self._replay = self.graphs.record(lambda: self.step(self.buffers))


def captured_step(step: Step, show: Show | None) -> CapturedStep | None:
    """The step, captured; None where it is taken as it is: on a GPU after a line that says why."""
    if step.config.graph == "off" or step.device.type != "cuda":
        return None
    if reason := obstacle(step.optimizer, step.cache.schema, step.processes):
        _tell(show, reason)
        return None
    return CapturedStep(step, step.rows, CudaGraphs(step.device), show)


def obstacle(optimizer: Optimizer, schema: Schema, processes: Processes) -> str | None:
    """Why a step cannot be recorded, as far as that is known before it is tried."""
    if processes is not ALONE:
        return "several processes, or TorchRec's tables, wait for one another within a step"
    if schema.bag_names:
        return f"the column {schema.bag_names[0]} has another number of values in every batch"
    for group in optimizer.param_groups:
        if not isinstance(group["lr"], Tensor) or not group.get("capturable", True):
            return "the optimiser's learning rate or number of steps is no tensor that a recorded step could read"
    return None


def _tell(show: Show | None, reason: str) -> None:
    if show:
        show(f"the steps are not captured in a CUDA graph: {reason}")
