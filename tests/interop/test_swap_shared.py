"""Shared, tied, frozen, moved and wrapped: swapped with the class alone changed, and with the same numbers after."""

import copy

import pytest
import torch
from peer_modules import SAME_PRODUCTS, cross, deepctr, randomise, recbole, torchfm, torchrec
from snapshot import snapshot
from torch import nn

import fastcross
from fastcross.interop.swap import Swapped


def layers(network, which):
    """What holds the network's weights or biases: a list of modules or parameters, or one parameter."""
    names = ("w", "cross_layer_w", "cross_layer_v", "kernels", "V_kernels", "V_list", "v_kernels")
    names = names if which == "weight" else ("b", "cross_layer_b", "bias", "v_kernels")
    return next(getattr(network, name) for name in ("cross_net", "cross_layers", *names) if hasattr(network, name))


def share_all(network):
    """One set of weights for all layers, as a recurrent network has."""
    for which in ("weight", "bias"):
        container = layers(network, which)
        if isinstance(container, nn.Module):
            for i in range(1, len(container)):
                container[i] = container[0]


def share_weights(network):
    container = layers(network, "weight")
    if isinstance(container, nn.Module):
        container[2] = container[0]


def tie_biases(network):
    container = layers(network, "bias")
    if isinstance(container, nn.ParameterList):
        container[2] = container[0]
    elif isinstance(container, nn.ModuleList):
        container[2].bias = container[0].bias


def freeze_weights(network):
    container = layers(network, "weight")
    for parameter in [container] if isinstance(container, nn.Parameter) else container.parameters():
        parameter.requires_grad_(False)


def freeze_one(network):
    next(network.parameters()).requires_grad_(False)


def freeze_all(network):
    network.requires_grad_(False)


def evaluate(network):
    network.eval()


def accumulate(network):
    for parameter in network.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)


def add_buffer(network):
    network.register_buffer("seen", torch.arange(3))


def add_parameter_hooks(network):
    def add_one(parameter):
        parameter.grad += 1

    for parameter in network.parameters():
        parameter.register_hook(lambda grad: 2 * grad)
        parameter.register_post_accumulate_grad_hook(add_one)


def add_own_hooks(network):
    network.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    network.register_forward_hook(lambda module, args, output: 2 * output)
    network.register_full_backward_hook(lambda module, grad_input, grad_output: (2 * grad_input[0],))


CHANGES = [
    share_all,
    share_weights,
    tie_biases,
    freeze_weights,
    freeze_one,
    freeze_all,
    evaluate,
    accumulate,
    add_buffer,
    add_parameter_hooks,
    add_own_hooks,
]


def results(network, x):
    """Output and every gradient, as a training step leaves them."""
    x = x.clone().requires_grad_()
    y = cross(network)(x)
    (y * y).sum().backward()
    return {"y": y, "dx": x.grad} | {name: parameter.grad for name, parameter in network.named_parameters()}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_the_class_alone_and_no_number(build, change):
    network, theirs = (randomise(build(8, 3)).double() for _ in range(2))
    change(network)
    change(theirs)
    before = snapshot(network, classes=False)
    assert fastcross.swap(network).swapped
    assert snapshot(network, classes=False) == before
    x = torch.randn(6, 8, dtype=torch.float64)
    expected, found = results(theirs, x), results(network, x)
    for name, value in expected.items():
        if value is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)
    fastcross.swap(network, undo=True)
    after = snapshot(network)
    assert after["classes"] == {name: type(module) for name, module in theirs.named_modules(remove_duplicate=False)}


def test_the_instance_that_was_reported():
    """Version 0.1.0 left a random float64 tensor where the parameter was, and reported the layer as left."""
    network = torchfm(4, 2)
    network.w[1] = network.w[0]
    parameter, values = network.w[0].weight, network.w[0].weight.detach().clone()
    fastcross.swap(network)
    assert network.w[0].weight is network.w[1].weight is parameter
    assert isinstance(parameter, nn.Parameter)
    assert torch.equal(parameter, values)


