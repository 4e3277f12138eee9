"""Whole models after swap: training, compiling, distributing and serving go on as before."""

import copy
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch._dynamo
from peer_modules import cross, randomise
from torch import nn

import fastcross
from fastcross.interop.export import trace

FIELDS, DENSE, ROWS = 3, 2, 256


def deepctr_dcn():
    inputs = pytest.importorskip("deepctr_torch.inputs")
    dcn = pytest.importorskip("deepctr_torch.models.dcn")
    sparse = [inputs.SparseFeat(f"c{i}", 20, embedding_dim=4) for i in range(FIELDS)]
    columns = sparse + [inputs.DenseFeat(f"i{i}", 1) for i in range(DENSE)]
    return dcn.DCN(columns, columns, cross_num=3, dnn_hidden_units=(8,), init_std=0.1, seed=1)


def deepctr_rows():
    generator = np.random.default_rng(0)
    columns = {f"c{i}": generator.integers(0, 20, ROWS) for i in range(FIELDS)}
    columns |= {f"i{i}": generator.normal(size=ROWS).astype(np.float32) for i in range(DENSE)}
    return columns, generator.integers(0, 2, ROWS).astype(np.float32)


def torchfm_dcn():
    dcn = pytest.importorskip("torchfm.model.dcn")
    torch.manual_seed(1)
    return dcn.DeepCrossNetworkModel([20] * FIELDS, 4, num_layers=3, mlp_dims=(8,), dropout=0.0)


def matrix_of(columns):
    return torch.from_numpy(np.column_stack(list(columns.values()))).double()


def train(model, x, y, optimiser, steps):
    losses = []
    for _ in range(steps):
        loss = nn.functional.binary_cross_entropy(model(x).flatten(), y)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("build", [deepctr_dcn, torchfm_dcn])
def test_same_trajectory_and_optimiser_state(build):
    """In float64, so that rounding cannot hide a difference; swapped in the middle of training."""
    columns, y = deepctr_rows()
    x = matrix_of(columns) if build is deepctr_dcn else matrix_of(columns)[:, :FIELDS].long()
    y = torch.from_numpy(y).double()
    theirs = build().double()
    ours = copy.deepcopy(theirs)
    optimisers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in (theirs, ours)]
    before = train(theirs, x, y, optimisers[0], 10), train(ours, x, y, optimisers[1], 10)
    assert before[0] == before[1]
    state = {parameter: id(moments["exp_avg"]) for parameter, moments in optimisers[1].state.items()}
    assert fastcross.swap(ours).swapped
    after = train(theirs, x, y, optimisers[0], 30), train(ours, x, y, optimisers[1], 30)
    np.testing.assert_allclose(after[1], after[0], rtol=1e-10)
    assert after[1][-1] < before[1][0]
    for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-7, atol=1e-9)
    assert state == {parameter: id(moments["exp_avg"]) for parameter, moments in optimisers[1].state.items()}


def test_same_trajectory_of_every_network(build):
    """Twenty steps in float64, and in float32 by the one rule: as near to float64's as the package's own."""
    x, target = torch.randn(64, 8), torch.rand(64, 1)
    start, losses = randomise(build(8, 2), 0.2), {}
    for dtype in (torch.float64, torch.float32):
        for swapped in (False, True):
            network = copy.deepcopy(start).to(dtype)
            if swapped:
                assert fastcross.swap(network).swapped
            optimiser = torch.optim.Adam(network.parameters(), lr=0.01)
            trajectory = losses[dtype, swapped] = []
            for _ in range(20):
                loss = (cross(network)(x.to(dtype)).mean(1, keepdim=True) - target).square().mean()
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                trajectory.append(loss.item())
    exact, ours64, theirs, ours = (np.array(each) for each in losses.values())
    assert exact[-1] < 0.9 * exact[0]
    np.testing.assert_allclose(ours64, exact, rtol=1e-10)
    assert abs(ours - exact).max() <= 2 * abs(theirs - exact).max() + 1e-6 * exact[0]


