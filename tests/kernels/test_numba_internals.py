"""What Numba does not document is as this version of it has it, and is not needed."""

import numba
import pytest
import torch
from numba import types

from fastcross.kernels.cpu import compile as cpu_compile
from fastcross.kernels.cpu.native.function import object_code

SIGNATURE = types.void(types.CPointer(types.float32))


def increment(values):
    values[0] += 1


def needs_numba(values):
    values[0] = len([values[1]])  # a list of Numba's lives in memory that Numba's runtime counts


def test_object_code_is_found_and_runs_by_itself():
    native = numba.cfunc(SIGNATURE)(increment)
    code = object_code(native)
    assert code is not None
    function = cpu_compile._load(cpu_compile.Code(native.native_name, code))
    x = torch.tensor([1.0])
    function(x.data_ptr())
    assert x.item() == 2


def test_object_code_that_needs_numba_is_not_kept():
    assert object_code(numba.cfunc(SIGNATURE)(needs_numba)) is None


@pytest.mark.parametrize("name", ["_library", "inspect_llvm"])
def test_a_numba_without_it(name):
    """Kernels are compiled in every process then."""

    class Other:
        native_name = "other"

        def inspect_llvm(self):
            return ""

    if name == "inspect_llvm":
        Other._library = numba.cfunc(SIGNATURE)(increment)._library
        Other.inspect_llvm = property(lambda self: (_ for _ in ()).throw(AttributeError(name)))
    assert object_code(Other()) is None


def test_every_kernel_can_be_kept(monkeypatch, tmp_path):
    """Each is found again by a process that starts afresh."""
    monkeypatch.setattr(cpu_compile, "_folders", lambda: [tmp_path])
    monkeypatch.setattr(cpu_compile, "_kernels", {})
    monkeypatch.setattr(cpu_compile, "_writable", lambda: tmp_path)
    from fastcross.kernels.cpu import KERNELS, warm_up

    warm_up(torch.float32)
    assert len(list(tmp_path.iterdir())) == sum(len(kernels) for kernels in KERNELS.values())
