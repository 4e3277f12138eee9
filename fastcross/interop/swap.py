"""Make the cross networks of an existing model run on fastcross's operators, in place; and load the checkpoints of
other packages' cross networks.

A swapped module stays the same object, with the same parameters under the same names. Only its class changes, to a
subclass that overrides the one method which computes the cross network. So checkpoints load in both directions, the
optimiser keeps its state, and hooks, ``.to()``, ``deepcopy``, pickle, DDP, FSDP and torch.compile keep working.
"""

import copy
import functools
import inspect
import math
import re
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fastcross.layers.peers import PEERS, VECTOR, Peer, class_path, cross_sizes, peers_of, recognise
from fastcross.ops import backends, multiplicative

_ROUNDS = 11  # rounds of a measurement
CHECKPOINTS = (
    Peer("fastcross.CrossNetwork", VECTOR, {"weight": "weight", "bias": "bias"}),
    *(peer for peer in PEERS if peer.formula is VECTOR),
)


@dataclass(frozen=True)
class Entry:
    """One module: its name in the model, its class, and a note."""

    name: str
    kind: str
    note: str


@dataclass
class Report:
    """The result of :func:`swap`; prints as text.

    ``before`` and ``after`` are seconds of a forward and backward pass, if they were measured.
    """

    swapped: list[Entry] = field(default_factory=list)
    restored: list[Entry] = field(default_factory=list)
    left: list[Entry] = field(default_factory=list)
    before: float | None = None
    after: float | None = None

    def __str__(self) -> str:
        lines = []
        for what in ("swapped", "restored", "left"):
            for entry in getattr(self, what):
                lines.append(f"{what} {entry.name or '(the model itself)'} ({entry.kind}): {entry.note}")
        if self.before and self.after:
            times = f"{1e3 * self.before:.3g} ms before, {1e3 * self.after:.3g} ms after"
            lines.append(f"forward and backward pass: {times} ({self.before / self.after:.2f} times as fast)")
        return "\n".join(lines) or "nothing to do: no cross network of a package that fastcross knows"


def swap(model: nn.Module, *, undo: bool = False, measure: Any = None) -> Report:
    """Make every cross network in ``model`` run on fastcross's operators, in place.

    ``swap`` finds the modules of DeepCTR-Torch, TorchRec, FuxiCTR, torchfm, TorchEasyRec and RecBole anywhere in the
    model: rank-one, matrix, low-rank, mixture and gated networks. A module with other code or shapes is not changed,
    and the report names it with the reason.

    Args:
        model: any module, also a cross network itself.
        undo: restore the modules' own code.
        measure: a batch for ``model(batch)``, or a tuple for ``model(*batch)``. The report then has the time of a
            forward and backward pass before and after: the medians of 11 alternating rounds, on two copies of the
            model.

    Returns:
        The modules that were swapped (or restored), and those that look like a cross network and were left.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    if undo and measure is not None:
        raise ValueError("measure compares before and after a swap; got undo=True")
    report = Report()
    changes: list[tuple[nn.Module, type]] = []  # applied after all modules were checked, so that an error changes none
    for name, module in _modules(model):
        kind = class_path(type(module))
        if undo:
            if "peer_class" in vars(type(module)):
                changes.append((module, vars(type(module))["peer_class"]))
                report.restored.append(Entry(name, kind, "runs its own code"))
            elif isinstance(module, Swapped):
                report.left.append(Entry(name, kind, "its class was changed again after the swap"))
        elif isinstance(module, Swapped):
            report.left.append(Entry(name, kind, "already swapped"))
        elif isinstance(found := _swappable(module), tuple):
            peer, cls = found
            if reason := _gains_nothing(peer, module):
                report.left.append(Entry(name, kind, reason))
                continue
            changes.append((module, cls))
            numbers = ", ".join(f"{symbol} = {n}" for symbol, n in cross_sizes(module, peer).items())
            report.swapped.append(Entry(name, kind, f"{numbers}; {_backend(peer, module)}"))
        elif found is not None:
            report.left.append(Entry(name, kind, found))
    if measure is not None and changes:
        report.before, report.after = _measure(model, measure)
    for module, cls in changes:
        object.__setattr__(module, "__class__", cls)
    return report


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules by name, without the parts of known cross networks, which are swapped or left as a whole."""
    parts: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module not in parts:
            yield name, module
            if any(peer.method == "forward" for cls in type(module).__mro__ for peer in peers_of(cls)):
                parts.update(module.modules())


def _gains_nothing(peer: Peer, module: nn.Module) -> str | None:
    """Why the package's own code is as fast for any number of rows; None if it is not."""
    weight = _weight(peer, module)
    if peer.formula.fewer_products or weight.device.type != "cpu":
        return None
    if weight.dtype == torch.bfloat16:
        return "nothing to gain in bfloat16, where fastcross runs the same GEMMs"
    if backends.choose_kernels("auto", weight.device, weight.dtype) == "torch":
        return "nothing to gain from plain PyTorch: the C++ library is not built"
    return None


