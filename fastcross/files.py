"""The one way a file comes to stand where it does: whole, or not at all."""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic(path: Path | str) -> Iterator[Path]:
    """A temporary path beside ``path`` that takes its place, synced to disk, when the block ends without error."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)  # a library that makes its own file may keep it to its owner
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # some file systems cannot sync a folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def sha256(path: Path | str) -> str:
    """The checksum by which a file is known again."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
