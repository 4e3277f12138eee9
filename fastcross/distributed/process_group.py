"""One process among those that torchrun started: rank, device, process group, and who prints when something fails."""

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.optim  # before there is a group: a default argument in it would hold that group for ever
from torch import Tensor

from fastcross.distributed import restarts, under_torchrun
from fastcross.training.step import Processes

Group = TypeVar("Group", bound="ProcessGroup")
TIMEOUT = timedelta(minutes=10)  # the longest that a rank waits for another


class ProcessGroup(Processes):
    """The ranks of a process group: gloo between CPUs, NCCL between GPUs (with gloo for numbers on the host)."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.rank, self.size = device, dist.get_rank(), dist.get_world_size()

    def mean(self, value: Tensor) -> Tensor:
        value = value.clone()
        dist.all_reduce(value)
        return value / self.size

    def sum(self, value: Tensor) -> Tensor:
        value = value.clone()
        dist.all_reduce(value)
        return value

    def largest(self, number: int) -> int:
        if self.size == 1:
            return number
        value = torch.tensor(number)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return int(value)

    def any(self, *flags: bool) -> tuple[bool, ...]:
        values = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return tuple(map(bool, values.tolist()))

    def gather(self, rows: Tensor) -> Tensor:
        sizes = [torch.zeros((), dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor(len(rows)))
        height = int(max(sizes))
        # Collectives need equal shapes: pad with zeros, and remove them afterwards.
        padded = torch.cat((rows, rows.new_zeros((height - len(rows), *rows.shape[1:]))))
        found = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(found, padded)
        return torch.cat([part[: int(size)] for part, size in zip(found, sizes, strict=True)])

    def collect(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def share(self, value: Any) -> Any:
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]


@contextlib.contextmanager
def start(device: torch.device, kind: type[Group] = ProcessGroup) -> Iterator[Group]:  # type: ignore[assignment]
    """Join the processes that torchrun started. Without torchrun, be the only one.

    An error in the block ends all processes. The first rank to fail prints the reason, the others exit silently. A rank
    that fails exits, which breaks the connections that the others wait on, so that none of them hangs.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store: dist.Store = dist.HashStore()
    rank, size = 0, 1
    if under_torchrun():
        store, rank, size = next(dist.rendezvous("env://", timeout=TIMEOUT))
        # torchrun's store outlives its workers: restarted workers must not find the addresses of dead ones.
        store = dist.PrefixStore(f"attempt-{restarts()}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    processes = kind(device)
    try:
        with _exiting_on_sigterm():
            yield processes
    except Exception as error:
        if processes.size == 1:
            raise
        if not _first_to_fail(store, processes.rank):
            sys.exit(2)
        raise RankError(processes.rank, error) from error
    finally:
        # Without this a process group that has lost a rank may wait for it on the way out.
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
    # Gloo's threads end with the last reference to the group, which a model that is garbage may hold. One that
    # gives a tensor back while the interpreter shuts down would abort the process.
    gc.collect()


@contextlib.contextmanager
def _exiting_on_sigterm() -> Iterator[None]:
    """torchrun ends the other ranks by SIGTERM when one has failed: they exit, and clean up."""
    try:
        previous = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    except ValueError:  # not the main thread, where Python allows no handlers
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


class RankError(RuntimeError):
    """The error of one rank, for all ranks."""

    def __init__(self, rank: int, error: Exception) -> None:
        reason = str(error) or type(error).__name__
        if isinstance(error, RuntimeError) and ("onnection" in reason or "imed out" in reason):
            reason = f"lost another rank, which died or does not answer ({reason.splitlines()[0]})"
        super().__init__(f"rank {rank}: {reason}")


def local_device(name: str) -> torch.device:
    """The device of this rank: one of the machine's GPUs, or the CPU."""
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cpu" if name == "auto" else name)


def _first_to_fail(store: dist.Store, rank: int) -> bool:
    """Whether this rank is the first to fail, by torchrun's store: the other ranks may be dead."""
    try:
        return store.compare_set("fastcross/failed", "", str(rank)) == str(rank).encode()
    except Exception:  # the store died with another rank, which then had no time to say anything
        return True
