import copy
import io
import pickle

import pytest
import torch

import fastcross
from fastcross import CrossLayer, CrossNetwork, reference


def test_cross_layer_by_hand():
    layer = CrossLayer(2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, 2.0]))
        layer.bias.copy_(torch.tensor([0.5, -0.5]))
    x0, x = torch.tensor([[3.0, 4.0]]), torch.tensor([[10.0, 20.0]])
    # xᵀw = 10 + 40 = 50;  y = 50 · (3, 4) + (0.5, -0.5) + (10, 20)
    assert layer(x0, x).tolist() == [[160.5, 219.5]]


@pytest.mark.parametrize("bias", [True, False])
def test_network_is_its_layers_in_turn(bias):
    torch.manual_seed(0)
    net, x0 = CrossNetwork(7, 3, bias=bias), torch.randn(2, 5, 7)
    x = x0
    for layer in range(3):
        x = reference.cross_layer(x0, x, net.weight[layer], net.bias[layer] if bias else None)
    torch.testing.assert_close(net(x0), x)


@pytest.mark.parametrize("bias", [True, False])
def test_logits_are_the_output_times_the_head(bias):
    torch.manual_seed(0)
    net, x0, head = CrossNetwork(7, 3, bias=bias), torch.randn(2, 5, 7), torch.randn(4, 7)
    torch.testing.assert_close(net.logits(x0, head), net(x0) @ head.T)


def test_parameters_and_their_names():
    net = CrossNetwork(5, 3)
    assert {name: tuple(p.shape) for name, p in net.state_dict().items()} == {"weight": (3, 5), "bias": (3, 5)}
    assert list(CrossNetwork(5, 3, bias=False).state_dict()) == ["weight"]
    assert repr(net) == "CrossNetwork(in_features=5, num_layers=3, bias=True, backend='auto')"
    assert repr(CrossLayer(5, bias=False)) == "CrossLayer(in_features=5, bias=False, backend='auto')"


def test_copies_pickles_and_checkpoints():
    net, x0 = CrossNetwork(6, 2), torch.randn(4, 6)
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    loaded = CrossNetwork(6, 2)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), loaded):
        assert torch.equal(other(x0), net(x0))
        assert other.weight is not net.weight


@pytest.mark.parametrize("layers", [1, 6, 16])
def test_untrained_network_stays_finite_in_half_precision(layers):
    torch.manual_seed(0)
    for d in (16, 54, 1026):
        y = CrossNetwork(d, layers, dtype=torch.float16)(torch.randn(4096, d, dtype=torch.float16))
        assert torch.isfinite(y).all()


def test_device_and_dtype_arguments():
    net = CrossNetwork(4, 2, device="meta", dtype=torch.bfloat16)
    assert net.weight.device.type == "meta"
    assert net.bias.dtype == torch.bfloat16


@pytest.mark.parametrize(("arguments", "named"), [((0, 2), "in_features = 0"), ((3, 0), "num_layers = 0")])
def test_sizes_below_one(arguments, named):
    with pytest.raises(ValueError, match=named):
        CrossNetwork(*arguments)


@pytest.mark.parametrize(
    ("network", "names"),
    [
        (fastcross.CrossMatrix(6, 2), ["weight", "bias"]),
        (fastcross.CrossLowRank(6, 2, 3, activation="relu", diag_scale=0.5), ["u", "v", "bias"]),
        (fastcross.CrossMixture(6, 2, 3, 4, activation=None), ["u", "c", "v", "bias", "gate"]),
        (
            fastcross.CrossMixture(6, 2, 3, 4, shared_gate=False, gate_bias=True),
            ["u", "c", "v", "bias", "gate", "gate_bias"],
        ),
        (fastcross.CrossGated(6, 2, bias=False), ["weight", "gate", "bias"]),
        (fastcross.CrossFCN(6, 2, exponential=True, eps=0.1), ["weight", "bias", "norm_weight", "norm_bias"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_networks_of_products_call_their_operators(network, names):
    options = {
        k: getattr(network, k) for k in ("activation", "diag_scale", "exponential", "eps") if hasattr(network, k)
    }
    operator = {"CrossFCN": "cross_fcn", "CrossLowRank": "cross_low_rank"}.get(
        type(network).__name__, "cross_" + type(network).__name__.removeprefix("Cross").lower()
    )
    x0 = torch.randn(2, 5, 6)
    expected = getattr(reference, operator)(x0, *(getattr(network, name) for name in names), **options)
    torch.testing.assert_close(network(x0), expected)
    assert repr(network).endswith("backend='auto')")


def test_networks_of_products_start_with_unit_gains():
    torch.manual_seed(0)
    network = fastcross.CrossLowRank(200, 2, 50)
    assert network.u.std().item() == pytest.approx((2 / 250) ** 0.5, rel=0.05)
    assert fastcross.CrossMatrix(300, 1).weight.std().item() == pytest.approx(300**-0.5, rel=0.05)
    assert not network.bias.any()
    bias = fastcross.CrossFCN(200, 3).bias
    assert 0 <= bias.min() < 0.1 < 0.9 < bias.max() <= 1
