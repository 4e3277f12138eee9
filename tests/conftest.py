"""The same conditions for every test: two threads, and fresh memory that is NaN until something is written to it."""

import traceback

import pytest
import torch


def _set_conditions():
    torch.set_num_threads(2)
    # Only in its deterministic mode does PyTorch fill fresh memory; operators that have no such mode may still run.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True


def pytest_configure():
    _set_conditions()  # for what is made once and used by many tests


@pytest.fixture(autouse=True)
def same_conditions():
    """Whatever the test before has changed."""
    _set_conditions()


@pytest.fixture
def cpu_kernels():
    """Skips a test of the C++ kernels where they were not built."""
    from fastcross.kernels import cpu

    if not cpu.LIBRARY.is_file():
        pytest.skip(cpu.MISSING)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """A test that asks for the C++ kernels, or torch.compile for a compiler, is skipped where there is neither."""
    from fastcross.kernels import cpu

    try:
        return (yield)
    except Exception as error:
        said = "".join(traceback.format_exception(error))
        missing = [each for each in (cpu.MISSING, "Could not run 'fastcross::", "InvalidCxxCompiler") if each in said]
        if cpu.LIBRARY.is_file() or not missing:
            raise
        pytest.skip(missing[0])
