"""Input that does not wait: a thread reads the next batch while the step before it runs.

The batches are the same, in the same order. A training that stops leaves at most one batch that was read for nothing:
where it goes on follows from its step number, not from what was read.
"""

import os
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from fastcross.data import Batch, Cache
from fastcross.training.config import TrainingConfig
from fastcross.training.processes import Processes

THREAD_NAME = "fastcross-input"


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
