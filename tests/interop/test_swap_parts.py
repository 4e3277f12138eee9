"""Cross networks with parts that are not the package's: left, bit for bit and object by object."""

import pytest
import torch
from peer_modules import deepctr, fuxictr, torchfm, torchrec, tzrec, with_gradients
from snapshot import assert_left
from torch import nn
from torch.nn.utils import parametrizations, prune

import fastcross


def _part(network):
    """A submodule that the network calls for its second layer, or None."""
    if hasattr(network, "cross_net"):
        return network.cross_net[1].weight
    return network.w[1] if hasattr(network, "w") else None


def own_forward_of_a_part(network):
    part = _part(network)
    part.forward = lambda x: 2 * nn.functional.linear(x, part.weight)


def part_of_another_class(network):
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    _part(network).__class__ = Doubled


def weight_norm(network):
    parametrizations.weight_norm(_part(network))


def old_weight_norm(network):
    with pytest.warns(FutureWarning):
        torch.nn.utils.weight_norm(_part(network))


def spectral_norm(network):
    """In training, each look at the weight is a step of its power iteration."""
    parametrizations.spectral_norm(_part(network))


def pruned(network):
    prune.l1_unstructured(_part(network), "weight", 0.5)


def hooked_part(network):
    _part(network).register_forward_hook(lambda *args: None)


def hooked_backward(network):
    _part(network).register_full_backward_hook(lambda *args: None)


def lazy_part(network):
    network.w[1] = nn.LazyLinear(1, bias=False)


def scripted_part(network):
    network.w[1] = torch.jit.script(network.w[1])


def compiled_part(network):
    _part(network).compile(backend="eager")


def more_outputs(network):
    network.w[1] = nn.Linear(8, 2, bias=False)


def part_with_bias(network):
    network.w[1] = nn.Linear(8, 1)


def missing_part(network):
    network.w[1] = None


CHANGES_OF_PARTS = [
    (own_forward_of_a_part, "own code failed.*it uses forward"),
    (part_of_another_class, "does not compute"),
    (weight_norm, "unexpected parameters: there is no parameter"),
    (old_weight_norm, "unexpected parameters: there is no parameter"),
    (spectral_norm, "unexpected parameters: there is no parameter"),
    (pruned, "unexpected parameters: there is no parameter"),
    (hooked_part, "a hook on one of its parts"),
    (hooked_backward, "a hook on one of its parts"),
    (compiled_part, "own code failed.*_compiled_call_impl"),
]


@pytest.mark.parametrize(("change", "reason"), CHANGES_OF_PARTS, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("build", [torchfm, fuxictr, tzrec])
@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
def test_parts_that_are_not_the_packages(build, change, reason, shared):
    network = with_gradients(build(8, 3))
    change(network)
    if shared:
        parts = network.w if hasattr(network, "w") else network.cross_net
        parts[0] = parts[1]
    assert_left(nn.Sequential(network), reason)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lazy_part, "unexpected parameters"),
        (scripted_part, "unexpected parameters.*TorchScript"),
        (more_outputs, "unexpected parameters"),
        (part_with_bias, "unexpected parameters: w.1.bias"),
        (missing_part, "unexpected parameters"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_other_parts(change, reason):
    network = with_gradients(torchfm(8, 3))
    change(network)
    assert_left(network, reason)


def test_global_hooks_are_not_run_and_not_lost():
    network = with_gradients(torchfm(8, 2))
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *args: seen.append(type(module)))
    try:
        assert_left(network, "hook")
        assert seen == []
        network(torch.randn(2, 8))
        assert nn.Linear in seen
        assert fastcross.swap(deepctr(8, 2)).swapped  # calls no parts
    finally:
        handle.remove()


@pytest.mark.parametrize("parametrised", ["kernels", "bias"])
def test_parametrised_parameters_of_deepctr(parametrised):
    network = with_gradients(deepctr(8, 3))
    looks = []

    class Counted(nn.Module):
        def forward(self, value):
            looks.append(value)
            return value

    torch.nn.utils.parametrize.register_parametrization(network, parametrised, Counted())
    looks.clear()
    assert_left(network, "unexpected parameters")
    assert looks == []


def test_parametrised_entry_of_a_parameter_list():
    network = with_gradients(torchrec(8, 3))
    torch.nn.utils.parametrize.register_parametrization(network.kernels, "1", nn.Identity())
    assert_left(network, "unexpected")


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64], ids=str)
def test_numbers_that_are_not_real(dtype):
    network = torchrec(8, 2)
    for values in (network.kernels, network.bias):
        for i in range(2):
            values[i] = nn.Parameter(torch.ones(8, 1, dtype=dtype), requires_grad=False)
    assert_left(network, "unexpected")
