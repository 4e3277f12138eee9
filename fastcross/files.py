"""The one way a file or a folder comes to stand where it does, whole or not at all, and how damage to it is noticed."""

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

Value = TypeVar("Value")
CHUNK = 8 << 20  # bytes that are summed at once
DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def atomic(path: Path | str) -> Iterator[Path]:
    """A temporary path beside ``path`` that takes its place, synced to disk, when the block ends without error."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        with naming(path):
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


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Gives the error of a full disk, which does not know the name of its file, that name."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_IS_FULL or error.filename is not None:
            raise
        raise OSError(error.errno, f"cannot be written: {os.strerror(error.errno)}", str(path)) from error


@contextlib.contextmanager
def building(path: Path | str) -> Iterator[Path]:
    """A folder beside ``path`` that becomes ``path`` (replacing what is there) if all goes well, and vanishes if not.

    Folders that killed processes left behind are removed; one where a process is at work is known by its lock.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = path.with_name(f".{path.name}.building-{os.getpid()}-{time.time_ns()}-{threading.get_ident()}")
    with contextlib.ExitStack() as stack:
        with _locked(path.parent):
            _remove_leftovers(path)
            folder.mkdir()
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            lock = stack.enter_context(open(folder / "lock", "w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        with naming(path):
            yield folder
        old = path.with_name(folder.name.replace(".building-", ".replaced-"))
        with _locked(path.parent):
            if path.exists():
                path.rename(old)
            folder.rename(path)
            (path / "lock").unlink(missing_ok=True)
        shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time: what is looked at in between stays as it is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _remove_leftovers(path: Path) -> None:
    for old in path.parent.glob(f".{glob.escape(path.name)}.replaced-*"):
        shutil.rmtree(old, ignore_errors=True)
    for left in path.parent.glob(f".{glob.escape(path.name)}.building-*"):
        with contextlib.suppress(OSError), open(left / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)


def sha256(path: Path | str) -> str:
    """The checksum by which a file is known again."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def atomic_with_checksum(path: Path | str) -> Iterator[Path]:
    """As :func:`atomic`, with the file's checksum beside it in ``PATH.checksum``, where :func:`damage` looks for it.

    The new checksum is written above those that are there, then the file takes its place, then the old ones go. Until
    the file takes its place the old one fits one of them, from then on the new one does: a process that is killed at
    any moment, once or several times in a row, leaves a file that fits.
    """
    path = Path(path)
    beside = _beside(path)
    old = _known(beside)
    with atomic(path) as temporary:
        yield temporary
        new = f"{checksum(temporary)}\n"
        _replace(beside, new + old)
    _replace(beside, new)


def damage(path: Path | str) -> str | None:
    """What is wrong with a file, unless it is to the last byte what :func:`atomic_with_checksum` wrote."""
    found, beside = checksum(path), _beside(Path(path))
    known = _known(beside)
    if found in known.split():
        return None
    if not known:
        return f"its checksum, {beside.name}, is {'damaged' if beside.exists() else 'not there'}"
    return f"its checksum is {found[:12]}, in {beside.name} it is {known[:12]}"


def undisturbed(path: Path | str, read: Callable[[], Value]) -> Value:
    """What ``read`` finds at ``path``, again where a newer file took its place meanwhile: that is no damage."""
    while True:
        before = _identity(path)
        try:
            value = read()
        except ValueError:
            if _identity(path) == before:
                raise
        else:
            if _identity(path) == before:
                return value


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.checksum")


def _known(beside: Path) -> str:
    """The checksums in a file of them, one in a line; none of a file that is damaged or not there."""
    content = beside.read_bytes() if beside.exists() else b""
    return content.decode() if re.fullmatch(rb"([0-9a-f]{64}\n)+", content) else ""


def _replace(path: Path, content: str) -> None:
    with atomic(path) as temporary:
        temporary.write_text(content)


def _identity(path: Path | str) -> tuple[int, int, int]:
    """What tells a file from another that takes its place."""
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns


def checksum(path: Path | str) -> str:
    """By which a large file is known again: of its size, and of the CRC-32 of each 8 MiB.

    That takes half the time of a SHA-256 of all bytes, and notices any change within four bytes for certain, any other
    but for one in four billion.
    """
    with open(path, "rb") as file, ThreadPoolExecutor(os.cpu_count()) as pool:
        descriptor, size = file.fileno(), os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(size.to_bytes(8, "little"))
        # Reading and summing release the interpreter's lock.
        for value in pool.map(lambda at: _crc32(descriptor, at, min(CHUNK, size - at)), range(0, size, CHUNK)):
            digest.update(value.to_bytes(4, "little"))
    return digest.hexdigest()


def _crc32(descriptor: int, start: int, length: int) -> int:
    value = 0
    while length > 0:
        piece = os.pread(descriptor, min(length, 1 << 20), start)
        if not piece:
            break  # the file has become shorter
        value = zlib.crc32(piece, value)
        start, length = start + len(piece), length - len(piece)
    return value


def write_checked_json(path: Path | str, content: Mapping[str, Any]) -> None:
    """``content`` as JSON with a last entry "sha256" over all of it, by which read_checked_json notices any change."""
    with atomic(path) as temporary:
        temporary.write_text(_checked_text(content))


def read_checked_json(path: Path | str) -> dict[str, Any]:
    """What write_checked_json wrote, to the byte; a ValueError that names the file for anything else."""
    text = Path(path).read_bytes()
    try:
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError(f"a JSON object is expected, got {type(content).__name__}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: the file is damaged ({str(error) or type(error).__name__})") from None
    stored = content.pop("sha256", None)
    # The whole text is compared, and not the digests alone, so that no byte of the file is left out.
    if text != _checked_text(content).encode():
        raise ValueError(f"{path}: the file is damaged; its checksum does not fit its content (stored: {stored})")
    return content


def _checked_text(content: Mapping[str, Any]) -> str:
    body = json.dumps(content, indent=1)
    return json.dumps({**content, "sha256": hashlib.sha256(body.encode()).hexdigest()}, indent=1) + "\n"
