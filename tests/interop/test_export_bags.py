"""Multi-valued features in exported models: any number of values, empty bags, weights, both poolings."""

import pytest
import torch
from torch import nn

import fastcross
from fastcross.interop.export import export, trace

SIZES = ((1, 1), (1, 0), (3, 5), (4, 0), (7, 3), (6, 6), (1, 9), (64, 300))  # rows, values


def bag(rows, values, weighted):
    """Random lengths, empty bags among them, at the start and at the end, too."""
    offsets = torch.randint(0, values + 1, (rows,)).sort().values
    offsets[0] = 0
    if rows > 3:
        offsets[1], offsets[-1] = 0, values
    weights = (torch.rand(values) + 0.1,) if weighted else ()
    return torch.randint(0, 9, (values,)), offsets, *weights


def batch(rows, values, weighted):
    single = torch.randn(rows, 2), torch.randint(0, 7, (rows, 1))
    return *single, (bag(rows, values, weighted), bag(rows, 2 * values, False))


def dcn(pooling):
    torch.manual_seed(0)
    options = {"embedding_dim": 4, "bag_cardinalities": [9, 9], "bag_pooling": pooling}
    return fastcross.DCN([7], 2, cross_layers=2, deep_layers=(8,), **options).eval()


def flat(inputs):
    return [*inputs[:2], *(tensor for each in inputs[2] for tensor in each)]


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("pooling", ["mean", "sum"])
def test_onnx(tmp_path, pooling, weighted):
    onnxruntime = pytest.importorskip("onnxruntime")
    model = dcn(pooling)
    path = export(model, tmp_path / "dcn.onnx", batch(3, 5, weighted), to="onnx")
    session = onnxruntime.InferenceSession(path)
    names = [entry.name for entry in session.get_inputs()]
    bags = ["bags_0_0", "bags_0_1", *(["bags_0_2"] if weighted else []), "bags_1_0", "bags_1_1"]
    assert names == ["dense", "categorical", *bags]
    for rows, values in SIZES:
        given = batch(rows, values, weighted)
        found = session.run(None, dict(zip(names, (x.numpy() for x in flat(given)), strict=True)))[0]
        torch.testing.assert_close(torch.as_tensor(found), model(*given).detach(), rtol=1e-6, atol=1e-6)


def test_onnx_has_no_loop_over_the_rows(tmp_path):
    onnx = pytest.importorskip("onnx")
    path = export(dcn("mean"), tmp_path / "dcn.onnx", batch(3, 5, True), to="onnx")
    operators = {node.op_type for node in onnx.load(path).graph.node}
    assert not operators & {"Loop", "Scan", "If", "SequenceEmpty"}, operators


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_onnx_of_any_embedding_bag(tmp_path, mode):
    """Not ours alone: torch.onnx translates the maximum itself."""
    onnxruntime = pytest.importorskip("onnxruntime")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.EmbeddingBag(9, 4, mode=mode)

        def forward(self, x, bags):
            return x + self.table(*bags[0])

    model = Model().eval()
    path = export(model, tmp_path / "model.onnx", (torch.randn(3, 4), (bag(3, 5, False),)), to="onnx")
    session = onnxruntime.InferenceSession(path)
    for rows, values in SIZES:
        x, (ids, offsets) = torch.randn(rows, 4), bag(rows, values, False)
        found = session.run(None, {"x": x.numpy(), "bags_0_0": ids.numpy(), "bags_0_1": offsets.numpy()})[0]
        torch.testing.assert_close(torch.as_tensor(found), model(x, ((ids, offsets),)).detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("example", [(3, 5), (3, 3), (1, 1), (1, 4), (2, 1), (2, 0)], ids=str)
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
def test_whatever_the_example_holds(example, weighted):
    """As many values as rows by chance, one or none: the exported model takes any number of either."""
    model = dcn("mean")
    program = trace(model, batch(*example, weighted)).module()
    for rows, values in SIZES:
        given = batch(rows, values, weighted)
        torch.testing.assert_close(program(*given), model(*given))


def test_one_example_for_two_bags():
    """The same tensors twice do not tie the bags together."""
    model = dcn("mean")
    example = bag(2, 3, False)
    program = trace(model, (torch.randn(2, 2), torch.zeros(2, 1, dtype=torch.int64), (example, example))).module()
    given = batch(4, 7, False)
    torch.testing.assert_close(program(*given), model(*given))


def test_package(tmp_path):
    model = dcn("mean")
    path = export(model, tmp_path / "dcn.pt2", batch(3, 3, True))
    served = torch._inductor.aoti_load_package(str(path))
    for rows, values in SIZES:
        given = batch(rows, values, True)
        torch.testing.assert_close(served(*given), model(*given).detach(), rtol=1e-5, atol=1e-5)
