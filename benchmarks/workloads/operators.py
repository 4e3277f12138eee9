"""One operator on one shape: every contestant on the same operands, output and gradients checked before the time."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastcross
from benchmarks.contestants import Contestant
from benchmarks.harness import clock, memory
from benchmarks.harness.measure import Entry, Expected, Missing
from benchmarks.workloads import calls
from fastcross import reference
from fastcross.layers import peers

# Rows whose results are compared in a large batch: the incoming gradient of all others is zero, so that the weights'
# gradients come from these rows alone, and the float64 reference never sees the others.
VERIFIED_ELEMENTS = 1 << 21

# Operands by their name in the paper, with ".mT" if they are stored transposed. A peer may have a tensor per layer.
Leaves = Mapping[str, list[Tensor]]
Traffic = tuple[int, int]  # reads and writes of a (B, d) tensor


@dataclass(frozen=True)
class Operator:
    """One of fastcross's operators, as fastcross.NAME and fastcross.reference.NAME.

    Sizes are written as in the papers: B rows, d features, L layers, C outputs, rank r, K experts.
    """

    name: str
    title: str
    operands: tuple[tuple[str, str], ...]  # in the order of the call: name, size ("Ld" is (L, d))
    output: str
    forward: Traffic  # no implementation moves less
    backward: Traffic
    peers: tuple[Contestant, ...] = ()  # who have it, in their own packages
    tail: str | None = None  # the operand that a peer's network leaves to a linear layer after it

    def floor_copies(self, backward: bool) -> float:
        """The floor in copies of x0: one read and one write each."""
        return (sum(self.forward) + backward * sum(self.backward)) / 2

    @property
    def has_layers(self) -> bool:
        return any("L" in sizes for _, sizes in self.operands)


@dataclass(frozen=True)
class Problem:
    """The pass that is timed is the pass that is verified."""

    operator: Operator
    rows: int
    d: int
    layers: int = 1
    dtype: str = "float32"
    backward: bool = True
    latency: bool = False
    outputs: int = 1
    rank: int = 64
    experts: int = 4

    def __str__(self) -> str:
        kind = "forward + backward" if self.backward else "forward"
        used = "".join(sizes for _, sizes in self.operator.operands)
        others = {"L": self.layers, "r": self.rank, "K": self.experts}
        sizes = "".join(f", {symbol} = {size}" for symbol, size in others.items() if symbol in used)
        return f"{self.operator.name}, B = {self.rows}, d = {self.d}{sizes}, {self.dtype}, {kind}"

    def describe(self) -> dict[str, Any]:
        copies = self.operator.floor_copies(self.backward)
        return {
            "title": str(self),
            "kind": "operator",
            "operator": self.operator.name,
            **{key: getattr(self, key) for key in ("rows", "d", "layers", "dtype", "backward")},
            "floor_copies": copies,
            "floor_bytes": int(2 * copies * self.rows * self.d * self._dtype.itemsize),
        }

    @property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def _shape(self, sizes: str) -> list[int]:
        named = {"B": self.rows, "d": self.d, "L": self.layers, "C": self.outputs, "r": self.rank, "K": self.experts}
        return [named[size] for size in sizes]

    @functools.cached_property
    def operands(self) -> dict[str, Tensor]:
        """Rows of unit variance, weights as CrossNetwork initialises them, biases that are not zero."""
        generator = torch.Generator(clock.device()).manual_seed(0)
        made = {}
        for name, sizes in self.operator.operands:
            fan_in = self.d * (self.layers if "L" in sizes else 1)
            scale = 1.0 if "B" in sizes else 0.3 if name == "b" else fan_in**-0.5
            kind = torch.float64 if self.dtype == "float64" else torch.float32
            values = torch.randn(*self._shape(sizes), generator=generator, device=clock.device(), dtype=kind)
            made[name] = values.mul_(scale).to(self._dtype)
        return made

    @functools.cached_property
    def dy(self) -> Tensor:
        """The incoming gradient."""
        generator = torch.Generator(clock.device()).manual_seed(1)
        shape = self._shape(self.operator.output)
        return torch.randn(*shape, generator=generator, device=clock.device()).to(self._dtype)

    @functools.cached_property
    def sample(self) -> Tensor:
        """The rows that are compared, first and last among them."""
        count = min(self.rows, max(64, VERIFIED_ELEMENTS // self.d))
        return torch.linspace(0, self.rows - 1, count, dtype=torch.float64).long().unique().to(self.dy.device)

    def _has_rows(self, name: str) -> bool:
        return "B" in dict(self.operator.operands)[name]

    def expected(self) -> dict[str, Expected]:
        """err(contestant, ref64) <= 2 · err(eager loop in the same dtype, ref64) + atol, the rule of the tests.

        atol: 16 units in the last place of the largest value. The peers' sums run in orders of their own, and the
        eager loop may be lucky. In float64 the loop is its own reference, and the longest sums' roundings count.
        """
        loop = getattr(reference, self.operator.name)
        sampled = {k: t[self.sample] if self._has_rows(k) else t for k, t in self.operands.items()}
        dy = self.dy[self.sample]

        def results(dtype: torch.dtype) -> dict[str, Tensor]:
            leaves = {k: [t.to(dtype).requires_grad_()] for k, t in sampled.items()}
            return self._results(lambda: loop(*(t[0] for t in leaves.values())), leaves, dy.to(dtype), slice(None))

        exact, eager = results(torch.float64), results(self._dtype)
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

    def enter(self, contestant: Contestant) -> Entry:
        if contestant.floor is not None:
            return calls.FLOORS[contestant.floor](*self.operands.values())
        self._check_memory(contestant)
        forward, leaves = self._peer(contestant) if contestant.peer else self._ours(contestant)
        every = [t for tensors in leaves.values() for t in tensors]
        masked = torch.zeros_like(self.dy)
        masked[self.sample] = self.dy[self.sample]

        def step() -> object:
            if not self.backward:
                with torch.no_grad():
                    return forward()
            return torch.autograd.grad(forward(), every, self.dy)

        results = functools.partial(self._results, forward, leaves, masked, self.sample)
        entry = Entry(step, results, forward=forward if self.backward else None, leaves=every)
        return calls.graph(entry) if contestant.graph else entry

    def _check_memory(self, contestant: Contestant) -> None:
        """Layer by layer, a network keeps an activation for each layer, and a handful of tensors beside them."""
        if contestant.compiled or (contestant.peer is None and contestant.backend != "reference"):
            return
        needed = (self.layers + 6) * self.operands["x0"].nbytes
        available = memory.available_bytes(clock.device())
        if needed > available:
            raise Missing(f"needs about {needed / 2**30:.0f} GiB; {available / 2**30:.0f} GiB are free")

    def _ours(self, contestant: Contestant) -> tuple[Callable[[], Tensor], Leaves]:
        """A forward pass, and the tensors whose gradients are taken."""
        if contestant.backend == "reference":
            function = getattr(reference, self.operator.name)
        else:
            function = functools.partial(getattr(fastcross, self.operator.name), backend=contestant.backend)
        if contestant.compiled:
            function = calls.compiled(function)
        leaves = {k: t.detach().requires_grad_() for k, t in self.operands.items()}
        return lambda: function(*leaves.values()), {k: [t] for k, t in leaves.items()}

    def _peer(self, contestant: Contestant) -> tuple[Callable[[], Tensor], Leaves]:
        """The package's own module with our weights in it."""
        peer = contestant.peer
        assert peer is not None
        if not self.operator.has_layers:
            raise Missing("its module is a whole network, whose layers cannot be called one by one")
        x0 = self.operands["x0"]
        module: nn.Module = calls.import_peer(peer.path)(*self._shape(peer.sizes), **dict(peer.options))
        module = module.to(x0.device, x0.dtype)
        known = peers.recognise(module)
        if not isinstance(known, peers.Peer):
            raise Missing(f"another version of its module: {known}")
        leaves = {"x0": [x0.detach().requires_grad_()]}
        for name, key in known.keys.items():
            operand = {"weight": "w", "bias": "b"}.get(name, name) + (".mT" if key.endswith(".mT") else "")
            values = self._stored(operand)
            leaves[operand] = [module.get_parameter(own) for own in known.keys_of(name, len(values))]
            parts = values.flatten().split(values.numel() // len(leaves[operand]))
            with torch.no_grad():
                for parameter, part in zip(leaves[operand], parts, strict=True):
                    parameter.copy_(part.view(parameter.shape))
        if contestant.swapped:
            calls.swap_or_refuse(contestant.name, module)
        tail = self.operator.tail
        if tail is None:
            return lambda: module(leaves["x0"][0]), leaves
        leaves[tail] = [self.operands[tail].detach().requires_grad_()]
        return lambda: F.linear(module(leaves["x0"][0]), leaves[tail][0]), leaves

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
            name, _, transposed = key.partition(".")
            if self._has_rows(name):
                results[f"d{name}"] = parts[0][sample]
            else:
                gradient = torch.cat([part.flatten() for part in parts]).view(self._stored(key).shape)
                results[f"d{name}"] = gradient.mT if transposed else gradient
        return results

    def _stored(self, key: str) -> Tensor:
        """An operand, transposed if a package stores it so: "v.mT"."""
        name, _, transposed = key.partition(".")
        return self.operands[name].mT if transposed else self.operands[name]


@dataclass(frozen=True)
class Depths:
    """Several depths of one network in turns, so that their ratio is taken within a round."""

    problem: Problem
    latency: bool = False

    def __str__(self) -> str:
        one = self.problem
        return f"{one.operator.name} against itself, B = {one.rows}, d = {one.d}, {one.dtype}, forward + backward"

    def describe(self) -> dict[str, Any]:
        return self.problem.describe() | {"title": str(self), "kind": "depths"}

    def expected(self) -> dict[str, Expected]:
        return {}

    def enter(self, contestant: Contestant) -> Entry:
        assert contestant.layers is not None
        problem = replace(self.problem, layers=contestant.layers)
        return replace(problem.enter(contestant), expected=problem.expected())
