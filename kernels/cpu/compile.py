"""Kernels as native functions: compiled by Numba, for one dtype each, and kept in a folder for every later process.

What is kept is LLVM's object code, which needs nothing but the C library, behind a checksum: a file that is damaged is
compiled anew and replaced. Of several processes that want a kernel at once one compiles it, and the others wait.
"""

import contextlib
import ctypes
import fcntl
import functools
import gc
import hashlib
import importlib
import inspect
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import torch

from fastcross.files import atomic
from fastcross.kernels import HOME

PATIENCE = 60.0  # seconds to wait for another process that compiles
_SETTINGS = ("NUMBA_CPU_FEATURES", "NUMBA_CPU_NAME", "NUMBA_OPT")  # Numba's own, which change what it makes

_kernels: dict[tuple[Any, torch.dtype], Any] = {}
_lock = threading.Lock()
_paused = False  # whether garbage is left alone until a kernel is compiled


class Code(NamedTuple):
    symbol: str
    content: bytes


def announce(message: str) -> None:
    """Tells the user why nothing happens for some seconds; put another function in its place to tell it otherwise."""
    print(message, file=sys.stderr, flush=True)


def compiled(kernel: str | Callable[[Any], object], dtype: torch.dtype) -> Callable[[Any], None]:
    """A kernel for one dtype, as a native function of its task's block.

    Args:
        kernel: "module.function" of ``fastcross.kernels.cpu.native``, imported if it has to be compiled; or a function.
    """
    found = _kernels.get((kernel, dtype))
    return _make(kernel, dtype) if found is None else found


def _make(kernel: str | Callable[[Any], object], dtype: torch.dtype) -> Callable[[Any], None]:
    with _lock:
        if (kernel, dtype) not in _kernels:  # otherwise another thread was faster
            stem, *files = (kernel,) if isinstance(kernel, str) else (kernel.__name__, inspect.getfile(kernel))
            name = f"fastcross-{stem}-{str(dtype).removeprefix('torch.')}-{_digest(*files)}.o"
            code = _read(name)
            if code is None:
                with _alone():
                    code = _read(name)  # another process was faster
                    _kernels[kernel, dtype] = _compile(kernel, dtype, name) if code is None else _load(code)
            else:
                _kernels[kernel, dtype] = _load(code)
        return _kernels[kernel, dtype]


def _compile(kernel: str | Callable[[Any], object], dtype: torch.dtype, name: str) -> Callable[[Any], None]:
    _tell_once(os.getpid())
    if isinstance(kernel, str):
        module, function = kernel.split(".")
        kernel = getattr(importlib.import_module(f"fastcross.kernels.cpu.native.{module}"), function)
    with _no_collection():
        native = importlib.import_module("fastcross.kernels.cpu.native.function").native_function(kernel, dtype)
    if native.content is not None:
        _write(name, Code(native.symbol, native.content))
    return _function(native.address, native)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Numba makes millions of objects; to look for garbage among them again and again would be a tenth of its time."""
    global _paused
    if not gc.isenabled():
        yield
        return
    _paused = True
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        _paused = False


@functools.cache
def _tell_once(process: int) -> None:
    """In the process that the user started, not in those that were forked from it."""
    if process == HOME:
        kept = "once per machine" if _writable() else "in every process: no folder to keep them in can be written"
        announce(f"compiling the CPU kernels ({kept})…")


def _load(code: Code) -> Callable[[Any], None]:
    _initialise()
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)  # the engine becomes its owner
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code.content))
    engine.finalize_object()
    return _function(engine.get_function_address(code.symbol), engine)


def _function(address: int, owner: Any) -> Callable[[Any], None]:
    function: Any = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
    function.owner = owner  # keeps the machine code alive
    return function


@functools.cache
def _initialise() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


def _folders() -> list[Path]:
    """Where compiled kernels are looked for: Numba's cache folder if one was set, else the package's and the user's."""
    if folder := os.environ.get("NUMBA_CACHE_DIR"):
        return [Path(folder)]
    folders = [Path(__file__).parent / "__pycache__"]
    with contextlib.suppress(RuntimeError):  # not every user has a home
        folders.append(Path.home() / ".cache" / "fastcross")
    return folders


@functools.cache
def _writable() -> Path | None:
    """The first of the folders that can be written."""
    for folder in _folders():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
    return None


def _read(name: str) -> Code | None:
    """What is kept under the name; None where that is nothing, or damaged."""
    for folder in _folders():
        with contextlib.suppress(OSError, ValueError):
            content = (folder / name).read_bytes()
            checksum, symbol, code = content.split(b"\n", 2)
            if checksum == _checksum(name, symbol, code):
                return Code(symbol.decode(), code)
    return None


def _write(name: str, code: Code) -> None:
    folder, symbol = _writable(), code.symbol.encode()
    with contextlib.suppress(OSError):  # a full disk: compiled for this process alone
        if folder is not None:
            with atomic(folder / name) as file:
                file.write_bytes(b"\n".join((_checksum(name, symbol, code.content), symbol, code.content)))


def _checksum(name: str, symbol: bytes, code: bytes) -> bytes:
    return hashlib.sha256(b"\n".join((name.encode(), symbol, code))).hexdigest().encode()


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """While no other process compiles for the same folder, or after some patience."""
    folder = _writable()
    if folder is None:
        yield
        return
    handle, deadline = os.open(folder, os.O_RDONLY), time.monotonic() + PATIENCE
    try:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:  # no locks on this file system
                break
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # closing is not enough: a forked process has the handle, too
        os.close(handle)


@functools.cache
def _digest(*others: str) -> str:
    """Of all that the machine code depends on: the sources, other files among them, the compilers, the processor."""
    files = [*sorted(Path(__file__).parent.rglob("*.py")), *map(Path, others)]
    sources = b"".join(file.read_bytes() for file in files)
    compilers = version("numba"), version("llvmlite")
    processor = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    settings = sorted((name, value) for name, value in os.environ.items() if name in _SETTINGS)
    return hashlib.sha256(sources + repr((compilers, processor, settings)).encode()).hexdigest()[:16]


def _begin_anew() -> None:
    """A forked process has no thread that would release the lock, and let garbage be collected again."""
    global _lock, _paused
    _lock = threading.Lock()
    if _paused:
        gc.enable()
        _paused = False


os.register_at_fork(after_in_child=_begin_anew)
