"""One training step, in one process or several: forward pass, loss, backward pass, clipping, optimiser.

A thread reads the next batch while a step runs. The batches and their order are the same as without the thread.

Nothing in a step synchronises with the device. So on a GPU the step is recorded once as a CUDA graph, and replayed with
a single launch:

    the first WARM_UP batches    train as usual, on a side stream, where first-use compilation and allocation happen
    the next batch               is copied into buffers, and the step on these is recorded, which computes nothing
    this and all later batches   are copied into the buffers, and the recorded step is replayed

A batch of another size takes a step without the graph. So every batch trains once, in order. Values that change between
steps are in tensors that the recorded step reads: the batch, the learning rate, the step number.

Training stops with an error when it diverges: at values that are not finite, or a loss above the limit.
"""

import math
import os
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fastcross.batch import Batch, Schema
from fastcross.data.cache import Cache
from fastcross.layers.embedding import EmbeddingStack
from fastcross.models.base import Model
from fastcross.optim import Optimizer, configure
from fastcross.training.config import CAPTURABLE, TrainingConfig, choose_device
from fastcross.training.run_folder import Run

WARM_UP = 3
THREAD_NAME = "fastcross-input"
Show = Callable[[str], None]


class Processes:
    """One of ``size`` processes. All of them call each method together. The base class is a single process."""

    rank, size = 0, 1

    def mean(self, value: Tensor) -> Tensor:
        """The mean of the ranks' values."""
        return value

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag, whether it is set on any rank."""
        return flags

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, in the order of ranks."""
        return rows

    def share(self, value: Any) -> Any:
        """The value of rank 0, on all ranks."""
        return value

    def place(
        self, model: Model, config: TrainingConfig, *, device: str, sharding: str | None, embedding: str
    ) -> tuple[Any, Optimizer]:
        """The model on its device, and its optimiser."""
        if sharding is not None:
            raise ValueError(f"sharding {sharding!r} needs the processes of fastcross.distributed.sharding.join")
        model = model.to(choose_device(device))
        return model, make_optimizer(model, config)

    def open_run(self, path: Path | str) -> Run:
        """The run folder, for all processes to read and write."""
        return Run(path)


ALONE = Processes()


def make_optimizer(model: Model, config: TrainingConfig) -> Optimizer:
    """The configuration's optimiser for a model on its device; on a GPU its steps can be captured."""
    on_gpu = next(model.parameters()).device.type == "cuda"
    capturable = on_gpu and config.graph != "off" and config.optimizer in CAPTURABLE
    return configure(model, lr=config.lr, name=config.optimizer, capturable=capturable)


def read_from(
    step: int, cache: Cache, config: TrainingConfig, processes: Processes, drop_last: bool
) -> Iterator[Batch]:
    """The batches of step number ``step``, from 0, and of all later steps, endlessly."""
    steps_per_epoch = cache.num_batches("train", config.batch_size, drop_last=drop_last)
    while True:
        epoch, position = divmod(step, steps_per_epoch)
        yield from cache.batches(
            "train",
            config.batch_size,
            shuffle=True,
            seed=config.seed,
            epoch=epoch,
            start=position,
            drop_last=drop_last,
            rank=processes.rank,
            world_size=processes.size,
        )
        step += steps_per_epoch - position


def read_ahead(batches: Iterator[Batch], device: torch.device) -> Generator[Batch, None, None]:
    """The batches on ``device``. A thread reads each one while the caller uses the one before.

    Errors of the reader are raised here, with their traceback. The thread ends with the batches, or when this generator
    is closed or dropped. In a forked process, which has no such thread, the generator raises.
    """
    process = os.getpid()
    copies = _Copies(device) if device.type == "cuda" else None
    with ThreadPoolExecutor(1, thread_name_prefix=THREAD_NAME) as reader:
        upcoming = reader.submit(_read, batches, copies)
        while (found := upcoming.result()) is not None:
            upcoming = reader.submit(_read, batches, copies)
            yield found.to(device) if copies is None else copies.receive(found)
            if os.getpid() != process:
                raise RuntimeError(f"batches are read by a thread of process {process}; got a call of {os.getpid()}")


def read_directly(batches: Iterator[Batch], device: torch.device) -> Generator[Batch, None, None]:
    """The batches on ``device``, read on demand."""
    for batch in batches:
        yield batch.to(device, non_blocking=True)


