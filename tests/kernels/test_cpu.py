"""The CPU backend as a server and a data loader use it: many threads, forks, read-only installs."""

import concurrent.futures
import os
import resource
import signal
import threading
import time

import pytest
import torch

import fastcross
from fastcross import CrossNetwork, reference
from fastcross.kernels.cpu import cross_network as cpu
from fastcross.kernels.cpu import threads
from fastcross.kernels.cpu.plan import chunks


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def large_network():
    """Enough rows for several threads."""
    torch.manual_seed(0)
    net, x0 = CrossNetwork(257, 5), torch.randn(4001, 257)
    assert chunks(4001, 257 * 5, 2, 4)[:2] == (2, 4)
    return net, x0


def test_rows_are_split_over_threads_without_changing_the_result(two_threads):
    net, x0 = large_network()
    split = net(x0)
    torch.set_num_threads(1)
    assert chunks(4001, 257 * 5, 1, 4) == (1, 1, 4001)
    assert torch.equal(split, net(x0))


def test_small_inputs_stay_on_the_calling_thread(two_threads):
    assert chunks(64, 54 * 3, 2, 4) == (1, 1, 64)


def test_eight_threads_at_once(two_threads):
    net, x0 = large_network()

    def step(_):
        x = x0.clone().requires_grad_()
        y = net(x)
        return y.detach(), *torch.autograd.grad(y.square().sum(), (x, net.weight, net.bias))

    expected = step(None)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for results in pool.map(step, range(64)):
            assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


class Rows(torch.utils.data.Dataset):
    """Runs the operators in the worker, forward and backward."""

    def __init__(self, net, x0):
        self.net, self.x0 = net, x0

    def __len__(self):
        return 8

    def __getitem__(self, index):
        x = self.x0.clone().requires_grad_()
        y = self.net(x)
        y.sum().backward()
        return y.detach()[index], x.grad[index]


def test_forked_data_loader_workers(two_threads):
    net, x0 = large_network()
    x = x0.clone().requires_grad_()
    y = net(x)
    y.sum().backward()
    loader = torch.utils.data.DataLoader(
        Rows(net, x0), batch_size=4, num_workers=2, multiprocessing_context="fork", timeout=240
    )
    outputs, grads = (torch.cat(parts) for parts in zip(*loader, strict=True))
    assert torch.equal(outputs, y.detach()[:8])
    torch.testing.assert_close(grads, x.grad[:8])


def test_a_fork_of_a_process_with_a_pool_makes_its_own(two_threads):
    """Only our kernels run in the child: PyTorch's own threads do not survive a fork."""
    torch.use_deterministic_algorithms(False)  # in which PyTorch would fill fresh memory, with those threads
    net, x0 = large_network()
    w, b = net.weight.detach(), net.bias.detach()
    expected = cpu.cross_network_fwd(x0, w, b, False)[0].numpy().tobytes()
    child = os.fork()
    if child == 0:
        same = cpu.cross_network_fwd(x0, w, b, False)[0].numpy().tobytes() == expected
        os._exit(0 if same and len(threads._pool(os.getpid(), 1)._threads) == 1 else 1)
    deadline = time.monotonic() + 240
    while (finished := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    if finished[0] == 0:
        os.kill(child, signal.SIGKILL)
    assert finished == (child, 0)


def test_a_thousand_calls_do_not_grow_memory():
    net, x0 = CrossNetwork(64, 3), torch.randn(256, 64, requires_grad=True)

    def steps(count):
        for _ in range(count):
            net(x0).sum().backward()

    steps(200)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    steps(1000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4096  # KiB; one call's tensors are 200 KiB


@pytest.fixture
def without_openmp(monkeypatch):
    monkeypatch.setattr(threads, "_openmp", lambda: None)


def test_openmp_is_found_and_the_pool_gives_the_same_bits(two_threads, monkeypatch):
    net, x0 = large_network()
    assert threads._openmp() is not None
    expected = net(x0)
    monkeypatch.setattr(threads, "_openmp", lambda: None)
    assert torch.equal(net(x0), expected)


def test_result_with_a_busy_pool(two_threads, without_openmp):
    """Chunks that no thread of the pool has begun are run by the caller."""
    net, x0 = large_network()
    expected = net(x0)
    pool = threads._pool(os.getpid(), 1)
    release = concurrent.futures.Future()
    blocker = pool.submit(release.result)
    try:
        assert torch.equal(net(x0), expected)
    finally:
        release.set_result(None)
        blocker.result()


def test_an_interrupted_caller_waits_for_the_others(without_openmp):
    caller, done = threading.get_ident(), []

    def kernel(block):
        if threading.get_ident() == caller:
            time.sleep(0.1)
            raise KeyboardInterrupt
        time.sleep(0.3)
        done.append(block)

    with pytest.raises(KeyboardInterrupt):
        threads.run_task(kernel, threads.Task("block", torch.empty(0), (), [], torch.float32, 2))
    assert done == ["block"]


def test_rows_of_more_than_a_cache_and_many_layers():
    torch.manual_seed(0)
    x0, w = torch.randn(5, 16_384, dtype=torch.float64), torch.randn(64, 16_384, dtype=torch.float64) / 1000
    torch.testing.assert_close(fastcross.cross_network(x0, w, w), reference.cross_network(x0, w, w))
