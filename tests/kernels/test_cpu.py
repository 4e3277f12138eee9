"""The C++ kernels: every instruction set, and as a server and a data loader use them, with many threads and forks."""

import concurrent.futures
import functools
import os
import resource
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from multiplicative_cases import CASES, gradient, operands
from row_cases import UPDATES, copied, draw, exact, update

import fastcross
from fastcross import CrossNetwork, reference
from fastcross.accuracy import assert_as_good, assert_as_good_as_eager
from fastcross.batch import Bag
from fastcross.kernels import row_updates as plain
from fastcross.ops import embedding_stack, row_updates
from fastcross.ops.backends import instruction_set

pytestmark = pytest.mark.usefixtures("cpu_kernels")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


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
    return net, x0


def test_rows_are_split_over_threads_without_changing_the_result(two_threads):
    net, x0 = large_network()
    split = net(x0)
    torch.set_num_threads(1)
    assert torch.equal(split, net(x0))


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


def test_a_fork_after_the_threads_were_started(two_threads):
    """PyTorch's threads do not survive a fork: the child runs the kernels on its one thread, to the same bits."""
    torch.use_deterministic_algorithms(False)  # in which PyTorch would fill fresh memory, with those threads
    net, x0 = large_network()
    with torch.no_grad():
        expected = net(x0).numpy().tobytes()
        child = os.fork()
        if child == 0:
            os._exit(0 if net(x0).numpy().tobytes() == expected else 1)
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


@pytest.fixture(params=["baseline", "avx2", "avx512"])
def each_instruction_set(request):
    before = instruction_set()
    try:
        instruction_set(request.param)
    except RuntimeError as error:
        pytest.skip(str(error))
    yield
    instruction_set(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("B", "d", "L"), [(1, 1, 1), (7, 33, 2), (300, 45, 7), (9, 390, 3)])
def test_every_operator_with_each_instruction_set(each_instruction_set, B, d, L, dtype):
    torch.manual_seed(0)
    x0, x = torch.randn(B, d).to(dtype), torch.randn(B, d).to(dtype)
    w, b, v = ((torch.randn(n, d) / d**0.5).to(dtype) for n in (L, L, 2))
    dy = torch.randn(B, d)
    assert_as_good_as_eager("cross_layer", (x0, x, w[0], b[0]), "cpu", dy)
    assert_as_good_as_eager("cross_network", (x0, w, b), "cpu", dy)
    assert_as_good_as_eager("cross_logits", (x0, w, b, v), "cpu", torch.randn(B, 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_layers_of_products_with_each_instruction_set(each_instruction_set, case, dtype):
    tensors = operands(case, 63, 430, dtype, rank=8, experts=3)  # as in tests/ops/test_multiplicative.py
    assert_as_good_as_eager(case.operator, tensors, "cpu", gradient(tensors[0]), 16, **case.options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pooling", ["mean", "sum"])
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
def test_embedding_with_each_instruction_set(each_instruction_set, dtype, pooling, sparse):
    torch.manual_seed(0)
    ids, values, offsets = torch.randint(4, (5, 2)), torch.randint(7, (9,)), torch.tensor([0, 2, 2, 5, 9])
    shapes = ((5, 3), (9,), (4, 5), (4, 19), (7, 33))
    operands = [torch.rand(shape).to(dtype) for shape in shapes]
    dx0 = torch.randn(5, 3 + 5 + 19 + 33).to(dtype)

    def results(backend, dtype, **options):
        leaves = [t.to(dtype).requires_grad_() for t in operands]
        dense, weights, *tables = leaves
        x0 = embedding_stack(
            dense, ids, tables, [Bag(values, offsets, weights)], pooling=pooling, backend=backend, **options
        )
        return [x0.detach(), *(g.to_dense() for g in torch.autograd.grad(x0, leaves, dx0.to(dtype)))]

    ours = results("cpu", dtype, sparse_gradients=sparse)
    for k, found in enumerate(zip(ours, results("reference", dtype), results("reference", torch.float64), strict=True)):
        assert_as_good(*found, f"result {k}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", UPDATES)
def test_row_updates_with_each_instruction_set(each_instruction_set, name, dtype):
    kernels = SimpleNamespace(
        adam_rows=lambda *given: row_updates.adam_rows("cpu", *given[:-1], weight_decay=given[-1]),
        adagrad_rows=functools.partial(row_updates.adagrad_rows, "cpu"),
        sgd_rows=functools.partial(row_updates.sgd_rows, "cpu"),
    )
    tables, kept, gradients = draw((5, 16, 1, 67), dtype, name)
    eager, eager_kept = copied(tables, kept)
    expected = [exact(name, *given) for given in zip(tables, kept, *zip(*gradients, strict=True), strict=True)]
    update(kernels, name, tables, kept, gradients)
    update(plain, name, eager, eager_kept, gradients)
    for k, right in enumerate(expected):
        for found in zip((tables[k], *kept[k]), (eager[k], *eager_kept[k]), right, strict=True):
            assert_as_good(*found, f"{name} of table {k}")


def test_rows_of_more_than_a_cache_and_many_layers():
    torch.manual_seed(0)
    x0, w = torch.randn(5, 16_384, dtype=torch.float64), torch.randn(64, 16_384, dtype=torch.float64) / 1000
    torch.testing.assert_close(fastcross.cross_network(x0, w, w), reference.cross_network(x0, w, w))
