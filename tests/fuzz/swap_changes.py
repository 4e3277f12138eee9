"""What may have been done to a network before it is swapped."""

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

CHANGES = []


def change(function):
    CHANGES.append(function)
    return function


def parts(network):
    """The lists of modules and of parameters that hold the layers."""
    return [each for each in network.children() if isinstance(each, nn.ModuleList | nn.ParameterList) and len(each)]


def linears(network):
    """Those that the layers hold."""
    return [each for container in parts(network) for each in container.modules() if type(each) is nn.Linear]


@change
def share(rng, network):
    for container in parts(network):
        if len(container) > 1 and rng.random() < 0.7:
            i, j = rng.sample(range(len(container)), 2)
            container[i] = container[j]


@change
def tie(rng, network):
    found = linears(network)
    if len(found) > 1:
        found[0].weight = found[-1].weight
    if isinstance(getattr(network, "kernels", None), nn.Parameter) and rng.random() < 0.5:
        network.bias = network.kernels


@change
def freeze(rng, network):
    for parameter in network.parameters():
        parameter.requires_grad_(rng.random() < 0.5)


@change
def cast(rng, network):
    network.to(rng.choice((torch.float64, torch.float64, torch.bfloat16, torch.float16)))


@change
def cast_one(rng, network):
    rng.choice(list(network.children()) or [network]).to(torch.float64)


@change
def evaluate(rng, network):
    network.eval()


@change
def accumulate(rng, network):
    for parameter in network.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)


@change
def hook(rng, network):
    target = rng.choice(list(network.modules()))
    rng.choice(
        (
            lambda: target.register_forward_hook(lambda *args: None),
            lambda: target.register_forward_pre_hook(lambda *args: None),
            lambda: target.register_full_backward_hook(lambda *args: None),
            lambda: target.register_state_dict_pre_hook(lambda *args: None),
        )
    )()


@change
def parameter_hook(rng, network):
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda grad: 2 * grad)


@change
def subclass(rng, network):
    members = rng.choice(({}, {"forward": lambda self, *args: super(cls, self).forward(*args)}, {"extra": 3}))
    cls = type("Mine", (type(network),), dict(members))
    network.__class__ = cls


@change
def subclass_part(rng, network):
    for linear in linears(network)[:1]:
        other = rng.choice((lambda self, x: nn.Linear.forward(self, x), lambda self, x: 2 * nn.Linear.forward(self, x)))
        linear.__class__ = type("Mine", (nn.Linear,), {"forward": other})


@change
def own_forward(rng, network):
    target = rng.choice([network, *linears(network)])
    own = type(target).forward
    target.forward = lambda *args: own(target, *args)


@change
def parametrise(rng, network):
    for linear in [each for each in linears(network)[:1] if "weight" in each._parameters]:  # not what was cut
        rng.choice((parametrizations.weight_norm, parametrizations.spectral_norm))(linear)


@change
def cut(rng, network):
    for linear in [each for each in linears(network)[:1] if "weight" in each._parameters]:
        prune.l1_unstructured(linear, "weight", 0.5)


@change
def attach(rng, network):
    network.register_buffer("seen", torch.arange(3))
    network.note = object()
    if rng.random() < 0.3:
        network.probe = nn.Identity()
    if rng.random() < 0.2:
        network.gate = nn.Parameter(torch.ones(1))


@change
def remove(rng, network):
    for container in parts(network)[:1]:
        if isinstance(container, nn.ModuleList):
            del container[rng.randrange(len(container))]
