"""One step of training, of one process or several: a batch turns into gradients, and these into other parameters.

A thread reads the next batch while the step before it runs. The batches are the same, in the same order. A training
that stops leaves at most one batch that was read for nothing: where it goes on follows from its step number.

Nothing in a step waits for the device, so on a GPU it is recorded once as a CUDA graph: its launches are then replayed
by a single one.

    the first WARM_UP batches    train as usual, on a side stream: what is compiled or allocated at first use is so then
    the next one                 is copied into buffers, and the step on these is recorded, which computes nothing
    it and all others            are copied into the buffers, and the recorded step is replayed

A batch of another size takes the step as it is. So every batch is trained on once, and in its turn. What changes from
step to step lies in tensors that the recorded step reads: the batch, the learning rate, the number of the step.

A training that diverges is stopped: values that are not finite, or a loss that explodes.
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
    """One process of ``size``, which calls each of these together with the others; the base class is alone."""

    rank, size = 0, 1

    def mean(self, value: Tensor) -> Tensor:
        """The mean of the ranks' values."""
        return value

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag, whether it is set on any rank."""
        return flags

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, one rank after the other."""
        return rows

    def share(self, value: Any) -> Any:
        """What rank 0 has."""
        return value

    def place(
        self, model: Model, config: TrainingConfig, *, device: str, sharding: str | None, embedding: str
    ) -> tuple[Any, Optimizer]:
        """The model where it is trained, and its optimiser."""
        if sharding is not None:
            raise ValueError(f"sharding {sharding!r} needs the processes of fastcross.distributed.sharding.join")
        model = model.to(choose_device(device))
        return model, make_optimizer(model, config)

    def open_run(self, path: Path | str) -> Run:
        """A run folder, to be written and read by all of them."""
        return Run(path)


ALONE = Processes()


def make_optimizer(model: Model, config: TrainingConfig) -> Optimizer:
    """The configuration's, for a model that is where it is trained: on a GPU one whose steps can be captured."""
    on_gpu = next(model.parameters()).device.type == "cuda"
    capturable = on_gpu and config.graph != "off" and config.optimizer in CAPTURABLE
    return configure(model, lr=config.lr, name=config.optimizer, capturable=capturable)


def read_from(
    step: int, cache: Cache, config: TrainingConfig, processes: Processes, drop_last: bool
) -> Iterator[Batch]:
    """The training rows of step number ``step``, the first being 0, and those of all steps after it, without an end."""
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
    """The batches on ``device``, each read by a thread while the caller is busy with the one before.

    What the reading raises is raised here, with its traceback. The thread ends with the batches, or when this generator
    is closed or dropped. A process that was forked off has no such thread: there the generator raises.
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
    """The batches on ``device``, each read when it is asked for."""
    for batch in batches:
        yield batch.to(device, non_blocking=True)


def _read(batches: Iterator[Batch], copies: "_Copies | None") -> Any:
    """In the thread: the next batch, on its way to the GPU; None after the last."""
    batch = next(batches, None)
    return batch if batch is None or copies is None else copies.send(batch)


class _Copies:
    """Copies to a GPU through pinned memory, on a stream of their own: beside the step, not after it."""

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
    """What a step tells of itself, on the model's device."""

    logits: Tensor
    loss: Tensor  # the mean over all rows of all processes
    norm: Tensor  # of all gradients together, before they are clipped


Replay = Callable[[], Outcome]


class Step:
    """Forward pass, loss, backward pass, clipping; then the optimiser. A whole batch has ``rows`` rows."""

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
        """All but the optimiser's part: the parameters stay as they are."""
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
    """GPUs with bfloat16 units gain; CPUs mostly emulate it, so there it is off unless asked for."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def row_weights(batch: Batch, cache: Cache, config: TrainingConfig) -> Tensor | None:
    """(B,): each row's weight in proportion to the training rows' mean, and positive_weight times that of positives."""
    weights = None if batch.weight is None else batch.weight / cache.mean_weight
    if config.positive_weight == 1:
        return weights
    assert batch.label is not None
    of_positives = 1 + (config.positive_weight - 1) * batch.label
    return of_positives if weights is None else weights * of_positives


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


class TrainingError(RuntimeError):
    """Training cannot go on; the message says where it failed and why."""


class NotFiniteError(TrainingError, ValueError):
    """Predictions are not numbers: of a model that diverged, or that was given bad values."""


class DivergenceCheck:
    """Looks at the loss and the gradient norm of every step, and sums up the loss.

    Reading them makes the host wait for the device, so on a GPU they are read every 50 steps; the failing step is still
    named exactly. On a CPU every step is checked before it changes the parameters. Ids that a GPU found to be out of
    range are read with them: the loss of such a step is NaN.
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
        """Check what has been added since the last time."""
        unread, self._unread = self._unread, []
        numbers = _as_numbers(unread)
        if numbers:
            try:
                raise_faults(self.model)
            except ValueError as error:
                # Of the steps from the first such one on, any may be the one whose row is told.
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
        """In the order of the computation: the input, the parameters, the logits, the gradients."""
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
    """Raises for the first id or offset that a GPU found to be wrong since the last call; waits for the GPU."""
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
