"""Kernels write to their pieces of scratch memory and to nothing beside them."""

import pytest
import torch

from fastcross.kernels.cpu import cross_layer, cross_network, door, embedding, plan, row_updates

LAYOUTS = (
    cross_layer.FORWARD, cross_layer.BACKWARD, cross_network.FORWARD, cross_network.BACKWARD,
    embedding.STACK, embedding.POOL, embedding.SUMS, row_updates.SGD, row_updates.ADAM, row_updates.ADAGRAD,
)  # fmt: skip
UNTOUCHED = 0xA5


@pytest.fixture
def calls(monkeypatch):
    """Every plan, and the scratch memory of its task; between its pieces lie gaps, and all is filled with a pattern."""
    for each in LAYOUTS:
        each.forget()
    made, take, fill = [], door.scratch, plan.Plan.fill

    def scratch(size):
        memory, start = take(size)
        return memory.fill_(UNTOUCHED), start

    def recorded(each, tensors, scalars):
        block, memory, results = fill(each, tensors, scalars)
        made.append((each, memory))
        return block, memory, results

    monkeypatch.setattr(plan, "ALIGNMENT", 4096)
    monkeypatch.setattr(plan, "WORK_PER_THREAD", 1 << 10)
    monkeypatch.setattr(plan, "KEPT_BYTES", -1)
    monkeypatch.setattr(plan, "scratch", scratch)
    monkeypatch.setattr(plan.Plan, "fill", recorded)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    yield made
    for each in LAYOUTS:
        each.forget()


def assert_nothing_beside_the_pieces_was_written(calls):
    for each, memory in calls:
        inside = torch.zeros(each.bytes, dtype=torch.bool)
        shared = len(each.layout.shared)
        end = each.pieces[shared][1] if len(each.pieces) > shared else each.bytes
        own = (each.bytes - end) // each.chunks
        for i, (_, offset, size) in enumerate(each.pieces):
            for chunk in range(each.chunks if i >= shared else 1):
                inside[offset + chunk * own :][:size] = True
        assert bool((memory[~inside] == UNTOUCHED).all()), (each.layout.name, each.dtype)
        assert not each.pieces or not bool(inside.all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 2), (7, 33, 3), (21, 17, 1), (135, 9, 5), (2100, 130, 2)], ids=str)
def test_cross_operators(calls, shape, dtype):
    M, d, L = shape
    x0, x, dy = (torch.randn(M, d, dtype=dtype) for _ in range(3))
    w, b, v, dz = (torch.randn(size, dtype=dtype) for size in ((L, d), (L, d), (3, d), (M, 3)))
    cross_layer.cross_layer_fwd(x0, x, w[0], b[0])
    cross_layer.cross_layer_bwd(dy, x0, x, w[0], b[0], [True] * 4)
    _, p = cross_network.cross_network_fwd(x0, w, b, True)
    cross_network.cross_network_bwd(dy, x0, w, b, p, [True] * 3)
    _, p = cross_network.cross_logits_fwd(x0, w, b, v, True)
    cross_network.cross_logits_bwd(dz, x0, w, b, v, p, [True] * 4)
    assert [each.layout for each, _ in calls] == [*LAYOUTS[:4], *LAYOUTS[2:4]]
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
    row_updates.adagrad_rows(tables, [pair[0] for pair in moments], rows, 0.1, 1e-10, False)
    row_updates.adagrad_rows(tables, [pair[0][:, 0].contiguous() for pair in moments], rows, 0.1, 1e-10, True)
    assert [each.layout for each, _ in calls] == [*LAYOUTS[4:], row_updates.ADAGRAD]
    assert_nothing_beside_the_pieces_was_written(calls)
