"""Which modules are cross layers of a package that fastcross knows, with a test that they compute the known formula.

A module is recognised by the path of its class, by its registered parameters, and by a test: its own code runs once on
random numbers in float64. The code runs on a skeleton of the module: a new object of the same class, with new
parameters under the same names and copies of its plain attributes. Everything else of the module (buffers, other
modules, hooks, other objects) is absent, and code that uses it fails. PyTorch's activations, which have no state, are
present. So the test cannot change the module, or anything that it refers to or shares.
"""

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as torch_module

from fastcross.layers.peers import LOOKS_LIKE, PEERS, Formula, Peer

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_ACTIVATIONS = (torch.relu, torch.tanh, functional.relu, functional.tanh)
_ACTIVATION_MODULES = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Softmax, nn.Identity)


def class_path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def peers_of(cls: type) -> list[Peer]:
    """The entries for a class itself, without its base classes."""
    path = f".{class_path(cls)}"
    return [peer for peer in PEERS if path.endswith(f".{peer.path}")]


def recognise(module: nn.Module) -> Peer | str | None:
    """The module's entry in PEERS; the reason if it only looks like a cross network; None for other modules."""
    if isinstance(module, torch.jit.ScriptModule):
        looks_like = any(re.search(pattern, f".{module.original_name}") for pattern, _ in LOOKS_LIKE)
        return "compiled to TorchScript, which fixes its code; swap before scripting" if looks_like else None
    for cls in _own_classes(module):
        if peers := peers_of(cls):
            fitting = [peer for peer in peers if _misfit(module, peer) is None] or peers[:1]
            reasons = [_reason_to_leave(module, cls, peer) for peer in fitting]
            return fitting[reasons.index(None)] if None in reasons else reasons[0]
    name = class_path(type(module))
    if name.startswith("fastcross."):
        return None
    return next((what for pattern, what in LOOKS_LIKE if re.search(pattern, name)), None)


def cross_parameters(module: nn.Module, formula: Formula) -> dict[str, Tensor]:
    """The parameters of another package's cross layers; TypeError if they are not known with this formula."""
    peer = recognise(module)
    if isinstance(peer, Peer) and peer.formula is formula:
        return peer.parameters(module)
    what = peer.formula.text if isinstance(peer, Peer) else peer
    reason = f": {what}" if what else ""
    raise TypeError(f"no cross network of a package that fastcross knows: {class_path(type(module))}{reason}")


def cross_sizes(module: nn.Module, peer: Peer) -> dict[str, int]:
    """The number for each symbol of the formula's shapes, also for parameters that are sharded over processes."""
    return peer.formula.sizes(peer.stacked({name: _on_meta(module, key) for name, key in peer.keys.items()}))


def _own_classes(module: nn.Module) -> list[type]:
    """The classes of a module; for a swapped one, its classes before the swap."""
    return [cls for cls in type(module).__mro__ if "peer_class" not in vars(cls)]


def _reason_to_leave(module: nn.Module, cls: type, peer: Peer) -> str | None:
    if peer.method in vars(module):
        return f"this instance has its own {peer.method}"
    defined_by = next((c for c in _own_classes(module) if peer.method in vars(c)), None)
    if defined_by is not cls:
        return f"{class_path(defined_by or cls)} has {'its own' if defined_by else 'no'} {peer.method}"
    if misfit := _misfit(module, peer):
        return misfit
    sizes = cross_sizes(module, peer)
    if peer.method == "forward":
        names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        if extra := sorted(names - set(peer.state_keys(sizes))):
            return f"unexpected parameters: {', '.join(extra)}"
    if _hooks_on_parts(module, peer):
        return "a hook on one of its parts would no longer run"
    return _difference(module, cls, peer, sizes)


def _misfit(module: nn.Module, peer: Peer) -> str | None:
    """Why the module's parameters differ from the entry's; None if they agree."""
    try:
        cross_sizes(module, peer)
    except ValueError as error:
        return str(error)
    except (AttributeError, TypeError, RuntimeError, LookupError) as error:
        return f"unexpected parameters: {error}"
    return None


def _on_meta(module: nn.Module, key: str) -> Tensor | list[Tensor]:
    own = key.removesuffix(".mT")
    names = [own.format(layer) for layer in range(_count_layers(module, key))] if "{}" in key else [own]
    found = [_registered(module, name) for name in names]
    tensors = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in found]
    tensors = [t.mT for t in tensors] if key != own else tensors
    return tensors if "{}" in key else tensors[0]


def _count_layers(module: nn.Module, key: str) -> int:
    container = key.partition(".{}")[0]
    owner = module._modules.get(container)
    if owner is None:
        raise AttributeError(f"there is no {container}")
    layer = 0
    while str(layer) in owner._parameters or str(layer) in owner._modules:
        layer += 1
    return layer


