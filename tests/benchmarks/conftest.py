import pytest
import torch

from benchmarks.harness import measure


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    monkeypatch.setattr(measure, "LATENCY_ROUNDS", 20)
    monkeypatch.setattr(measure, "MAX_ROUNDS", 20)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
