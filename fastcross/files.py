"""Atomic writing of files and folders, and checksums that detect damage."""

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
CHUNK = 8 << 20  # bytes per read for a checksum
DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def user_folder() -> Path:
    """Where fastcross keeps what it can make again, unless it is told another folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastcross"


@contextlib.contextmanager
def atomic(path: Path | str) -> Iterator[Path]:
    """A temporary path beside ``path``. It is synced and renamed to ``path`` if the block ends without error."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        with naming(path):
            yield temporary
        temporary.chmod(mode)  # a library may have created the file for its owner only
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
    """Adds the file's name to the error of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_IS_FULL or error.filename is not None:
            raise
        raise OSError(error.errno, f"cannot be written: {os.strerror(error.errno)}", str(path)) from error


@contextlib.contextmanager
def building(path: Path | str) -> Iterator[Path]:
    """A temporary folder beside ``path``. It replaces ``path`` if the block ends without error, and is removed
    otherwise.

    Temporary folders of killed processes are removed. The folder of a running process is locked.
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
    """Hold a lock on the folder, so that one process at a time changes it."""
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
    """The SHA-256 checksum of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def atomic_with_checksum(path: Path | str) -> Iterator[Path]:
    """Like :func:`atomic`, with the file's checksum in ``PATH.checksum``, for :func:`damage`.

    The new checksum is added to the old ones, then the file is renamed, then the old checksums are removed. So the file
    matches one of the checksums at any moment, even if processes are killed several times in a row.
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
    """A description of a file's damage; None if it has exactly the bytes that :func:`atomic_with_checksum` wrote."""
    found, beside = checksum(path), _beside(Path(path))
    known = _known(beside)
    if found in known.split():
        return None
    if not known:
        return f"its checksum, {beside.name}, is {'damaged' if beside.exists() else 'not there'}"
    return f"its checksum is {found[:12]}, in {beside.name} it is {known[:12]}"


def undisturbed(path: Path | str, read: Callable[[], Value]) -> Value:
    """The result of ``read``. It is repeated if another process replaced the file meanwhile, which is no damage."""
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
    """The lines of a checksum file; empty if it is damaged or missing."""
    content = beside.read_bytes() if beside.exists() else b""
    return content.decode() if re.fullmatch(rb"([0-9a-f]{64}\n)+", content) else ""


def _replace(path: Path, content: str) -> None:
    with atomic(path) as temporary:
        temporary.write_text(content)


def _identity(path: Path | str) -> tuple[int, int, int]:
    """An identity that changes if another file replaces this one."""
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns


def checksum(path: Path | str) -> str:
    """A fast checksum of a large file: of its size, and of the CRC-32 of each 8 MiB.

    It takes half the time of a SHA-256 of all bytes. It detects every change within four bytes, and any other change
    except one in four billion.
    """
    with open(path, "rb") as file, ThreadPoolExecutor(os.cpu_count()) as pool:
        descriptor, size = file.fileno(), os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(size.to_bytes(8, "little"))
        # Reading and CRC-32 release the GIL.
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
    """Write ``content`` as JSON with a last entry "sha256", by which read_checked_json detects any change."""
    with atomic(path) as temporary:
        temporary.write_text(_checked_text(content))


def read_checked_json(path: Path | str) -> dict[str, Any]:
    """Read what write_checked_json wrote. Any changed byte is a ValueError that names the file."""
    text = Path(path).read_bytes()
    try:
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError(f"a JSON object is expected, got {type(content).__name__}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: the file is damaged ({str(error) or type(error).__name__})") from None
    stored = content.pop("sha256", None)
    # The whole text is compared, not only the digests, so that every byte is checked.
    if text != _checked_text(content).encode():
        raise ValueError(f"{path}: the file is damaged; its checksum does not fit its content (stored: {stored})")
    return content


def _checked_text(content: Mapping[str, Any]) -> str:
    body = json.dumps(content, indent=1)
    return json.dumps({**content, "sha256": hashlib.sha256(body.encode()).hexdigest()}, indent=1) + "\n"