def _read(batches: Iterator[Batch], copies: "_Copies | None") -> Any:
    """In the thread: the next batch, with its copy to the GPU started; None after the last."""
    batch = next(batches, None)
    return batch if batch is None or copies is None else copies.send(batch)


class _Copies:
    """Copies batches to a GPU through pinned memory, on a separate stream, concurrently with the step."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    def send(self, batch: Batch) -> tuple[Batch, torch.cuda.Event]:
        with torch.cuda.stream(self.stream):
            # PyTorch keeps the pinned memory until the copies out of it are done.
            copy = batch.map(lambda tensor: tensor.pin_memory().to(self.device, non_blocking=True))
            return copy, self.stream.record_event()

    def receive(self, sent: tuple[Batch, torch.cuda.Event]) -> Batch:
        batch, copied = sent
        current = torch.cuda.current_stream(self.device)
        current.wait_event(copied)
        for tensor in batch.tensors:  # or the next copy might take its memory while a step still reads it
            tensor.record_stream(current)
        return batch


class Outcome(NamedTuple):
    """The results of a step, on the model's device."""

    logits: Tensor
    loss: Tensor  # the mean over all rows of all processes
    norm: Tensor  # of all gradients together, before they are clipped


Replay = Callable[[], Outcome]


class Step:
    """Forward pass, loss, backward pass, clipping, optimiser. A full batch has ``rows`` rows."""

    def __init__(
        self, model: Model, optimizer: Optimizer, cache: Cache, config: TrainingConfig, rows: int, processes: Processes
    ) -> None:
        self.model, self.optimizer, self.cache, self.config = model, optimizer, cache, config
        self.rows, self.processes = rows, processes
        self.device = next(model.parameters()).device
        self.bf16 = gains_from_bf16(self.device) if config.bf16 is None else config.bf16

    def __call__(self, batch: Batch) -> Outcome:
        found = self.gradients(batch)
        self.optimizer.step()
        return found

    def gradients(self, batch: Batch) -> Outcome:
        """The step without the optimiser: parameters do not change."""
        self.model.train()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            logits = self.model(batch.dense, batch.categorical, batch.bags)
        assert batch.label is not None
        # The mean over the ranks of their losses, so weighted, is the mean over the rows of the whole batch.
        weight = len(batch) * self.processes.size / self.rows
        loss = weight * self.model.loss(logits.float(), batch.label, row_weights(batch, self.cache, self.config))
        self.optimizer.zero_grad()
        loss.backward()
        norm = self.optimizer.clip_grad_norm(self.config.clip_norm or math.inf)
        return Outcome(logits.detach(), self.processes.mean(loss.detach()), norm)


def gains_from_bf16(device: torch.device) -> bool:
    """Whether bfloat16 is faster: on GPUs with bfloat16 units. Most CPUs emulate it, so there it is off by default."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def row_weights(batch: Batch, cache: Cache, config: TrainingConfig) -> Tensor | None:
    """(B,): each row's weight over the training rows' mean weight, times positive_weight for positive rows."""
    weights = None if batch.weight is None else batch.weight / cache.mean_weight
    if config.positive_weight == 1:
        return weights
    assert batch.label is not None
    of_positives = 1 + (config.positive_weight - 1) * batch.label
    return of_positives if weights is None else weights * of_positives


class Graphs(Protocol):
    """A device's way to record and replay a step."""

    def warm_up(self, step: Replay) -> Outcome: ...

    def record(self, step: Replay) -> Replay: ...


class CudaGraphs:
    """CUDA graphs, recorded on a separate stream with a separate memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    def warm_up(self, step: Replay) -> Outcome:
        """Takes the step on the recording stream; the caller's stream waits for it."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            found = step()
        current.wait_stream(self.stream)
        return found

    def record(self, step: Replay) -> Replay:
        """A function that repeats the step's launches, on the present content of its operands."""
        graph = torch.cuda.CUDAGraph()
        # "thread_local": meanwhile another thread may allocate memory, as the one that reads ahead does.
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            found = step()

        def replay() -> Outcome:
            graph.replay()
            return found

        return replay


