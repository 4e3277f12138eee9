"""Kernels write to their pieces of scratch memory and to nothing beside them."""

import pytest
import torch

from fastcross.kernels.cpu import door, embedding, layer, layout, network, network_bwd, row_sums, row_updates
from fastcross.kernels.cpu import launchers as cpu

LAYOUTS = (
    layer.FORWARD, layer.BACKWARD, network.FORWARD, network_bwd.BACKWARD,
    embedding.STACK, embedding.POOL, row_sums.SUMS, row_updates.SGD, row_updates.ADAM,
)  # fmt: skip
UNTOUCHED = 0xA5


@pytest.fixture
def calls(monkeypatch):
    """Every plan, and the scratch memory of its task; between its pieces lie gaps, and all is filled with a pattern."""
    for each in LAYOUTS:
        each.plan.cache_clear()
    found, take, pack = [], door.scratch, layout.Plan.task

    def scratch(size):
        memory, start = take(size)
        return memory.fill_(UNTOUCHED), start

    def task(plan, **values):
        result = pack(plan, **values)
        found.append((plan, result.memory))
        return result

    monkeypatch.setattr(layout, "ALIGNMENT", 4096)
    monkeypatch.setattr(layout, "WORK_PER_THREAD", 1 << 10)
    monkeypatch.setattr(layout, "scratch", scratch)
    monkeypatch.setattr(layout.Plan, "task", task)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    yield found
    for each in LAYOUTS:
        each.plan.cache_clear()


def assert_nothing_beside_the_pieces_was_written(calls):
    for plan, memory in calls:
        inside = torch.zeros(plan.bytes, dtype=torch.bool)
        shared = len(plan.layout.shared)
        end = plan.pieces[shared][1] if len(plan.pieces) > shared else plan.bytes
        own = (plan.bytes - end) // plan.chunks
        for i, (_, offset, size) in enumerate(plan.pieces):
            for chunk in range(plan.chunks if i >= shared else 1):
                inside[offset + chunk * own :][:size] = True
        assert bool((memory[~inside] == UNTOUCHED).all()), (plan.layout.name, plan.dtype)
        assert not plan.pieces or not bool(inside.all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 2), (7, 33, 3), (21, 17, 1), (135, 9, 5), (2100, 130, 2)], ids=str)
def test_cross_operators(calls, shape, dtype):
    M, d, L = shape
    x0, x, dy = (torch.randn(M, d, dtype=dtype) for _ in range(3))
    w, b, v, dz = (torch.randn(size, dtype=dtype) for size in ((L, d), (L, d), (3, d), (M, 3)))
    cpu.cross_layer_fwd(x0, x, w[0], b[0])
    cpu.cross_layer_bwd(dy, x0, x, w[0], b[0], [True] * 4)
    _, p = cpu.cross_network_fwd(x0, w, b, True)
    cpu.cross_network_bwd(dy, x0, w, b, p, [True] * 3)
    _, p = cpu.cross_logits_fwd(x0, w, b, v, True)
    cpu.cross_logits_bwd(dz, x0, w, b, v, p, [True] * 4)
    assert [plan.layout for plan, _ in calls] == [*LAYOUTS[:4], *LAYOUTS[2:4]]
    assert_nothing_beside_the_pieces_was_written(calls)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("M", [1, 13, 2100])
def test_embedding_kernels(calls, M, dtype):
    sizes = [(5, 3), (5000, 17), (1, 1)]
    tables = [torch.randn(size, dtype=dtype) for size in sizes]
    ids = torch.stack([torch.randint(0, height, (M,)) for height, _ in sizes], 1)
    x0, dx0 = torch.empty(M, 24, dtype=dtype), torch.randn(M, 24, dtype=dtype)
    assert embedding.stack_fwd(tables, ids, x0) == -1
    values, coefficients = torch.randint(0, 5000, (2 * M,)), torch.rand(2 * M, dtype=dtype)
    assert embedding.pool_fwd(tables[1], values, torch.arange(0, 2 * M, 2), coefficients, x0[:, :17]) == -1
    found = embedding.stack_bwd([number for size in sizes for number in size], ids, dx0)
    rows = list(zip(found[::2], found[1::2], strict=True))
    row_updates.sgd_rows(tables, rows, 0.1)
    moments = [(torch.zeros_like(table), torch.zeros_like(table)) for table in tables]
    row_updates.adam_rows(tables, moments, rows, 0.1, (0.9, 0.999), 1e-8, 1)
    assert [plan.layout for plan, _ in calls] == list(LAYOUTS[4:])
    assert_nothing_beside_the_pieces_was_written(calls)
