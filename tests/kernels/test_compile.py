"""Compiled kernels are kept, found again, and compiled anew when they are damaged, by any number of processes."""

import errno
import gc
import os
import subprocess
import sys

import pytest
import torch

from fastcross.kernels.cpu import compile as cpu_compile
from fastcross.kernels.cpu import warm_up
from fastcross.kernels.cpu.fields import whole
from fastcross.kernels.cpu.layout import Layout
from fastcross.kernels.cpu.native.unpack import take

TWICE = Layout("twice", items="M", work=lambda n: 1, operands={"x": whole("M")})
take_twice = take(TWICE)


def twice(block):
    task = take_twice(block)
    while task.chunk < task.chunks:
        for m in range(task.start, task.stop):
            task.x[m] *= 2
        task = take_twice(block)


class Process:
    """Stands for a fresh one: nothing compiled in memory; counts what it compiles and says."""

    def __init__(self, monkeypatch):
        self.compiled, self.said = 0, []
        self.compile = cpu_compile._compile
        monkeypatch.setattr(cpu_compile, "_kernels", {})
        monkeypatch.setattr(cpu_compile, "_compile", self.count)
        monkeypatch.setattr(cpu_compile, "announce", self.said.append)
        cpu_compile._writable.cache_clear()
        cpu_compile._tell_once.cache_clear()

    def count(self, *arguments):
        self.compiled += 1
        return self.compile(*arguments)

    def run(self, dtype=torch.float32):
        x = torch.arange(5, dtype=dtype)
        task = TWICE.task(dtype, x=x)
        cpu_compile.compiled(twice, dtype)(task.block)
        assert x.tolist() == [0, 2, 4, 6, 8]


@pytest.fixture
def start(monkeypatch):
    """Starts a process that keeps its kernels in this folder."""

    def start(*folders):
        monkeypatch.undo()
        monkeypatch.setattr(cpu_compile, "_folders", lambda: list(folders))
        return Process(monkeypatch)

    yield start
    monkeypatch.undo()
    cpu_compile._writable.cache_clear()


def test_a_later_process_finds_what_was_compiled(start, tmp_path):
    first = start(tmp_path / "new")
    first.run()
    first.run()
    assert (first.compiled, first.said) == (1, ["compiling the CPU kernels (once per machine)…"])
    first.run(torch.float64)
    assert (first.compiled, len(first.said)) == (2, 1), "the other dtype is compiled when it is used, and said once"
    second = start(tmp_path / "new")
    second.run()
    assert (second.compiled, second.said) == (0, [])


def flip(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


DAMAGE = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[:-100],
    "garbage": lambda content: os.urandom(len(content)),
    "text": lambda content: "no code\n\nat all, é".encode(),
    "one bit": flip,
    "no checksum": lambda content: content[64:],
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_noticed_and_mended(start, tmp_path, kind):
    start(tmp_path).run()
    (path,) = tmp_path.iterdir()
    whole_content = path.read_bytes()
    path.write_bytes(DAMAGE[kind](whole_content))
    second = start(tmp_path)
    second.run()
    assert second.compiled == 1
    third = start(tmp_path)
    third.run()
    assert third.compiled == 0, "the damaged file was replaced"
    assert list(tmp_path.iterdir()) == [path]


def test_the_code_of_another_kernel_is_not_taken(start, tmp_path):
    process = start(tmp_path)
    process.run(torch.float64)
    process.run()
    double, single = sorted(tmp_path.iterdir(), key=lambda path: "float32" in path.name)
    single.write_bytes(double.read_bytes())
    again = start(tmp_path)
    again.run()
    assert again.compiled == 1


def test_nowhere_to_keep_compiled_code(start, tmp_path):
    """A read-only install with a read-only home: the kernels are compiled for the process alone."""
    (tmp_path / "file").touch()
    process = start(tmp_path / "file" / "folder")
    process.run()
    assert process.compiled == 1
    assert process.said == ["compiling the CPU kernels (in every process: no folder to keep them in can be written)…"]


def test_what_somebody_else_compiled_is_found_in_a_folder_that_cannot_be_written(start, tmp_path, monkeypatch):
    start(tmp_path).run()
    process = start(tmp_path)
    monkeypatch.setattr(cpu_compile, "_writable", lambda: None)
    process.run()
    assert process.compiled == 0


def test_a_full_disk_is_no_error(start, tmp_path, monkeypatch):
    process = start(tmp_path)

    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cpu_compile, "atomic", full)
    process.run()
    assert process.compiled == 1
    assert list(tmp_path.iterdir()) == []