def _hooks_on_parts(module: nn.Module, peer: Peer) -> bool:
    containers = {key.partition(".")[0] for key in peer.keys.values()}
    owners = [
        part
        for name, part in module.named_children()
        if peer.method == "forward" or name in containers or type(part) in _ACTIVATION_MODULES
    ]
    parts = [part for owner in owners for part in owner.modules()]
    calls_parts = any(not isinstance(part, nn.ParameterList | nn.ModuleList) for part in parts)
    # Global hooks run for every module that is called: torch keeps no public way to ask whether there are any.
    any_global = getattr(torch_module, "_has_any_global_hook", bool)
    return (calls_parts and any_global()) or any(
        part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
        for part in parts
    )


def _difference(module: nn.Module, cls: type, peer: Peer, sizes: dict[str, int]) -> str | None:
    """Why the module's code differs from the formula, as in another version of a package; None if it agrees."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator, device="cpu")

    # The caller's default device, autocast and gradient mode must not matter, and its random state must not change.
    with torch.device("cpu"), torch.autocast("cpu", enabled=False), torch.no_grad(), torch.random.fork_rng(devices=()):
        shapes = {name: [sizes.get(s) or int(s) for s in symbols] for name, symbols in peer.formula.shapes.items()}
        # Sums of about 1: an activation bends them.
        parameters = {name: random(*shape) * shape[-1] ** -0.5 for name, shape in shapes.items()}
        try:
            values = {name: random(*_registered(module, name).shape) for name in peer.head}
            for name, key in peer.keys.items():
                whole = parameters[name].mT if key.endswith(".mT") else parameters[name]
                for index, own in enumerate(peer.keys_of(name, len(parameters[name]))):
                    values[own] = (whole[index] if "{}" in key else whole).reshape(_registered(module, own).shape)
            for rows, training in ((3, True), (3, False), (1, False)):
                x0 = random(rows, sizes["d"])
                expected = peer.formula(peer.prepare(x0), parameters, backend="torch")
                expected = peer.finish(_skeleton(module, values, training), expected)
                theirs = getattr(cls, peer.method)(_skeleton(module, values, training), x0.clone())
                if theirs.shape != expected.shape:
                    got, needed = tuple(theirs.shape), tuple(expected.shape)
                    return f"it does not compute {peer.formula.text}: its output is {got}, not {needed}"
                error = ((theirs - expected).abs().max() / expected.abs().max()).item()
                if not error < 1e-9:
                    return f"it does not compute {peer.formula.text}: off by {error:.2g} on a small input"
        except Exception as failure:  # another package's code may raise anything
            return f"its own code failed on a small input: {type(failure).__name__}: {failure}"
    return None


def _registered(module: nn.Module, name: str) -> Tensor:
    """The parameter registered under a dotted name, without running properties such as a parametrised weight's."""
    *path, leaf = name.split(".")
    part: Any = module
    for step in path:
        part = None if part is None else part._modules.get(step)
    if isinstance(part, torch.jit.ScriptModule):
        raise AttributeError(f"{'.'.join(path)} is compiled to TorchScript")
    found = None if part is None else part._parameters.get(leaf)
    if found is None:
        raise AttributeError(f"there is no parameter {name}")
    return found


class _Absent:
    """Replaces an attribute that the cross network must not need: any use of it raises."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _raise(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"it uses {self._name}, which is no part of the cross network that fastcross knows")

    __getattr__ = __call__ = __bool__ = __eq__ = __hash__ = _raise


def _skeleton(module: nn.Module, values: dict[str, Tensor], training: bool) -> Any:
    """A new module of the same class with only ``values``, by dotted name, and the plain attributes."""
    cls = _own_classes(module)[0]
    skeleton: Any = object.__new__(cls)
    nn.Module.__init__(skeleton)
    own = vars(skeleton)
    own.update({name: _plain(value, name) for name, value in vars(module).items() if name not in own})
    own["training"] = training
    for name, value in (module._parameters | module._buffers).items():
        kind = skeleton._parameters if name in module._parameters else skeleton._buffers
        kind[name] = None if value is None else _Absent(name)
    for name, part in module._modules.items():
        inner = {key.removeprefix(f"{name}."): v for key, v in values.items() if key.startswith(f"{name}.")}
        if part is not None and (inner or type(part) in _ACTIVATION_MODULES):
            skeleton._modules[name] = _skeleton(part, inner, training)
        else:
            skeleton._modules[name] = None if part is None else _Absent(name)
    for name, value in values.items():
        if "." not in name:
            skeleton._parameters[name] = nn.Parameter(value, requires_grad=False)
    return skeleton


def _plain(value: Any, name: str) -> Any:
    """A copy of a plain value. Any other value could be changed, or change the result, and is absent."""
    if type(value) in _PLAIN or any(value is function for function in _ACTIVATIONS):
        return value
    if type(value) in (list, tuple, set):
        return type(value)(_plain(each, name) for each in value)
    if type(value) is dict:
        return {_plain(key, name): _plain(each, name) for key, each in value.items()}
    return _Absent(name)
