"""One inference thread: requests wait in a bounded queue, and those of rows that wait at the same time share a batch.

A batch reads the weights once, whatever its size: the rows of 30 requests take a third of the time of 30 batches of one
row. While the thread computes, requests gather by themselves, so it need not wait for more of them (max_delay = 0);
docs/serving.md has the figures.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from fastcross.data.columns import DataError

Array = npt.NDArray[np.float64]
Row = Mapping[str, Any]
Value = TypeVar("Value")


class Predictor(Protocol):
    """What the thread computes with."""

    def predict(self, rows: Sequence[Row]) -> Array:
        """An answer per row, (n,) or (n, C); a DataError names the first bad row, from 1, and the column."""


class QueueFull(Exception):
    """As many requests wait as may."""


@dataclass(eq=False)
class Job:
    """A request of rows, or other work."""

    work: Sequence[Row] | Callable[[Any], Any]
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Any]
    arrived: float = field(default_factory=time.monotonic)

    @property
    def rows(self) -> int | None:
        return None if callable(self.work) else len(self.work)


class Inference:
    """The thread and its queue. ``served`` may be replaced at any time; a batch is computed with one model.

    Args:
        served: the model.
        max_batch: no request joins a batch that would have more rows with it.
        max_delay: seconds that a request waits for others at most, where the thread has nothing else to do.
        max_queue: requests that wait at most; :class:`QueueFull` beyond.
        observe: called with the number of rows of each batch.
    """

    def __init__(
        self,
        served: Predictor,
        *,
        max_batch: int,
        max_delay: float = 0.0,
        max_queue: int = 256,
        observe: Callable[[int], object] = lambda rows: None,
    ) -> None:
        self.served, self.max_batch, self.max_delay, self.max_queue = served, max_batch, max_delay, max_queue
        self.observe = observe
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="inference", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._jobs)

    async def predict(self, rows: Sequence[Row]) -> tuple[Any, Array]:
        """The model that answered, and its answer."""
        return await self._submit(rows)

    async def run(self, work: Callable[[Any], Value]) -> Value:
        """Other work than rows: a function of the model."""
        return await self._submit(work)

    def close(self) -> None:
        """Answer what waits, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _submit(self, work: Sequence[Row] | Callable[[Any], Any]) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        job = Job(work, loop, loop.create_future())
        with self._changed:
            if len(self._jobs) >= self.max_queue or self._closed:
                raise QueueFull(f"{len(self._jobs)} requests wait, and {self.max_queue} may; try again")
            self._jobs.append(job)
            self._changed.notify()
        return job.answer

    def _run(self) -> None:
        while jobs := self._next():
            answers = self._answers(jobs, self.served)
            jobs[0].loop.call_soon_threadsafe(_deliver, jobs, answers)

    def _next(self) -> list[Job]:
        """The first job, with those after it that fit into its batch; none after close()."""
        with self._changed:
            while not self._jobs:
                if self._closed:
                    return []
                self._changed.wait()
            first = self._jobs.popleft()
            jobs, rows, until = [first], first.rows, first.arrived + self.max_delay
            while rows is not None and rows < self.max_batch:
                if self._jobs:
                    more = self._jobs[0].rows
                    if more is None or rows + more > self.max_batch:
                        break
                    jobs.append(self._jobs.popleft())
                    rows += more
                elif self._closed or (left := until - time.monotonic()) <= 0:
                    break
                else:
                    self._changed.wait(left)
            return jobs

    def _answers(self, jobs: Sequence[Job], served: Predictor) -> list[Any]:
        """Of each job its own, an exception where it failed."""
        if callable(jobs[0].work):
            return [_attempt(jobs[0].work, served)]
        found = _attempt(served.predict, [row for job in jobs for row in job.work])  # type: ignore[union-attr]
        if isinstance(found, DataError) and len(jobs) > 1:  # each by itself: one is bad, and is told in its own rows
            one_by_one = [_attempt(served.predict, job.work) for job in jobs]
            return [each if isinstance(each, Exception) else (served, each) for each in one_by_one]
        if isinstance(found, Exception):
            return [found for _ in jobs]
        self.observe(len(found))
        ends = np.cumsum([job.rows for job in jobs])
        return [(served, each) for each in np.split(found, ends[:-1])]


def _attempt(function: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return function(argument)
    except Exception as error:
        return error


def _deliver(jobs: Sequence[Job], answers: Sequence[Any]) -> None:
    for job, answer in zip(jobs, answers, strict=True):
        if job.answer.done():  # its client has gone
            continue
        if isinstance(answer, Exception):
            job.answer.set_exception(answer)
        else:
            job.answer.set_result(answer)