def test_other_sources_compilers_or_processors_are_other_files(start, tmp_path, monkeypatch):
    start(tmp_path).run()
    for place, name, value in (
        (cpu_compile, "version", lambda package: "0"),
        (cpu_compile.llvm, "get_host_cpu_name", lambda: "another"),
        (cpu_compile.os, "environ", {"NUMBA_OPT": "0"}),
        (cpu_compile.Path, "read_bytes", lambda path: b"other sources"),
    ):
        before = cpu_compile._digest()
        with monkeypatch.context() as context:
            context.setattr(place, name, value)
            cpu_compile._digest.cache_clear()
            assert cpu_compile._digest() != before
        cpu_compile._digest.cache_clear()


def test_a_function_of_another_file_is_kept_for_that_file_alone(tmp_path):
    file = tmp_path / "kernel.py"
    file.write_text("one")
    before = cpu_compile._digest(str(file))
    file.write_text("another")
    cpu_compile._digest.cache_clear()
    assert len({before, cpu_compile._digest(str(file)), cpu_compile._digest()}) == 3


def test_a_forked_worker_says_nothing(start, tmp_path, monkeypatch):
    process = start(tmp_path)
    monkeypatch.setattr(cpu_compile, "HOME", os.getpid() + 1)
    process.run()
    assert (process.compiled, process.said) == (1, [])


def test_a_fork_while_a_thread_compiles(start, tmp_path):
    process = start(tmp_path)
    with cpu_compile._lock:
        child = os.fork()
        if child == 0:
            process.run()
            os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)


def test_garbage_is_collected_after_a_compilation_and_in_a_process_forked_meanwhile():
    assert gc.isenabled()
    with cpu_compile._no_collection():
        assert not gc.isenabled()
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() else 1)
    assert os.waitpid(child, 0) == (child, 0)
    assert gc.isenabled()
    gc.disable()
    try:
        with cpu_compile._no_collection():
            pass
        assert not gc.isenabled()  # as it was
    finally:
        gc.enable()


def test_processes_that_start_at_once_compile_once(tmp_path):
    script = """
import torch, fastcross
from fastcross import reference
x0, x, w, b = torch.randn(3, 4), torch.randn(3, 4), torch.randn(4), torch.randn(4)
y = fastcross.cross_layer(x0, x, w, b, backend="numba")
assert torch.allclose(y, reference.cross_layer(x0, x, w, b), atol=1e-5)
"""
    # Code of this level is kept nowhere else: what the package's folder holds would be found before it is compiled.
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_OPT": "1"}
    run = [sys.executable, "-c", script]
    processes = [subprocess.Popen(run, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    said = [process.communicate(timeout=600)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, said
    assert sorted(said) == ["", "", "", "compiling the CPU kernels (once per machine)…\n"]
    assert len(list(tmp_path.iterdir())) == 1


def test_warm_up_compiles_ahead(start, tmp_path):
    process = start(tmp_path)
    warm_up(torch.float32, "row_updates")
    assert process.compiled == 3
    warm_up(torch.float32, "row_updates")
    assert process.compiled == 3
    with pytest.raises(ValueError, match=r"operators are .*; got 'cross'"):
        warm_up(torch.float32, "cross")
    with pytest.raises(ValueError, match=r"torch.float32 or torch.float64; got torch.float16"):
        warm_up(torch.float16)
