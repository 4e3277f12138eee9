"""Small generated logs, prepared once, and one thread."""

import pytest
import torch

from fastcross.data import prepare
from fastcross.data.generate import write_click_log


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clicks")
    write_click_log(folder / "clicks.txt", 4000, largest_vocabulary=50)
    return prepare(folder / "clicks.txt", folder / "cache")


@pytest.fixture(scope="session")
def unvalidated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unvalidated")
    write_click_log(folder / "clicks.txt", 600, largest_vocabulary=10)
    return prepare(folder / "clicks.txt", folder / "cache", split="random:0.9,0,0.1")
