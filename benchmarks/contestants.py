"""Who competes on the cross operators: the eager loop, torch.compile of it, fastcross, the peers' modules, a copy."""

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastcross
from benchmarks import clock, counts, memory
from benchmarks.harness import Contestant, Expected, Missing, Refused
from fastcross import reference
from fastcross.interop.peers import PEERS

EAGER, COMPILED, OURS, CLOSED_FORM, COPY = "eager loop", "torch.compile", "fastcross", "closed form", "copy of x0"
PEER_CLASSES = {
    "DeepCTR-Torch": "deepctr_torch.layers.interaction.CrossNet",
    "TorchRec": "torchrec.modules.crossnet.VectorCrossNet",
    "FuxiCTR": "fuxictr.pytorch.layers.interactions.cross_net.CrossNet",
    "torchfm": "torchfm.layer.CrossNetwork",
}
SWAPPED = ", swapped"
GRAPH = ", CUDA graph"
LOOPS = (OURS, CLOSED_FORM, EAGER, COMPILED)
# Rows whose results are compared in a large batch: the incoming gradient of all others is zero, so that the weights'
# gradients come from these rows alone, and the float64 reference never sees the others.
VERIFIED_ELEMENTS = 1 << 21

Leaves = Mapping[str, list[Tensor]]  # operands by their name in the paper; a peer's weights may be one tensor per layer


def everyone(*peers: str, compiled: bool = True) -> tuple[str, ...]:
    """The contestants of an operator, these peers among them; replayed CUDA graphs where there is a GPU.

    ``compiled``: torch.compile, too, which takes ten seconds and more to begin.
    """
    graphs = (OURS + GRAPH, EAGER + GRAPH) if clock.device().type == "cuda" else ()
    loops = LOOPS if compiled else tuple(name for name in LOOPS if name != COMPILED)
    return (*loops, *graphs, *peers, COPY)


def import_peer(path: str) -> Any:
    """``package.module.Name``; Missing, with how to get it, where the package is not there."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        reason = f"not installed ({error}); pip install --no-deps -r requirements-peers.txt"
        raise Missing(reason) from error


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.compile for the shape at hand, afresh: the ninth shape of a function would silently run in eager mode."""
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False)


def swap_or_refuse(name: str, module: nn.Module) -> None:
    if not (report := fastcross.swap(module)).swapped:
        raise Refused(f"{name}: nothing was swapped: {report}")


