"""A cache appears complete or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fastcross.data.cache import Cache
from fastcross.data.errors import DataError


def reusable(path: Path, fingerprint: str) -> bool:
    """Whether a cache of this fingerprint is there; refuses to replace a folder that is something else."""
    if not path.exists():
        return False
    if not path.is_dir() or (any(path.iterdir()) and not (path / "manifest.json").exists()):
        raise DataError(f"{path}: exists and is not a cache; name another folder, or remove it")
    try:
        Cache.open(path, fingerprint=fingerprint)
    except DataError:
        return False
    return True


@contextmanager
def building(path: Path) -> Iterator[Path]:
    """A folder beside `path` that becomes `path` if all goes well, and vanishes if not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{path.name}.building-*"):
        with open(left / "lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue  # another process is at work there
            shutil.rmtree(left, ignore_errors=True)  # its process was killed
    folder = path.with_name(f".{path.name}.building-{os.getpid()}-{time.time_ns()}")
    folder.mkdir()
    try:
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
            (folder / "lock").unlink()
            if path.exists():
                old = path.with_name(folder.name.replace(".building-", ".replaced-"))
                path.rename(old)
                folder.rename(path)
                shutil.rmtree(old, ignore_errors=True)
            else:
                folder.rename(path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