def test_deepctrs_own_fit_evaluate_and_predict(tmp_path):
    columns, y = deepctr_rows()
    results = []
    for swapped in (False, True):
        model = deepctr_dcn()
        if swapped:
            fastcross.swap(model)
        model.compile("adagrad", "binary_crossentropy", metrics=["binary_crossentropy"])
        history = model.fit(columns, y, batch_size=64, epochs=3, verbose=0, shuffle=False)
        torch.save(model.state_dict(), tmp_path / "weights.pt")
        torch.save(model, tmp_path / "model.pt")
        fresh = deepctr_dcn()
        fresh.load_state_dict(torch.load(tmp_path / "weights.pt"))
        whole = torch.load(tmp_path / "model.pt", weights_only=False)
        prediction = model.predict(columns, 100)
        np.testing.assert_allclose(fresh.predict(columns, 100), prediction, rtol=1e-5)
        np.testing.assert_array_equal(whole.predict(columns, 100), prediction)
        results.append((history.history["loss"], prediction))
    np.testing.assert_allclose(results[1][0], results[0][0], rtol=1e-5)
    np.testing.assert_allclose(results[1][1], results[0][1], rtol=1e-4)


def test_one_row():
    """A batch of one keeps its shape."""
    model, x = deepctr_dcn(), matrix_of(deepctr_rows()[0]).float()[:1]
    y = model(x)
    fastcross.swap(model)
    assert model(x).shape == y.shape == (1, 1)


BATCHES = (64, 100, 33, 512, 1000)  # inductor itself makes special cases of 1 row and of matrices up to 16 rows


@pytest.mark.parametrize("cross", ["deepctr", "torchfm", "fastcross"])
def test_compile_fullgraph_dynamic_batch(cross):
    if cross == "deepctr":
        layer = pytest.importorskip("deepctr_torch.layers.interaction").CrossNet(16, 3)
    elif cross == "torchfm":
        layer = pytest.importorskip("torchfm.layer").CrossNetwork(16, 3)
    else:
        layer = fastcross.CrossNetwork(16, 3)
    model = nn.Sequential(nn.Linear(8, 16), layer, nn.Linear(16, 1))
    fastcross.swap(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True)
    for rows in BATCHES:
        x = torch.randn(rows, 8)
        y, expected = compiled(x), model(x)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
        for result in (y, expected):
            result.square().mean().backward()
        for a, b in zip(compiled.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("training", [True, False])
def test_compile_dcn_fullgraph_dynamic_batch(training):
    # Sparse gradients cannot be traced: in training the tables' are dense.
    model = fastcross.DCN([50, 20], 3, 4, cross_layers=3, deep_layers=(16,), sparse_gradients=not training)
    model.train(training)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True)
    with torch.set_grad_enabled(training):
        for rows in BATCHES:
            batch = torch.randn(rows, 3), torch.randint(0, 20, (rows, 2))
            results = compiled(*batch), model(*batch)
            torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
            if training:
                for result in results:
                    result.square().mean().backward()
    if training:
        torch.testing.assert_close(compiled.cross.weight.grad, model.cross.weight.grad, rtol=1e-3, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_exports_deepctrs_dcn():
    model = deepctr_dcn().eval()
    fastcross.swap(model)
    x = matrix_of(deepctr_rows()[0]).float()
    program = trace(model, x[:4]).module()
    for rows in (1, 9):
        torch.testing.assert_close(program(x[:rows]), model(x[:rows]))


def test_compiled_graph_holds_the_operator():
    graphs = []

    def record(graph, inputs):
        graphs.append(graph)
        return graph

    layer = pytest.importorskip("torchfm.layer").CrossNetwork(16, 3)
    fastcross.swap(layer)
    with torch.no_grad():
        torch.compile(layer, fullgraph=True, backend=record)(torch.randn(4, 16))
    assert any("fastcross" in str(node.target) for node in graphs[0].graph.nodes)


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("swap_first", [True, False])
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_distributed(process_group, wrap, swap_first):
    model = torchfm_dcn().double()
    plain = copy.deepcopy(model)
    if swap_first:
        assert fastcross.swap(model).swapped
    if wrap == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (1,))
        fully_shard(model.cn, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    if not swap_first:
        assert fastcross.swap(wrapped).swapped
    x = torch.randint(0, 20, (64, FIELDS))
    for each in (plain, wrapped):
        each(x).sum().backward()
    for a, b in zip(plain.parameters(), wrapped.parameters(), strict=True):
        grad = b.grad.full_tensor() if wrap == "fsdp" else b.grad
        torch.testing.assert_close(grad, a.grad, rtol=1e-9, atol=1e-12)


def test_eight_threads_answer_like_one():
    model = deepctr_dcn().eval()
    fastcross.swap(model)
    x = matrix_of(deepctr_rows()[0]).float()
    requests = [x[start : start + size] for start in range(0, 200, 7) for size in (1, 13, 50)]
    with torch.no_grad(), ThreadPoolExecutor(8) as threads:
        alone = [model(request) for request in requests]
        together = list(threads.map(torch.no_grad()(model), requests))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