class CapturedStep:
    """``step`` for batches of ``rows`` rows, recorded by ``graphs``; the results are those of ``step``.

    If recording fails, ``show`` is called once with the reason, and all steps run without a graph.
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
    """The captured step; None if it runs without a graph. On a GPU a line then gives the reason."""
    if step.config.graph == "off" or step.device.type != "cuda":
        return None
    if reason := obstacle(step.optimizer, step.cache.schema, step.processes):
        _tell(show, reason)
        return None
    return CapturedStep(step, step.rows, CudaGraphs(step.device), show)


def obstacle(optimizer: Optimizer, schema: Schema, processes: Processes) -> str | None:
    """Why a step cannot be recorded, if that is known in advance."""
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


class TrainingError(RuntimeError):
    """Training cannot continue. The message has the step and the reason."""


class NotFiniteError(TrainingError, ValueError):
    """Predictions are not finite: the model has diverged, or its input has bad values."""


class DivergenceCheck:
    """Checks the loss and the gradient norm of every step, and sums the loss.

    Reading them synchronises with the device, so on a GPU they are read every 50 steps. The message still names the
    exact step. On a CPU every step is checked before it changes the parameters. Ids out of range on a GPU, whose steps
    have a loss of NaN, are read at the same time.
    """

    def __init__(self, model: nn.Module, max_loss: float, device: torch.device) -> None:
        self.model, self.max_loss = model, max_loss
        self.interval = 1 if device.type == "cpu" else 50
        self.loss_sum, self.loss_count = 0.0, 0
        self._unread: list[tuple[str, Tensor, Tensor]] = []

    def add(self, where: str, batch: Batch, found: Outcome) -> None:
        self._unread.append((where, found.loss, found.norm))
        if len(self._unread) >= self.interval:
            self.read(batch, found.logits)

    def read(self, batch: Batch | None = None, logits: Tensor | None = None) -> None:
        """Check the steps since the last check."""
        unread, self._unread = self._unread, []
        numbers = _as_numbers(unread)
        if numbers:
            try:
                raise_faults(self.model)
            except ValueError as error:
                # The reported row may belong to the first such step or to a later one.
                first = next((i for i, (_, value, _) in enumerate(numbers) if not math.isfinite(value)), -1)
                later = len(numbers[first:]) - 1
                or_later = f", in this step or up to {later} later" if later else ""
                raise TrainingError(f"training stopped at {numbers[first][0]}: {error}{or_later}") from error
        for where, value, length in numbers:
            if not (math.isfinite(length) and abs(value) <= self.max_loss):
                raise TrainingError(f"training stopped at {where}: {self._explain(value, length, batch, logits)}")
            self.loss_sum += value
            self.loss_count += 1

    def mean_loss(self) -> float:
        """The mean since the last call."""
        self.read()
        mean = self.loss_sum / max(1, self.loss_count)
        self.loss_sum, self.loss_count = 0.0, 0
        return mean

    def _explain(self, loss: float, norm: float, batch: Batch | None, logits: Tensor | None) -> str:
        name, parameter = max(self.model.named_parameters(), key=lambda pair: _largest(pair[1]))
        scale = f"the largest parameter is {name} with {_largest(parameter):g}"
        if math.isfinite(loss) and math.isfinite(norm):
            return f"the loss exploded to {loss:g}, above the limit of {self.max_loss:g}; {scale}"
        culprit = self._first_not_finite(batch, logits)
        return f"the loss is {loss:g}, the gradient norm {norm:g}; not finite first: {culprit}; {scale}"

    def _first_not_finite(self, batch: Batch | None, logits: Tensor | None) -> str:
        """Searched in the order of computation: input, parameters, logits, gradients."""
        if batch is not None and not batch.dense.isfinite().all():
            return "the dense features of the batch"
        for name, parameter in self.model.named_parameters():
            if not parameter.isfinite().all():
                return f"the parameter {name}"
        if logits is not None and not logits.isfinite().all():
            return "the logits"
        for name, parameter in self.model.named_parameters():
            gradient = parameter.grad
            if gradient is not None and not (gradient._values() if gradient.is_sparse else gradient).isfinite().all():
                return f"the gradient of {name}"
        return "the loss"


def raise_faults(model: nn.Module) -> None:
    """Raises for the first id or offset that a GPU found out of range since the last call. Synchronises."""
    for module in model.modules():
        if isinstance(module, EmbeddingStack):
            module.raise_faults()


def _as_numbers(unread: list[tuple[str, Tensor, Tensor]]) -> list[tuple[str, float, float]]:
    """With one copy from the device for all of them."""
    if not unread:
        return []
    numbers = torch.stack([number.double() for _, loss, norm in unread for number in (loss, norm)]).tolist()
    return [(where, *numbers[2 * i : 2 * i + 2]) for i, (where, _, _) in enumerate(unread)]


def _largest(parameter: Tensor) -> float:
    return float(parameter.detach().abs().max()) if parameter.numel() else 0.0
