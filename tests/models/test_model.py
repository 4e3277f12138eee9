"""DCN against the paper's equations written out with fastcross.reference, its configuration, export and optimiser."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from small_dcn import CARDINALITIES, NUM_DENSE, make_batch, make_dcn
from torch import nn

from fastcross import DCN, DCNConfig, reference
from fastcross.data import Bag


def paper_logits(model, dense, categorical):
    """Section 2, literally: every piece materialised."""
    config = model.config
    tables = model.embedding.tables
    x0 = torch.cat([*(F.embedding(categorical[:, k], table) for k, table in enumerate(tables)), dense], 1)
    x = reference.cross_network(x0, model.cross.weight, model.cross.bias) if config.cross_layers else x0
    h = model.deep(x if config.structure == "stacked" else x0)
    parts = [h]
    if config.cross_layers and config.structure == "parallel":
        parts = [x, h] if config.deep_layers else [x]
    z = torch.cat(parts, 1) @ model.logits.weight.T
    z = z if model.logits.bias is None else z + model.logits.bias
    return z.squeeze(1) if config.num_outputs == 1 else z


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"structure": "stacked"},
        {"cross_layers": 0},
        {"deep_layers": ()},
        {"num_outputs": 7},
        {"batch_norm": False, "logits_bias": False},
        {"structure": "stacked", "num_outputs": 3, "deep_layers": (9,)},
    ],
    ids=str,
)
def test_logits_and_every_gradient_are_the_papers(options, backend):
    model, (dense, categorical) = make_dcn(backend=backend, **options), make_batch()
    z, expected = model(dense, categorical), paper_logits(model, dense, categorical)
    classes = model.config.num_outputs
    assert z.shape == ((32,) if classes == 1 else (32, classes))
    torch.testing.assert_close(z, expected, rtol=1e-4, atol=1e-4)
    label = torch.randint(0, max(2, classes), (32,)).float()
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(model.loss(z, label), parameters)
    if classes == 1:
        loss = F.binary_cross_entropy(torch.sigmoid(expected), label)
    else:
        loss = F.cross_entropy(expected, label.long())
    for gradient, wanted in zip(gradients, torch.autograd.grad(loss, parameters), strict=True):
        torch.testing.assert_close(gradient.to_dense(), wanted, rtol=1e-3, atol=1e-4)


def test_deep_network_is_linear_batch_norm_relu_dropout():
    kinds = [type(layer).__name__ for layer in make_dcn(dropout=0.5).deep]
    assert kinds == ["Linear", "BatchNorm1d", "ReLU", "Dropout"] * 2
    assert [type(layer).__name__ for layer in make_dcn(batch_norm=False).deep] == ["Linear", "ReLU"] * 2
    model, batch = make_dcn(dropout=0.5), make_batch()
    assert not torch.equal(model(*batch), model(*batch))
    model.eval()
    assert torch.equal(model(*batch), model(*batch))


def test_cross_output_is_not_materialised():
    shapes = []

    def pack(tensor):
        shapes.append((tensor.data_ptr(), tuple(tensor.shape)))
        return tensor

    model, batch = make_dcn(deep_layers=()), make_batch(64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(*batch)
    kept = {pointer for pointer, shape in shapes if shape == (64, model.embedding.out_features)}
    assert len(kept) == 1  # x0 alone


def test_regularization_is_lambda_times_the_squares_of_the_weights():
    model = make_dcn(l2=0.1)
    linear = [layer.weight for layer in model.deep if isinstance(layer, nn.Linear)]
    weights = [model.cross.weight, *linear, model.logits.weight]
    expected = 0.1 * sum(weight.square().sum() for weight in weights)
    torch.testing.assert_close(model.regularization(), expected)
    dense, categorical = make_batch()
    z, label = model(dense, categorical), torch.ones(32)
    torch.testing.assert_close(model.loss(z, label), F.binary_cross_entropy_with_logits(z, label) + expected)
    model.regularization().backward()
    torch.testing.assert_close(model.cross.weight.grad, 0.2 * model.cross.weight)
    assert model.cross.bias.grad is None
    assert all(table.grad is None for table in model.embedding.tables)
    assert make_dcn().regularization() == 0


def test_config_survives_json():
    model = DCN([5, 6], 1, [2, 3, 4], bag_cardinalities=[9], cross_layers=2, deep_layers=[8], num_outputs=3)
    config = json.loads(json.dumps(model.config.to_dict()))
    twin = DCN.from_config(config)
    assert twin.config == model.config == DCNConfig(**config)
    assert DCN.from_config(model.config).config == model.config
    twin.load_state_dict(model.state_dict())
    bag = Bag(torch.tensor([1, 8, 3]), torch.tensor([0, 1]))
    batch = torch.randn(2, 1), torch.tensor([[0, 5], [4, 1]]), [bag]
    model.eval()
    twin.eval()
    assert torch.equal(model(*batch), twin(*batch))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"structure": "serial"}, 'structure must be "parallel" or "stacked"; got \'serial\''),
        ({"cross_layers": 0, "deep_layers": ()}, "there must be a network"),
        ({"cross_layers": -1}, "cross_layers = -1"),
        ({"num_outputs": 0}, "num_outputs must be at least 1; got 0"),
        ({"l2": -1.0}, "l2 must be at least 0; got -1.0"),
        ({"backend": "cuda"}, "backend must be one of .* got 'cuda'"),
    ],
)
def test_bad_configuration(options, message):
    with pytest.raises(ValueError, match=message):
        DCN(CARDINALITIES, NUM_DENSE, **options)


def test_bad_label():
    model = make_dcn()
    with pytest.raises(ValueError, match=r"label must be \(32,\), as logits; got \(31,\)"):
        model.loss(model(*make_batch()), torch.zeros(31))


def test_export_with_dynamic_batch():
    model = make_dcn(bag_cardinalities=[9]).eval()
    bag = torch.tensor([1, 2, 3, 8]), torch.tensor([0, 2, 2])
    batch = torch.export.Dim("batch", min=2), torch.export.Dim("values", min=2)
    dense, categorical = make_batch(3)
    with torch.no_grad():
        program = torch.export.export(
            model,
            (dense, categorical, (bag,)),
            dynamic_shapes=({0: batch[0]}, {0: batch[0]}, (({0: batch[1]}, {0: batch[0]}),)),
        )
        dense, categorical = make_batch(6)
        bag = torch.tensor([1, 2, 3, 8, 0]), torch.tensor([0, 2, 2, 3, 4, 5])
        expected = model(dense, categorical, (bag,))
        torch.testing.assert_close(program.module()(dense, categorical, (bag,)), expected)


def test_compile_for_inference_and_training():
    model, (dense, categorical) = make_dcn().eval(), make_batch()
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(dense, categorical), model(dense, categorical))
    torch.compile(model, fullgraph=True, backend="aot_eager")(dense, categorical).sum().backward()
    assert model.embedding.tables[0].grad.any()


@pytest.mark.parametrize("options", [{}, {"bag_cardinalities": [9]}, {"structure": "stacked"}], ids=str)
def test_training_with_dense_gradients_compiles_as_one_graph(options):
    torch.compiler.reset()
    model, twin = (make_dcn(sparse_gradients=False, **options) for _ in range(2))
    bags = [(torch.arange(40) % 9, torch.arange(32) + (torch.arange(32) > 5))] if "bag_cardinalities" in options else []
    compiled, label = torch.compile(model, fullgraph=True), torch.ones(32)
    model.loss(compiled(*make_batch(), bags), label).backward()
    twin.loss(twin(*make_batch(), bags), label).backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)


def test_bfloat16_autocast():
    """The error is at most twice that of the paper's equations under the same autocast, and both are bfloat16's."""
    model, batch = make_dcn(batch_norm=False), make_batch(512)
    exact = paper_logits(copy.deepcopy(model).double(), batch[0].double(), batch[1])
    with torch.autocast("cpu", torch.bfloat16):
        z, plain = model(*batch), paper_logits(model, *batch)
    largest, ours, eager = exact.abs().max(), (z - exact).abs().max(), (plain - exact).abs().max()
    assert ours <= 2 * eager
    assert eager < 0.05 * largest
    loss = model.loss(z.float(), torch.ones(512))
    for gradient, wanted in zip(
        torch.autograd.grad(loss, list(model.parameters())),
        torch.autograd.grad(model.loss(model(*batch), torch.ones(512)), list(model.parameters())),
        strict=True,
    ):
        difference = (gradient.to_dense() - wanted.to_dense()).norm()
        assert difference < 0.02 * wanted.to_dense().norm()