def test_one_tensor_for_weights_and_biases():
    network = randomise(deepctr(8, 3)).double()
    network.bias = network.kernels
    x = torch.randn(6, 8, dtype=torch.float64)
    theirs = copy.deepcopy(network)
    assert fastcross.swap(network).swapped
    for name, value in results(theirs, x).items():
        torch.testing.assert_close(results(copy.deepcopy(network), x)[name], value, rtol=1e-12, atol=1e-12)


def test_two_owners():
    """A network under two names, and two networks that share a layer: each swapped once, and undone once."""
    shared, other = randomise(torchfm(8, 2)), randomise(torchfm(8, 3))
    other.w[1] = shared.w[0]
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared), "c": other})
    before = snapshot(model, classes=False)
    expected = shared(torch.ones(2, 8)), other(torch.ones(2, 8))
    report = fastcross.swap(model)
    assert [entry.name for entry in report.swapped] == ["a", "c"]
    assert snapshot(model, classes=False) == before
    assert isinstance(model["b"][0], Swapped)
    for y, network in zip(expected, (shared, other), strict=True):
        torch.testing.assert_close(network(torch.ones(2, 8)), y)
    assert len(fastcross.swap(model, undo=True).restored) == 2
    assert snapshot(model, classes=False) == before


def test_where_the_caller_stands(build):
    """A default device, dtype or mode of the caller decides nothing."""
    contexts = [torch.device("meta"), torch.autocast("cpu", torch.bfloat16), torch.inference_mode(), torch.no_grad()]
    for context in contexts:
        network = randomise(build(8, 2))
        before = snapshot(network, classes=False)
        with context:
            assert fastcross.swap(network).swapped, context
        assert snapshot(network, classes=False) == before


@pytest.mark.parametrize("to", [torch.float16, torch.bfloat16, "meta"], ids=str)
def test_half_precision_and_meta(build, to):
    network = build(8, 2).to(to)
    before = snapshot(network, classes=False)
    assert fastcross.swap(network).swapped or (to == torch.bfloat16 and build in SAME_PRODUCTS)
    assert snapshot(network, classes=False) == before


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def wrap_in_ddp(network):
    return nn.parallel.DistributedDataParallel(network)


def shard_fully(network):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(network, mesh=init_device_mesh("cpu", (1,)))


@pytest.mark.parametrize("wrap", [wrap_in_ddp, shard_fully])
@pytest.mark.parametrize("build", [torchrec, torchfm, recbole], ids=lambda build: build.__name__)
def test_wrapped_and_sharded(process_group, build, wrap):
    model = wrap(randomise(build(8, 2)))
    before = snapshot(model, classes=False)
    assert fastcross.swap(model).swapped
    assert snapshot(model, classes=False) == before


def test_flattened_parameters_are_left(process_group):
    """The first FSDP keeps all parameters in one flat tensor: the names are gone, and swap says so."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(torchfm(8, 2), device_id=torch.device("cpu"))
    before = snapshot(model)
    report = fastcross.swap(model)
    assert report.swapped == []
    assert "unexpected parameters" in report.left[0].note
    assert snapshot(model) == before


@pytest.mark.parametrize("build", [torchfm, torchrec], ids=lambda build: build.__name__)
def test_distributed_tensors_go_to_the_packages_own_code(process_group, build):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    network = distribute_module(randomise(build(8, 2)), mesh)
    x = distribute_tensor(torch.randn(4, 8), mesh, [Shard(0)])
    expected = network(x)
    before = snapshot(network, classes=False)
    assert fastcross.swap(network).swapped
    assert snapshot(network, classes=False) == before
    assert network(x).placements == expected.placements
    assert torch.equal(network(x).full_tensor(), expected.full_tensor())
    assert Replicate() in next(network.parameters()).placements
