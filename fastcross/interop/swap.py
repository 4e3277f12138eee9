"""Make the cross networks of an existing model run on these operators, in place.

A swapped module stays the object it was, with the same parameters under the same names; only its class changes, to a
subclass of its own that overrides the one method which computes the cross network. So checkpoints load both ways, the
optimiser keeps its state, and hooks, ``.to()``, ``deepcopy``, pickle, DDP, FSDP and torch.compile go on as before.
"""

import functools
import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fastcross.layers.peers import Peer
from fastcross.layers.recognise import class_path, cross_sizes, peers_of, recognise


@dataclass(frozen=True)
class Entry:
    """One module: its name in the model, its class, and what there is to say about it."""

    name: str
    kind: str
    note: str


@dataclass
class Report:
    """What :func:`swap` did; prints as text."""

    swapped: list[Entry] = field(default_factory=list)
    restored: list[Entry] = field(default_factory=list)
    left: list[Entry] = field(default_factory=list)

    def __str__(self) -> str:
        lines = []
        for what in ("swapped", "restored", "left"):
            for entry in getattr(self, what):
                lines.append(f"{what} {entry.name or '(the model itself)'} ({entry.kind}): {entry.note}")
        return "\n".join(lines) or "nothing to do: no cross network of a package that fastcross knows"


def swap(model: nn.Module, *, undo: bool = False) -> Report:
    """Make every rank-one cross network in ``model`` run on these operators, in place.

    Known are the modules of DeepCTR-Torch, TorchRec, FuxiCTR, torchfm, TorchEasyRec and RecBole, anywhere in the model.
    A module whose code or shapes are not the known ones is left alone and named in the report, with the reason.

    Args:
        model: any module; a cross network itself, too.
        undo: give the swapped modules their own code back.

    Returns:
        What was swapped (or restored), and what looked like a cross network and was left.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    report = Report()
    changes: list[tuple[nn.Module, type]] = []  # made when all have been looked at, so that an error changes none
    for name, module in model.named_modules():
        kind = class_path(type(module))
        if undo:
            if "peer_class" in vars(type(module)):
                changes.append((module, type(module).peer_class))
                report.restored.append(Entry(name, kind, "runs its own code"))
            elif isinstance(module, Swapped):
                report.left.append(Entry(name, kind, "its class was changed again after the swap"))
        elif isinstance(module, Swapped):
            report.left.append(Entry(name, kind, "already swapped"))
        elif isinstance(found := _swappable(module), tuple):
            peer, cls = found
            changes.append((module, cls))
            sizes = cross_sizes(module, peer)
            report.swapped.append(Entry(name, kind, ", ".join(f"{symbol} = {n}" for symbol, n in sizes.items())))
        elif found is not None:
            report.left.append(Entry(name, kind, found))
    for module, cls in changes:
        object.__setattr__(module, "__class__", cls)
    return report


def _swappable(module: nn.Module) -> tuple[Peer, type] | str | None:
    """The peer that ``module`` is and the class it shall have; or why not; None for what is no cross network at all."""
    found = recognise(module)
    if not isinstance(found, Peer):
        return found
    try:
        cls = swapped_class(type(module))  # type: ignore[arg-type]
        object.__setattr__(object.__new__(type(module)), "__class__", cls)  # a class with __slots__ cannot be changed
    except Exception as error:  # a metaclass or __init_subclass__ of somebody else's
        return f"its class cannot be changed: {type(error).__name__}: {error}"
    return found, cls


class Swapped(nn.Module):
    """What the classes of swapped modules have in common."""

    peer_class: type

    def __reduce_ex__(self, protocol: Any) -> tuple:
        # The generated class cannot be found by name: name the package's own and generate it again.
        reduced: Any = super().__reduce_ex__(max(int(protocol), 2))
        function, (cls, *arguments), *state = reduced
        assert cls is type(self)
        return _new, (cls.peer_class, function, *arguments), *state

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), "on fastcross")))


def _new(peer_class: type, function: Any, *arguments: Any) -> Any:
    return function(swapped_class(peer_class), *arguments)


@functools.cache
def swapped_class(peer_class: Any) -> Any:
    """The subclass of a package's class (or of a user's subclass of it) that runs on these operators."""
    peer = next(peer for cls in peer_class.__mro__ for peer in peers_of(cls) if peer.formula.operator)
    formula: Any = peer.formula
    original = getattr(peer_class, peer.method)
    _, argument, *_ = inspect.signature(original).parameters

    @functools.wraps(original)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        x0: Any = args[0] if args else kwargs.get(argument)
        parameters = peer.parameters(self)
        if len(args) + len(kwargs) != 1 or not _takes(peer, x0, *parameters.values()):
            return original(self, *args, **kwargs)
        # Under autocast the package adds a half-precision product to a float32 bias, and returns float32.
        return formula.operator(x0.to(parameters["bias"].dtype), **parameters)

    # The package's own name, since some look modules up by it.
    names = {name: getattr(peer_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(peer_class.__name__, (Swapped, peer_class), {**names, "peer_class": peer_class, peer.method: method})


def _takes(peer: Peer, x0: Any, *parameters: Tensor) -> bool:
    """Whether the operator and the package agree on this input; anything else, errors included, is the package's."""
    # An FX proxy is no tensor; a TorchScript trace cannot hold the autograd Function.
    if not isinstance(x0, Tensor) or torch.jit.is_tracing():
        return False
    if any(hasattr(tensor, "__tensor_flatten__") for tensor in (x0, *parameters)):  # a DTensor, a nested tensor, …
        return False
    weight = parameters[0]
    if x0.dim() < 1 or x0.shape[-1] != weight.shape[1] or x0.device != weight.device:
        return False
    if x0.dim() != 2 and not peer.leading_dimensions:
        return False
    if all(parameter.dtype == x0.dtype for parameter in parameters):
        return True
    is_half = x0.dtype in (torch.float16, torch.bfloat16)
    in_single = all(parameter.dtype == torch.float32 for parameter in parameters)
    return is_half and in_single and torch.is_autocast_enabled(x0.device.type)
