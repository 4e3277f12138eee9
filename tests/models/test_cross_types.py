"""A DCN with each type of cross network: what it computes, its options, and its way through the command line."""

import json

import pytest
import torch
from small_dcn import make_batch, make_dcn
from torch import nn

from fastcross import optim, reference
from fastcross.cli.main import main
from fastcross.data.generate import write_click_log
from fastcross.explain.explanation import explain_degrees
from fastcross.layers.cross import CrossFCN, CrossLowRank, CrossMixture
from fastcross.models import CROSS_TYPES
from fastcross.models.dcn import DCN, halves_first

OTHERS = CROSS_TYPES[1:]


@pytest.mark.parametrize("structure", ["parallel", "stacked"])
@pytest.mark.parametrize("kind", OTHERS)
def test_forward_is_the_reference(kind, structure):
    model = make_dcn(cross_type=kind, structure=structure).eval()
    dense, categorical = make_batch()
    x0 = model.embedding(dense, categorical)
    options = {}
    if kind == "low_rank":
        parameters = model.cross.u, model.cross.v, model.cross.bias
    elif kind == "mixture":
        cross = model.cross
        parameters = cross.u, cross.c, cross.v, cross.bias, cross.gate, cross.gate_bias
    elif kind == "fcn":
        x0_cross = torch.cat([*(x0[:, at] for at in halves_first(model.embedding.columns())), 0 * x0[:, :1]], 1)
        parameters = model.cross.weight, model.cross.bias, model.cross.norm_weight, model.cross.norm_bias
    elif kind == "gated":
        parameters = model.cross.weight, model.cross.gate, model.cross.bias
    else:
        parameters = model.cross.weight, model.cross.bias
    x = getattr(reference, f"cross_{kind}")(x0_cross if kind == "fcn" else x0, *parameters, **options)
    if structure == "parallel":
        expected = model.logits(torch.cat((x, model.deep(x0)), 1))
    else:
        expected = model.logits(model.deep(x))
    torch.testing.assert_close(model(dense, categorical), expected.squeeze(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", OTHERS)
def test_training_lowers_the_loss_and_reaches_every_parameter(kind):
    torch.manual_seed(0)
    model = DCN([50, 20], 4, embedding_dim=6, cross_layers=2, cross_type=kind, deep_layers=(8,), l2=1e-4)
    optimizer = optim.configure(model, lr=0.01)
    dense, categorical = torch.randn(256, 4), torch.randint(0, 20, (256, 2))
    label = ((dense[:, 0] * dense[:, 1] > 0) ^ (categorical[:, 0] < 10)).float()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = model.loss(model(dense, categorical), label)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert [name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])] == []


def test_regularisation_takes_every_matrix_and_no_bias():
    for kind, count in {"matrix": 1, "low_rank": 2, "mixture": 4, "gated": 2, "fcn": 1}.items():
        model = make_dcn(cross_type=kind, deep_layers=())
        assert len(list(model.weights())) == count + 1  # and the logits layer's