def _backend(peer: Peer, module: nn.Module) -> str:
    """The backend of a swapped module on its parameters' device, and when the package's own code runs instead."""
    weight = _weight(peer, module)
    own = [] if peer.formula.autocast else ["under autocast"]
    chosen = backends.choose_kernels("auto", weight.device, weight.dtype)
    if chosen == "triton":
        backend = "Triton"
    elif chosen == "cpu" and (peer.formula.autocast or weight.dtype != torch.bfloat16):
        backend = f"C++, {backends.instruction_set()}"
        if not peer.formula.fewer_products:
            own.insert(0, f"below {math.ceil(multiplicative.SMALL / peer.multiplications(module))} rows")
    elif chosen == "cpu":
        backend = "plain PyTorch, which is faster in bfloat16"
    elif weight.device.type == "cpu" and weight.dtype in backends.CPU_DTYPES:
        backend = "plain PyTorch: the C++ library is not built"
    else:
        backend = f"plain PyTorch: no kernel for {weight.dtype} on {weight.device.type}"
    return f"{backend}; the package's own code {' and '.join(own)}" if own else backend


def _weight(peer: Peer, module: nn.Module) -> Tensor:
    return module.get_parameter(peer.state_keys(cross_sizes(module, peer))[0])


def _measure(model: nn.Module, batch: Any) -> tuple[float, float]:
    """Seconds of a forward and backward pass of the model, as it is and swapped: medians."""
    models = copy.deepcopy(model), copy.deepcopy(model)
    swap(models[1])
    kind = next(model.parameters()).device.type
    devices = [torch.device(kind, index) for index in range(torch.cuda.device_count())] if kind == "cuda" else []
    seconds: tuple[list[float], list[float]] = ([], [])
    with torch.enable_grad(), torch.random.fork_rng(devices=devices):
        for _ in range(2 + _ROUNDS):
            for each, found in zip(models, seconds, strict=True):
                each.zero_grad()
                start = time.perf_counter()
                results = list(_differentiable(each(*batch) if isinstance(batch, tuple) else each(batch)))
                if not results:
                    raise ValueError("the model's output for this batch has no tensor that can be differentiated")
                torch.autograd.backward(results, [torch.ones_like(result) for result in results])
                if kind == "cuda":
                    torch.cuda.synchronize()
                found.append(time.perf_counter() - start)
    before, after = (statistics.median(found[2:]) for found in seconds)  # without what is done once
    return before, after


def _differentiable(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.requires_grad:
            yield output
    elif isinstance(output, Mapping | list | tuple):
        for each in output.values() if isinstance(output, Mapping) else output:
            yield from _differentiable(each)


def _swappable(module: nn.Module) -> tuple[Peer, type] | str | None:
    """The module's peer and its new class; or the reason why it is not swapped; None if it is no cross network."""
    found = recognise(module)
    if not isinstance(found, Peer):
        return found
    try:
        cls = swapped_class(type(module), found)  # type: ignore[arg-type]
        object.__setattr__(object.__new__(type(module)), "__class__", cls)  # fails for a class with __slots__
    except Exception as error:  # a metaclass or __init_subclass__ of somebody else's
        return f"its class cannot be changed: {type(error).__name__}: {error}"
    return found, cls


class Swapped(nn.Module):
    """The base of the classes of swapped modules."""

    peer_class: type
    peer: Peer

    def __reduce_ex__(self, protocol: Any) -> tuple:
        # The generated class cannot be imported by name: store the package's class, and generate it again.
        reduced: Any = super().__reduce_ex__(max(int(protocol), 2))
        function, (cls, *arguments), *state = reduced
        assert cls is type(self)
        return _new, (cls.peer_class, cls.peer.formula.text, function, *arguments), *state

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), "on fastcross")))


def _new(peer_class: Any, formula: str, function: Any, *arguments: Any) -> Any:
    peers = [peer for cls in peer_class.__mro__ for peer in peers_of(cls) if peer.formula.text == formula]
    if not peers:
        raise ValueError(f"{class_path(peer_class)} was swapped for {formula}, which is unknown here")
    return function(swapped_class(peer_class, peers[0]), *arguments)


