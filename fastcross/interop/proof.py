"""The proof that a module's own code computes x0 (x·w) + b + x: run it once on random numbers in float64.

What runs is not the module but its skeleton: a fresh object of the same class, with fresh parameters under the same
names and copies of its plain attributes. Everything else that the module holds (buffers, other modules, hooks, other
objects) is absent, and code that asks for it fails. So nothing that runs here can reach the module or what it refers
to, and layers that share a module or a parameter stay as they are.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fastcross.interop.peers import Peer
from fastcross.kernels import closed_form

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_ROWS = 3


def difference(module: nn.Module, cls: type, peer: Peer, num_layers: int, in_features: int) -> str | None:
    """Why the module's own code is not the cross network: another version of a package may compute something else."""
    generator = torch.Generator().manual_seed(0)

    def random(rows: int) -> Tensor:
        numbers = torch.randn(rows, in_features, dtype=torch.float64, generator=generator, device="cpu")
        return numbers * in_features**-0.5

    # A default device, autocast or a gradient mode of the caller must not decide; nor may its random state change.
    with torch.device("cpu"), torch.autocast("cpu", enabled=False), torch.no_grad(), torch.random.fork_rng(devices=()):
        x0, weight, bias = random(_ROWS), random(num_layers), random(num_layers)
        expected = closed_form.cross_network(x0, weight, bias)
        try:
            values = {}
            for key, rows in ((peer.weight, weight), (peer.bias, bias)):
                for layer in range(num_layers):
                    name = key.format(layer)
                    values[name] = (rows[layer] if "{}" in key else rows).reshape(registered(module, name).shape)
            for training in (True, False):
                theirs = getattr(cls, peer.method)(_skeleton(module, values, training), x0.clone())
                if theirs.shape != expected.shape:
                    return f"it does not compute x0 (x·w) + b + x: its output is {tuple(theirs.shape)}, not (B, d)"
                error = (theirs - expected).abs().max().item()
                if not error < 1e-9:
                    return f"it does not compute x0 (x·w) + b + x: off by {error:.2g} on a small input"
        except Exception as failure:  # whatever another package's code may raise
            return f"its own code failed on a small input: {type(failure).__name__}: {failure}"
    return None


def registered(module: nn.Module, name: str) -> Tensor:
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
    """Stands for what the module holds and the cross network must not need: any use of it raises."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _raise(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"it uses {self._name}, which is no part of the cross network that fastcross knows")

    __getattr__ = __call__ = __bool__ = __eq__ = __hash__ = _raise


def _skeleton(module: nn.Module, values: dict[str, Tensor], training: bool) -> Any:
    """A new module of the same class that has ``values``, by dotted name, and the plain attributes; nothing else."""
    cls = next(cls for cls in type(module).__mro__ if "peer_class" not in vars(cls))  # swapped: as it was before
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
        if part is not None and inner:
            skeleton._modules[name] = _skeleton(part, inner, training)
        else:
            skeleton._modules[name] = None if part is None else _Absent(name)
    for name, value in values.items():
        if "." not in name:
            skeleton._parameters[name] = nn.Parameter(value, requires_grad=False)
    return skeleton


def _plain(value: Any, name: str) -> Any:
    """A copy of a plain value; anything else might be changed, or decide what is computed, and is absent."""
    if type(value) in _PLAIN:
        return value
    if type(value) in (list, tuple, set):
        return type(value)(_plain(each, name) for each in value)
    if type(value) is dict:
        return {_plain(key, name): _plain(each, name) for key, each in value.items()}
    return _Absent(name)
