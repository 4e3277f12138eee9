"""The rows of a training: where they come from, and how they reach the step without its waiting for them.

They come from a cache, from files that are prepared first, or from a generated click log. A thread reads the next batch
while the step before it runs. The batches are the same, in the same order. A training that stops leaves at most one
batch that was read for nothing: where it goes on follows from its step number, not from what was read.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fastcross._version import __version__
from fastcross.data import Batch, Cache
from fastcross.training.config import GENERATED_ROWS, TrainingConfig
from fastcross.training.processes import Processes

Show = Callable[[str], None]
Progress = Callable[[str, int, int], None]  # stage, done, total
Opened = tuple[Cache, Mapping[str, float]]  # and the best possible logloss of each part, where it is known
THREAD_NAME = "fastcross-input"


def user_folder() -> Path:
    """Where prepared data is kept unless another folder is named."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastcross"


@dataclass(frozen=True)
class Dataset:
    """Rows, and how they are prepared.

    Args:
        files: a cache, or files to prepare; none for a generated click log, whose best possible logloss is known.
        cache: where to keep what is prepared; None for a folder of the user's own.
        preparation: arguments of :func:`fastcross.data.prepare`; those that are not given are left to it.
        rows: of the generated log.
    """

    files: tuple[str, ...] = ()
    cache: str | None = None
    preparation: Mapping[str, Any] = field(default_factory=dict)
    rows: int = GENERATED_ROWS

    def __post_init__(self) -> None:
        files = (self.files,) if isinstance(self.files, str | os.PathLike) else self.files
        object.__setattr__(self, "files", tuple(os.fspath(file) for file in files))

    def open(self, show: Show | None = None, *, progress: Progress | None = None) -> Opened:
        """The cache, made first if need be, and the best possible logloss of each of its parts, where known."""
        show = show or _silent
        if not self.files:
            return self._generate(show, progress)
        if len(self.files) == 1 and Path(self.files[0]).is_dir():
            return _shown(Cache.open(self.files[0]), show), {}
        return self._prepare(show, progress), {}

    def _generate(self, show: Show, progress: Progress | None) -> Opened:
        from fastcross.data.generate import read_info, write_click_log  # needs pyarrow, which a cache does not

        home = Path(self.cache) if self.cache else user_folder() / f"clicks-{self.rows}-{__version__}"
        home.mkdir(parents=True, exist_ok=True)
        log = home / "clicks.txt"
        if not log.exists() or not read_info(log):
            show(f"generating a click log of {self.rows:,} rows with planted crosses: {log}")
            write_click_log(log, self.rows)
        info = read_info(log)
        assert info is not None
        options = {"format": "criteo", "split": info.split}
        cache = Dataset((str(log),), str(home / "cache"), options)._prepare(show, progress)
        known = info.bayes_logloss_parts.items()
        return cache, {part: value for part, value in known if math.isfinite(value)}  # a part may have no rows

    def _prepare(self, show: Show, progress: Progress | None) -> Cache:
        """`prepare` itself sees whether the cache is there and up to date."""
        from fastcross.data import prepare

        folder = self.cache or self._folder()
        cache = prepare(self.files, folder, progress=progress or False, **self.preparation)
        return _shown(cache, show)

    def _folder(self) -> str:
        """One for these files under these options."""
        paths = [str(Path(file).resolve()) for file in self.files]
        key = json.dumps([paths, dict(self.preparation)], sort_keys=True, default=str)
        name = f"{Path(self.files[0]).name.split('.')[0]}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
        return str(user_folder() / name)


def _shown(cache: Cache, show: Show) -> Cache:
    """What was made of the data, at every training: a column that was taken for the wrong kind costs accuracy."""
    show(f"data: {cache.path}\n{cache.report}")
    skipped = cache.manifest["skipped"]
    if skipped["rows"]:
        show(f"skipped {skipped['rows']:,} bad rows, such as: {skipped['examples'][0]}")
    return cache


def check_labels(cache: Cache, show: Show | None = None) -> None:
    """Raise ValueError where all training rows have one label; say so of validation rows, which then have no AUC."""
    if cache.schema.task == "regression":
        return  # `prepare` has seen that it varies
    labels = _first_labels(cache, "train")
    if len(labels) < 2:
        rows = cache.sizes["train"]
        raise ValueError(
            f"there is nothing to learn: all {rows:,} training rows of {cache.path} have label {labels[0]:g}"
        )
    if show and cache.schema.task == "binary" and len(labels := _first_labels(cache, "validation")) == 1:
        show(f"all {cache.sizes['validation']:,} validation rows have label {labels[0]:g}: they have no AUC")


def _first_labels(cache: Cache, part: str) -> list[float]:
    """The first two different labels of a part, if it has as many."""
    found: set[float] = set()
    for batch in cache.batches(part, 4096):
        assert batch.label is not None
        found |= set(batch.label.unique().tolist())
        if len(found) > 1:
            break
    return sorted(found)[:2]


def _silent(line: str) -> None:
    pass


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
