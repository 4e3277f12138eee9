"""One process at a time writes into a run folder."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from fastcross.training.checkpoint import CheckpointError

LOCK = ".lock"


class RunInUse(CheckpointError):
    """Another process is at work in a run folder."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; the system takes it back from a process that dies, however it dies."""
    path = folder / LOCK
    descriptor = _acquire(path)
    try:
        with contextlib.suppress(OSError):  # on a full disk the lock holds all the same, without a name on it
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held: see _acquire
        os.close(descriptor)


def _acquire(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever held it before may have removed the file since it was opened here: then it is another one's turn.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return descriptor
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise RunInUse(f"{path.parent} is in use by {holder}; wait for it, or stop it, and try again") from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
