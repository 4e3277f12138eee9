"""Large outputs: memory that dies is used again, memory that lives is not."""

import copy
import pickle

import pytest
import torch

from fastcross import CrossNetwork, reference
from fastcross.kernels.cpu import buffers

ROWS = torch.empty(2048, 600)  # 4.7 MiB


@pytest.fixture(autouse=True)
def nothing_waits():
    buffers.release()
    yield
    buffers.release()


def waiting():
    return sum(size * len(queue) for size, queue in buffers._waiting.items())


def test_memory_is_used_again():
    first = buffers.empty_output(ROWS)
    address = first.data_ptr()
    view = first[5:]
    del first
    assert waiting() == 0, "a view is alive"
    del view
    assert waiting() >= ROWS.nbytes
    assert buffers.empty_output(ROWS).data_ptr() == address


def test_two_outputs_at_once_do_not_share():
    a, b = buffers.empty_output(ROWS), buffers.empty_output(ROWS)
    a.fill_(1)
    b.fill_(2)
    assert bool((a == 1).all())


def test_rows_keep_their_padding_and_dtype():
    padded = torch.empty(1024, 1040, dtype=torch.float64)[:, :1026]
    out = buffers.empty_output(padded)
    assert (out.shape, out.stride(), out.dtype) == (padded.shape, padded.stride(), padded.dtype)


def test_small_outputs_are_pytorchs_own():
    buffers.empty_output(torch.empty(4, 4))
    assert waiting() == 0


def test_no_more_is_kept_than_allowed(monkeypatch):
    monkeypatch.setattr(buffers, "KEEP", 8 << 20)
    outputs = [buffers.empty_output(ROWS) for _ in range(3)]
    outputs.clear()
    assert 0 < waiting() <= 8 << 20


def test_release_gives_it_back():
    buffers.empty_output(ROWS)
    assert waiting() > 0
    buffers.release()
    assert waiting() == 0


def test_an_output_is_an_ordinary_tensor():
    torch.manual_seed(0)
    net, x0 = CrossNetwork(600, 3), torch.randn(2048, 600)
    y = net(x0)
    expected = reference.cross_network(x0, net.weight, net.bias)
    for same in (y.detach(), copy.deepcopy(y.detach()), pickle.loads(pickle.dumps(y.detach())), y.detach().clone()):
        torch.testing.assert_close(same, expected.detach())
    y.mul_(2).sum().backward()
    assert net.weight.grad is not None


def test_training_fetches_no_pages():
    """After the first steps no step asks the system for memory."""
    resource = pytest.importorskip("resource")
    net, x0 = CrossNetwork(1026, 3), torch.randn(4096, 1026, requires_grad=True)
    dy = torch.randn_like(x0)

    def faults(steps):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(steps):
            torch.autograd.grad(net(x0), (x0, net.weight, net.bias), dy)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    faults(3)
    assert faults(10) < 1000  # two outputs of 16 MiB are 8,000 pages in each step