def test_options():
    d = make_dcn().embedding.out_features
    assert make_dcn(cross_type="low_rank").cross.u.shape == (3, d, d // 4)
    assert isinstance(make_dcn(cross_type="low_rank", rank=2).cross, CrossLowRank)
    mixture = make_dcn(cross_type="mixture", rank=3, experts=2).cross
    assert isinstance(mixture, CrossMixture)
    assert mixture.u.shape == (3, 2, d, 3)
    config = make_dcn(cross_type="mixture", rank=3, experts=2).config
    assert DCN.from_config(json.loads(json.dumps(config.to_dict()))).config == config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cross_type": "tensor"}, "cross_type must be one of vector, matrix, low_rank, .*; got 'tensor'"),
        ({"cross_type": "matrix", "rank": 3}, "rank is of low_rank and mixture; got rank = 3 and matrix"),
        ({"cross_type": "mixture", "experts": 0}, "rank and experts must be at least 1; got None and 0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        make_dcn(**options)


def test_fcn_of_an_odd_number_of_columns_has_a_column_of_zeros():
    model = DCN([9, 9], 1, embedding_dim=5, cross_type="fcn", cross_layers=2)
    assert (model.embedding.out_features, model.cross.in_features) == (11, 12)
    assert model(torch.randn(4, 1), torch.randint(0, 9, (4, 2))).shape == (4,)


def test_halves_first():
    order = halves_first([slice(0, 4), slice(4, 7), slice(7, 8), slice(8, 9), slice(9, 10)])
    columns = [column for at in order for column in range(at.start, at.stop)]
    assert sorted(columns) == list(range(10))
    assert columns == [0, 1, 4, 5, 8, 2, 3, 6, 7, 9]
    assert isinstance(make_dcn(cross_type="fcn").cross, CrossFCN)


def test_degrees_of_a_matrix_network_add_up():
    """They are the polynomial's coefficients: fitted to the logit at x0 = mean + s δ for several s."""
    model = make_dcn(cross_type="matrix", cross_layers=3, deep_layers=()).double().eval()
    from fastcross.explain.decomposition import matrix_degrees

    x0 = model.embedding(*(t.double() if t.is_floating_point() else t for t in make_batch())).detach()
    mean, head = x0.mean(0), model.logits.weight[0].detach()
    degrees = matrix_degrees(model.cross, x0, mean, head).detach()
    for s in (0.0, 0.5, 1.0, -2.0):
        scaled = mean + s * (x0 - mean)
        z = reference.cross_matrix(scaled, model.cross.weight, model.cross.bias) @ head
        powers = torch.tensor([s**n for n in range(degrees.shape[1])]).double()
        torch.testing.assert_close(degrees @ powers, z.detach(), rtol=1e-9, atol=1e-9)


def test_only_vector_and_matrix_are_explained():
    with pytest.raises(
        ValueError, match="degrees are those of a CrossMatrix whose output the logits read; got CrossGated"
    ):
        explain_degrees(make_dcn(cross_type="gated"), list)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "log.txt"
    write_click_log(path, rows=3000, seed=0)
    return path


@pytest.mark.parametrize("kind", OTHERS)
def test_the_command_line_trains_predicts_and_exports(kind, log, tmp_path, capsys):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    run = tmp_path / "run"
    sizes = ["--cross-layers", "2", "--deep-layers", "8", "--embedding-dim", "4", "--epochs", "1", "--threads", "1"]
    rank = ["--rank", "3"] if kind in ("low_rank", "mixture") else []
    cache = ["--cache", str(log.parent / "cache")]
    assert main(["train", "--data", str(log), "--run", str(run), "--cross-type", kind, *rank, *sizes, *cache]) == 0
    assert json.loads((run / "config.json").read_text())["options"]["cross_type"] == kind
    rows = tmp_path / "rows.txt"
    rows.write_text("".join(log.read_text().splitlines(keepends=True)[:50]))
    assert main(["predict", str(run), str(rows), "--output", str(tmp_path / "predicted.csv")]) == 0
    assert len((tmp_path / "predicted.csv").read_text().splitlines()) == 51
    assert main(["export", str(run), "--output", str(tmp_path / "model.onnx")]) == 0
    assert onnxruntime.InferenceSession(str(tmp_path / "model.onnx")).get_outputs()
    capsys.readouterr()
    code = main(["explain", str(run)])
    said = capsys.readouterr()
    if kind == "matrix":
        assert code == 0
        assert "degree 3" in said.out
    else:
        assert code == 2
        assert "only a CrossNetwork (cross_type vector) splits into fields exactly" in said.err
    assert main(["info", str(run)]) == 0


def test_a_user_may_put_a_network_of_his_own_in_its_place():
    model = make_dcn(cross_type="matrix")
    model.cross = nn.Linear(model.embedding.out_features, model.embedding.out_features)
    assert model(*make_batch()).shape == (32,)
