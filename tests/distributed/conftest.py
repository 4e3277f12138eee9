"""A small log, and every case trained by two processes, once."""

import json
import os
import subprocess
import sys

import pytest
import torch

from fastcross.data import prepare
from fastcross.data.generate import write_click_log
from tests.distributed.helpers import CASES, DROPOUT, WORKER, create, experiment


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clicks")
    write_click_log(folder / "clicks.txt", 4000, largest_vocabulary=300)
    return prepare(folder / "clicks.txt", folder / "cache")


@pytest.fixture(scope="session")
def trained(cache, tmp_path_factory):
    """Every case, trained by two processes in one launch: TorchRec takes longer to import than they take to train."""
    folder = tmp_path_factory.mktemp("trained")
    for name, changes in CASES.items():
        create(folder / name, cache, experiment(cache, **changes))
    create(folder / "undisturbed", cache, experiment(cache, **DROPOUT))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.run([*torchrun, str(WORKER), str(folder)], capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stderr[-4000:]
    done = json.loads((folder / "done.json").read_text())
    assert done == {"size": 2, "gathered": [[1.0] * 3] * 2}
    return folder