@dataclass(frozen=True)
class Problem:
    """One cross operator on one shape; the pass that is timed is the pass that is verified."""

    operator: str
    rows: int
    d: int
    layers: int = 1
    dtype: str = "float32"
    backward: bool = True
    latency: bool = False
    outputs: int = 1
    budget: float | None = None  # seconds of timing; None for the group's own

    def __str__(self) -> str:
        kind = "forward + backward" if self.backward else "forward"
        layers = "" if self.operator == "cross_layer" else f", L = {self.layers}"
        return f"{self.operator}, B = {self.rows}, d = {self.d}{layers}, {self.dtype}, {kind}"

    def describe(self) -> dict[str, Any]:
        itemsize = getattr(torch, self.dtype).itemsize
        floor = counts.floor_bytes(self.operator, self.rows, self.d, itemsize, self.backward)
        copies = counts.floor_copies(self.operator, self.backward)
        return {"title": str(self), **asdict(self), "floor_bytes": floor, "floor_copies": copies}

    @functools.cached_property
    def operands(self) -> dict[str, Tensor]:
        """x0 of unit variance, weights as CrossNetwork initialises them, biases that are not zero."""
        device = clock.device()
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            kind = torch.float64 if self.dtype == "float64" else torch.float32
            values = torch.randn(*shape, generator=generator, device=device, dtype=kind)
            return values.mul_(scale).to(getattr(torch, self.dtype))

        shape = (self.d,) if self.operator == "cross_layer" else (self.layers, self.d)
        made = {"x0": normal(self.rows, self.d)}
        if self.operator == "cross_layer":
            made["x"] = normal(self.rows, self.d)
        made |= {"w": normal(*shape, scale=(self.d * self.layers) ** -0.5), "b": normal(*shape, scale=0.3)}
        if self.operator == "cross_logits":
            made["v"] = normal(self.outputs, self.d, scale=self.d**-0.5)
        return made

    @functools.cached_property
    def dy(self) -> Tensor:
        """The incoming gradient."""
        x0 = self.operands["x0"]
        width = self.outputs if self.operator == "cross_logits" else self.d
        generator = torch.Generator(x0.device).manual_seed(1)
        return torch.randn(self.rows, width, generator=generator, device=x0.device).to(x0.dtype)

    @functools.cached_property
    def sample(self) -> Tensor:
        """The rows that are compared, first and last among them."""
        count = min(self.rows, max(64, VERIFIED_ELEMENTS // self.d))
        return torch.linspace(0, self.rows - 1, count, dtype=torch.float64).long().unique().to(self.dy.device)

    def expected(self) -> dict[str, Expected]:
        """err(contestant, ref64) <= 2 · err(eager loop in the same dtype, ref64) + atol, the rule of the tests.

        atol: 16 units in the last place of the largest value. The peers' sums run in orders of their own, and the
        eager loop may be lucky. In float64 the loop is its own reference, and the longest sums' roundings count.
        """
        loop = getattr(reference, self.operator)
        sampled = {k: t[self.sample] if k in ("x0", "x") else t for k, t in self.operands.items()}
        dy = self.dy[self.sample]

        def results(dtype: torch.dtype) -> dict[str, Tensor]:
            leaves = {k: [t.to(dtype).requires_grad_()] for k, t in sampled.items()}
            return self._results(lambda: loop(*(t[0] for t in leaves.values())), leaves, dy.to(dtype), slice(None))

        exact, eager = results(torch.float64), results(self.operands["x0"].dtype)
        units = 4096 if self.dtype == "float64" else 16
        return {
            key: Expected(
                value,
                float(
                    2 * (eager[key].double() - value).abs().max()
                    + units * torch.finfo(eager[key].dtype).eps * value.abs().max()
                ),
            )
            for key, value in exact.items()
        }

    def enter(self, name: str) -> Contestant:
        if name == COPY:
            return self._copy()
        if name.endswith(GRAPH):
            return _graph(self.enter(name.removesuffix(GRAPH)))
        self._check_memory(name)
        forward, leaves = self._contestant(name)
        every = [t for tensors in leaves.values() for t in tensors]
        masked = torch.zeros_like(self.dy)
        masked[self.sample] = self.dy[self.sample]

        def step() -> object:
            if not self.backward:
                with torch.no_grad():
                    return forward()
            return torch.autograd.grad(forward(), every, self.dy)

        results = functools.partial(self._results, forward, leaves, masked, self.sample)
        return Contestant(step, results, forward=forward if self.backward else None, leaves=every)

    def _check_memory(self, name: str) -> None:
        """Layer by layer, a network keeps an activation for each layer, and a handful of tensors beside them."""
        if name in (OURS, CLOSED_FORM, COMPILED):
            return
        needed = (self.layers + 6) * self.operands["x0"].nbytes
        available = memory.available_bytes(self.operands["x0"].device)
        if needed > available:
            raise Missing(f"needs about {needed / 2**30:.0f} GiB; {available / 2**30:.0f} GiB are free")

    def _contestant(self, name: str) -> tuple[Callable[[], Tensor], Leaves]:
        """A forward pass, and the tensors whose gradients are taken."""
        if name.removesuffix(SWAPPED) in PEER_CLASSES:
            return self._peer(name)
        if name in (EAGER, COMPILED):
            function = getattr(reference, self.operator)
        else:
            backend = {OURS: "auto", CLOSED_FORM: "torch"}[name]
            function = functools.partial(getattr(fastcross, self.operator), backend=backend)
        if name == COMPILED:
            function = compiled(function)
        leaves = {k: t.detach().requires_grad_() for k, t in self.operands.items()}
        return lambda: function(*leaves.values()), {k: [t] for k, t in leaves.items()}

    def _peer(self, name: str) -> tuple[Callable[[], Tensor], Leaves]:
        """The package's own module with our weights in it."""
        path = PEER_CLASSES[name.removesuffix(SWAPPED)]
        if self.operator == "cross_layer":
            raise Missing("its module is a whole network, whose layers cannot be called one by one")
        x0, w, b = (self.operands[k] for k in ("x0", "w", "b"))
        module: nn.Module = import_peer(path)(self.d, self.layers).to(x0.device, x0.dtype)
        peer = PEERS[path]
        leaves = {"x0": [x0.detach().requires_grad_()]}
        for key, template, values in (("w", peer.weight, w), ("b", peer.bias, b)):
            names = dict.fromkeys(template.format(layer) for layer in range(self.layers))
            leaves[key] = [module.get_parameter(name) for name in names]
            with torch.no_grad():
                for parameter, part in zip(
                    leaves[key], values.flatten().split(values.numel() // len(names)), strict=True
                ):
                    parameter.copy_(part.view_as(parameter))
        if name.endswith(SWAPPED):
            swap_or_refuse(name, module)
        if self.operator == "cross_network":
            return lambda: module(leaves["x0"][0]), leaves
        leaves["v"] = [self.operands["v"].detach().requires_grad_()]
        return lambda: F.linear(module(leaves["x0"][0]), leaves["v"][0]), leaves

    def _results(self, forward: Callable[[], Tensor], leaves: Leaves, dy: Tensor, sample: Any) -> dict[str, Tensor]:
        """The sampled rows of the output, and of the gradients of rows; the weights' gradients whole."""
        if not self.backward:
            with torch.no_grad():
                return {"y": forward()[sample]}
        y = forward()
        gradients = iter(torch.autograd.grad(y, [t for tensors in leaves.values() for t in tensors], dy))
        results = {"y": y.detach()[sample]}
        for key, tensors in leaves.items():
            parts = [next(gradients) for _ in tensors]
            if key in ("x0", "x"):
                results[f"d{key}"] = parts[0][sample]
            else:
                results[f"d{key}"] = torch.cat([part.flatten() for part in parts]).view(self.operands[key].shape)
        return results

    def _copy(self) -> Contestant:
        """One read and one write of x0: the unit that the floor is counted in."""
        x0 = self.operands["x0"]
        return Contestant(x0.clone, lambda: {"x0": x0.clone()}, expected={"x0": Expected(x0, 0.0)})


@dataclass(frozen=True)
class Depths:
    """Several depths of one network in turns, so that their ratio is taken within a round: ``fastcross, L = 12``."""

    rows: int
    d: int
    latency: bool = False

    def __str__(self) -> str:
        return f"cross_network against itself, B = {self.rows}, d = {self.d}, float32, forward + backward"

    def describe(self) -> dict[str, Any]:
        return {"title": str(self), **asdict(self)}

    def expected(self) -> dict[str, Expected]:
        return {}

    def enter(self, name: str) -> Contestant:
        which, _, layers = name.partition(", L = ")
        problem = Problem("cross_network", self.rows, self.d, int(layers))
        return replace(problem.enter(which), expected=problem.expected())


def _graph(plain: Contestant) -> Contestant:
    """The contestant's step as a CUDA graph; a replay must give the bits of a plain call."""
    replay = clock.captured(plain.step)
    for ours, again in zip(_tensors(plain.step()), _tensors(replay()), strict=True):
        if not torch.equal(ours, again):
            raise Refused("a replayed CUDA graph gave other results than a plain call")
    return Contestant(replay, plain.results)


def _tensors(outputs: Any) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
