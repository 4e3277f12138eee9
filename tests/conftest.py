"""The same conditions for every test: two threads, and fresh memory that is NaN until something is written to it."""

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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """A test that asks for the C++ kernels is skipped where they were not built."""
    from fastcross.kernels import cpu

    try:
        return (yield)
    except ValueError as error:
        if cpu.LIBRARY.is_file() or cpu.MISSING not in str(error):
            raise
        pytest.skip(str(error))