@functools.cache
def swapped_class(peer_class: Any, peer: Peer) -> Any:
    """The subclass of a package's class (or of a user's subclass of it) that runs on fastcross's operators."""
    original = getattr(peer_class, peer.method)
    _, argument, *_ = inspect.signature(original).parameters

    @functools.wraps(original)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        given: Any = args[0] if args else kwargs.get(argument)
        # An FX proxy is no tensor; a TorchScript trace cannot hold the autograd Function.
        if len(args) + len(kwargs) != 1 or not isinstance(given, Tensor) or torch.jit.is_tracing():
            return original(self, *args, **kwargs)
        x0 = peer.prepare(given)
        if not _gains(peer, self, x0) or not _takes(peer, x0, parameters := peer.parameters(self)):
            return original(self, *args, **kwargs)
        # Under autocast the package adds a half-precision product to a float32 bias, and returns float32.
        return peer.finish(self, peer.formula(x0.to(parameters["bias"].dtype), parameters))

    # The package's own name, since some look modules up by it.
    names = {name: getattr(peer_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    members = {**names, "peer_class": peer_class, "peer": peer, peer.method: method}
    return type(peer_class.__name__, (Swapped, peer_class), members)


def _gains(peer: Peer, module: nn.Module, x0: Tensor) -> bool:
    """Whether the operator is faster than the package's own code, as far as it is known: on a CPU."""
    if peer.formula.fewer_products or x0.device.type != "cpu":
        return True
    if backends.choose_kernels("auto", x0.device, x0.dtype) == "torch":
        return False
    return multiplicative.gains_by_steps(x0.dtype, x0.shape[:-1].numel(), peer.multiplications(module))


def _takes(peer: Peer, x0: Tensor, parameters: Mapping[str, Tensor]) -> bool:
    """Whether the operator takes this input as the package does. Otherwise the package's code runs, also for errors."""
    if any(hasattr(tensor, "__tensor_flatten__") for tensor in (x0, *parameters.values())):  # a DTensor, …
        return False
    bias = parameters["bias"]
    if x0.dim() < 1 or x0.shape[-1] != bias.shape[1] or x0.device != bias.device:
        return False
    if x0.dim() != 2 and not peer.leading_dimensions:
        return False
    if torch.is_autocast_enabled(x0.device.type) and not peer.formula.autocast:
        return False
    if all(parameter.dtype == x0.dtype for parameter in parameters.values()):
        return True
    is_half = x0.dtype in (torch.float16, torch.bfloat16)
    in_single = all(parameter.dtype == torch.float32 for parameter in parameters.values())
    return is_half and in_single and torch.is_autocast_enabled(x0.device.type)


def cross_state_dict(state_dict: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """The state_dict of a :class:`fastcross.CrossNetwork`, from the checkpoint of any package in ``PEERS``.

    Args:
        state_dict: a checkpoint of a cross network, or of a whole model.
        prefix: the prefix of the cross network's keys, such as ``"crossnet."``.

    Returns:
        ``{"weight": (L, d), "bias": (L, d)}``.
    """
    found = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
    peer = max(CHECKPOINTS, key=lambda peer: len(_layers(peer.keys.values(), found)))
    layers = _layers(peer.keys.values(), found)
    if not layers:
        prefixes = sorted({p for key in state_dict for p in _prefixes(key)})
        hint = f"; there are some under {', '.join(map(repr, prefixes))}" if prefixes else ""
        raise ValueError(f"no keys of a cross network under the prefix {prefix!r}, of {len(state_dict)} keys{hint}")
    num_layers = max(layers) + 1
    expected = peer.state_keys({"L": num_layers})
    # RecBole's cross network is part of its model, so other keys of the model have the same prefix.
    mine = found if peer.method == "forward" else [key for key in found if key.startswith("cross_layer_")]
    missing = [prefix + key for key in expected if key not in found]
    extra = [prefix + key for key in mine if key not in expected]
    if missing or extra:
        raise ValueError(f"not a cross network's keys: missing {_listed(missing)}; extra {_listed(extra)}")
    tensors = {
        name: [found[key.format(layer)] for layer in range(num_layers)] if "{}" in key else found[key]
        for name, key in peer.keys.items()
    }
    shapes = ", ".join(f"{prefix + key} {tuple(found[key].shape)}" for key in expected)
    try:
        cross = peer.stacked(tensors)
    except (RuntimeError, IndexError) as error:
        raise ValueError(f"the layers have different shapes: {shapes}") from error
    if cross["weight"].shape != cross["bias"].shape:
        raise ValueError(f"not one vector per layer: {shapes}")
    return cross


def _layers(templates: Iterable[str], keys: Iterable[str]) -> list[int]:
    """The layer number in each of the keys that fits one of the templates."""
    pattern = "|".join(re.escape(template).replace(r"\{\}", r"(\d+)") for template in templates)
    matches = [match for key in keys if (match := re.fullmatch(pattern, key))]
    return [int(match[match.lastindex] if match.lastindex else 0) for match in matches]


def _prefixes(key: str) -> Iterable[str]:
    """The possible prefixes of a key that ends like a cross network's weight."""
    ends = [key[dot.end() :] for dot in re.finditer(r"\.", key)]
    return (key.removesuffix(end) for end in ends if _layers((peer.keys["weight"] for peer in CHECKPOINTS[1:]), [end]))


def _listed(keys: list[str]) -> str:
    return ", ".join(keys[:8]) + (f" and {len(keys) - 8} more" if len(keys) > 8 else "") if keys else "none"
